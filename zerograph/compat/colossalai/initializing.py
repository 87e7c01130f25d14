"""``colossalai.initialize()``: from the parts of a training script to an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compat.colossalai.engine import Engine
from zerograph.compat.colossalai.launching import Configuration, settings_of
from zerograph.compat.settings import Settings
from zerograph.errors import ConfigError
from zerograph.runtime.job.process_group import rank


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    config: Configuration | None = None,
    verbose: bool = True,
) -> tuple[Engine, Iterable[Any] | None, Iterable[Any] | None, Any]:
    """Return an engine that trains the model as the configuration says, the loaders, and the scheduler.

    Loaders come back as they are: each rank reads its own part of the batch, as from a ``DistributedSampler``. With
    gradient accumulation over k calls the train loader ends with the last whole update, and the scheduler's ``step()``
    counts once per update.

    Args:
        model: a module, or what makes one.
        optimizer: of the model's parameters, or what makes one of them; None: the one that the configuration names, if
            it does. Without one the engine only predicts.
        criterion: any callable that returns the loss; a module's parameters are trained if they are in the optimizer.
        train_dataloader: batches of this rank, returned as described above.
        test_dataloader: returned unchanged.
        lr_scheduler: of the optimizer, or what makes one of it; stepped by the training loop.
        config: a dict, or the path of a Python file; None: what ``launch()`` was given.
        verbose: rank 0 prints the engine's options, and hints.

    Raises:
        ConfigError: something is not what it is to be; no configuration; an unknown key or value in it.
    """
    settings = settings_of(config)
    model = _model(model)
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion={criterion!r:.60}: give a module or function that returns the loss, or None")
    made = _optimizer(optimizer, model, criterion, settings)
    scheduler = _scheduler(lr_scheduler, made, settings)
    engine = Engine(model, made, criterion, settings.configure, verbose=verbose)
    calls = engine.graph.config.gradient_accumulation_steps
    if calls > 1 and made is not None:
        if train_dataloader is not None and hasattr(train_dataloader, "__len__"):
            train_dataloader = WholeUpdates(train_dataloader, calls)
        scheduler = None if scheduler is None else EachUpdate(scheduler, calls)
    if verbose and rank() == 0:
        print(f"zerograph: {engine.graph.config.shown(changed=True)}", flush=True)
    return engine, train_dataloader, test_dataloader, scheduler


def _model(given: Any) -> nn.Module:
    made = given if isinstance(given, nn.Module) else given() if callable(given) else None
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model={given!r:.60}: give a torch.nn.Module, or a function that makes one")
    return made


def _optimizer(given: Any, model: nn.Module, criterion: Any, settings: Settings) -> torch.optim.Optimizer | None:
    if given is None:
        parts = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        trained = [parameter for part in parts for parameter in part.parameters()]
        return None if settings.optimizer is None else settings.optimizer(trained)
    made = given if isinstance(given, torch.optim.Optimizer) else given(model.parameters()) if callable(given) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={given!r:.60}: give a torch.optim.Optimizer, or a function of the parameters")
    return made


def _scheduler(given: Any, optimizer: torch.optim.Optimizer | None, settings: Settings) -> Any:
    if given is None:
        return None if settings.scheduler is None or optimizer is None else settings.scheduler(optimizer)
    if hasattr(given, "step"):
        return given
    if not callable(given) or optimizer is None:
        raise ConfigError(
            f"lr_scheduler={given!r:.60}: give a scheduler of the optimizer, or a function that makes one of it"
        )
    return given(optimizer)


class WholeUpdates:
    """A loader without the last batches, which make no update any more. All else is the loader's own.

    Args:
        loader: has a length.
        calls: so many batches make one update.
    """

    def __init__(self, loader: Iterable[Any], calls: int) -> None:
        self._loader, self._calls = loader, calls

    def __len__(self) -> int:
        length = len(self._loader)  # type: ignore[arg-type]
        return length - length % self._calls

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), len(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class EachUpdate:
    """A scheduler whose ``step()``, called with each call of the engine, counts once per update.

    Args:
        scheduler: the one that is stepped; all else is its own.
        calls: so many calls make one update.
    """

    def __init__(self, scheduler: LRScheduler, calls: int) -> None:
        self._scheduler, self._calls, self._count = scheduler, calls, 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, on each call that makes an update."""
        self._count = (self._count + 1) % self._calls
        if not self._count:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
