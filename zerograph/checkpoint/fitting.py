"""Whether what a checkpoint says beside its tensors can be taken by what it is for: asked before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.checkpoint.written import Written, unlike
from zerograph.errors import CheckpointError, ConfigError
from zerograph.grad_scaler import GradScaler
from zerograph.members import Optimizers
from zerograph.runtime.checkpoint.storage import Reader

# Of torch's optimizers: None lets torch decide, and what it has decided says nothing of what else they may be.
_SWITCHES = ("foreach", "fused")


def check_fits(
    found: Written, optimizers: Optimizers, schedulers: Sequence[LRScheduler | None], scaler: GradScaler | None
) -> None:
    """Raise if a hyperparameter, a scheduler or the loss scale could not be what the checkpoint says.

    How many optimizers and groups there are is checked elsewhere.

    Raises:
        CheckpointError: one of them is of another kind than its place.
    """
    for optimizer, groups in zip(optimizers, found.groups, strict=False):
        for mine, group in zip(optimizer.param_groups, groups, strict=False):
            _check_group(type(optimizer).__name__, mine, group)
    for scheduler, state in zip(schedulers, found.schedulers, strict=False):
        if scheduler is not None and state is not None:
            _check_scheduler(scheduler, state)
    if scaler is not None and found.scaler is not None:
        try:
            copy.copy(scaler).check_state(found.scaler)
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint's loss scale is damaged: {error}") from error


def _check_group(optimizer: str, mine: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    for key, value in group.items():
        switch = key in _SWITCHES and not (value is None or isinstance(value, bool))
        if switch or (key != "params" and key in mine and unlike(value, mine[key])):
            raise CheckpointError(
                f"the checkpoint says {key} = {value!r:.60} of {optimizer}, "
                f"which has {mine.get(key)!r:.60}: no such value"
            )


def _check_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    mine = scheduler.state_dict()
    kind = type(scheduler)
    for key, value in state.items():
        # It becomes an attribute, and must not hide what the class says.
        hides = key not in mine and (key == "optimizer" or hasattr(kind, key))
        if hides or (key in mine and unlike(value, mine[key], nothing=True)):
            raise CheckpointError(f"the checkpoint says {key!r:.60} = {value!r:.60} of {kind.__name__}: no such value")


def check_generators(reader: Reader, names: Sequence[str]) -> None:
    """Raise if a saved state of random numbers is none.

    Raises:
        CheckpointError: a generator refuses it.
    """
    for name in names:
        if not name.endswith(".cpu") and not torch.cuda.is_available():
            continue
        try:
            torch.Generator("cpu" if name.endswith(".cpu") else "cuda").set_state(reader.whole(name))
        except (RuntimeError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{reader.folder} is damaged: {name} is no state of a generator: {error}") from error
