"""``clip_grad_max_norm`` and ``clip_grad_norm_type`` of an optimizer's groups, as OneFlow's optimizers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerograph.errors import ConfigError

_NORM, _TYPE = "clip_grad_max_norm", "clip_grad_norm_type"


def check_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a group says how to clip, but not all of it.

    Raises:
        ConfigError: one of the two without the other, or no numbers.
    """
    for number, group in enumerate(optimizer.param_groups):
        given = [name for name in (_NORM, _TYPE) if group.get(name) is not None]
        if len(given) == 1:
            missing = _TYPE if given[0] == _NORM else _NORM
            raise ConfigError(
                f"group {number} of {type(optimizer).__name__} has {given[0]}, but no {missing}: give both"
            )
        if given and not (isinstance(group[_NORM], (int, float)) and group[_NORM] > 0):
            raise ConfigError(f"{_NORM} = {group[_NORM]!r}: give the largest norm that gradients may have, more than 0")


def clip(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Clip the gradients of each group that says so together. For ``build()``, after ``backward()``."""
    for group in _clipped(optimizers):
        found = [parameter for parameter in group["params"] if parameter.grad is not None]
        if found:
            nn.utils.clip_grad_norm_(found, float(group[_NORM]), float(group[_TYPE]))


def clipping_facts(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return text that is equal where :func:`clip` does the same.

    Raises:
        ConfigError: as :func:`check_clipping`.
    """
    for optimizer in optimizers:
        check_clipping(optimizer)
    groups = _all(optimizers)
    return ", ".join("no" if group.get(_NORM) is None else f"{group[_NORM]} in norm {group[_TYPE]}" for group in groups)


def _all(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _clipped(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for group in _all(optimizers) if group.get(_NORM) is not None]
