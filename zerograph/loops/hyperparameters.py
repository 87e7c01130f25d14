"""Hyperparameters that optimizers had when their ``step()`` was called, for an update that runs later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

# The hyperparameters of a parameter group.
Group = dict[str, Any]


def copied(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Return a copy of the hyperparameters of each group."""
    return [
        {key: copy.copy(value) for key, value in _without_params(group).items()} for group in optimizer.param_groups
    ]


@contextlib.contextmanager
def replaced(values: Mapping[torch.optim.Optimizer, Sequence[Group]]) -> Iterator[None]:
    """Give optimizers these hyperparameters inside the block."""
    groups = [
        (group, then)
        for optimizer, all_then in values.items()
        for group, then in zip(optimizer.param_groups, all_then, strict=True)
    ]
    now = [_without_params(group) for group, _ in groups]
    for group, then in groups:
        group.update(then)
    try:
        yield
    finally:
        for (group, then), own in zip(groups, now, strict=True):
            # Numbers that count steps stay as the step left them.
            group.update({key: value for key, value in own.items() if key not in then or group[key] is then[key]})


def _without_params(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}
