"""Warn about a script or configuration of another system: on rank 0 only, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zerograph.base.source import warn_user
from zerograph.runtime.job.launchers import number_of

_warned_calls: set[str] = set()


def say(message: str) -> None:
    """Warn on rank 0."""
    if (dist.get_rank() if dist.is_initialized() else number_of("RANK", 0)) == 0:
        warn_user(f"zerograph: {message}")


def call_without_effect(call: str, reason: str) -> None:
    """Warn, once per process, that a call of another system's API has no effect."""
    if call not in _warned_calls:
        _warned_calls.add(call)
        say(f"{call} has no effect: {reason}")


def without_effect(owner: str, name: str, reason: str) -> Callable[..., None]:
    """Return a function, or a method, of another system's API that has no effect and says so."""

    def call(*args: Any, **options: Any) -> None:
        call_without_effect(f"{owner}.{name}()", reason)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"No effect here: {reason}."
    return call
