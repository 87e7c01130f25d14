"""Whether what a checkpoint says beside its tensors can be taken by what it is for: asked before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.errors import CheckpointError, ConfigError
from zerograph.ir.grad_scaler import GradScaler
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.state.checkpoint.written import Written
from zerograph.state.hyperparameter_checks import check_scheduler


def check_fits(found: Written, schedulers: Sequence[LRScheduler | None], scaler: GradScaler | None) -> None:
    """Raise if a scheduler or the loss scale could not be what the checkpoint says.

    How many there are is checked elsewhere.

    Raises:
        CheckpointError: one of them is of another kind than its place.
    """
    for scheduler, state in zip(schedulers, found.schedulers, strict=False):
        if scheduler is not None and state is not None:
            try:
                check_scheduler(scheduler, state)
            except ConfigError as error:
                raise CheckpointError(f"the checkpoint does not fit: {error}") from error
    if scaler is not None and found.scaler is not None:
        try:
            copy.copy(scaler).check_state(found.scaler)
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint's loss scale is damaged: {error}") from error


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
