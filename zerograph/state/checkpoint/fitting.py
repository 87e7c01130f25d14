"""Check that schedulers, the loss scale and generators accept a checkpoint's state, before anything changes."""

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


def check_fits(document: Written, schedulers: Sequence[LRScheduler | None], scaler: GradScaler | None) -> None:
    """Check that each scheduler and the loss scale accept their saved state; :func:`load` checks how many there are.

    Raises:
        CheckpointError: a scheduler or the loss scale does not accept its saved state.
    """
    for scheduler, state in zip(schedulers, document.schedulers, strict=False):
        if scheduler is not None and state is not None:
            try:
                check_scheduler(scheduler, state)
            except ConfigError as error:
                raise CheckpointError(f"the checkpoint does not fit: {error}") from error
    if scaler is not None and document.scaler is not None:
        try:
            copy.copy(scaler).check_state(document.scaler)
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint's loss scale is damaged: {error}") from error


def check_generators(reader: Reader, names: Sequence[str]) -> None:
    """Check that a generator accepts each saved random state.

    Raises:
        CheckpointError: a generator refuses a state.
    """
    for name in names:
        if not name.endswith(".cpu") and not torch.cuda.is_available():
            continue
        try:
            torch.Generator("cpu" if name.endswith(".cpu") else "cuda").set_state(reader.whole(name))
        except (RuntimeError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{reader.folder} is damaged: {name} is not a state of a generator: {error}"
            ) from error
