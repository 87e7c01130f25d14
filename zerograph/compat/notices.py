"""Warnings of what a configuration says: once for the job, on the user's line."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch.distributed as dist

from zerograph.base import source
from zerograph.runtime.job.environment import number_of

_rank: ContextVar[int | None] = ContextVar("rank of this process, where it has not joined the job yet", default=None)


@contextlib.contextmanager
def as_rank(number: int) -> Iterator[None]:
    """Set the rank that this process is about to have, for warnings before it joins the job."""
    token = _rank.set(number)
    try:
        yield
    finally:
        _rank.reset(token)


def say(message: str) -> None:
    """Warn, on rank 0."""
    known = dist.get_rank() if dist.is_initialized() else _rank.get()
    if (number_of("RANK", 0) if known is None else known) == 0:
        warnings.warn(f"zerograph: {message}", stacklevel=source.levels_to_user())
