"""``colossalai.initialize()``: create an engine from the parts of a training script."""

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
from zerograph.config import Config
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
    """Create an engine that trains the model as the configuration says; return it with the loaders and the scheduler.

    Loaders must give each rank its own part of the batch, as with a ``DistributedSampler``; they are returned
    unchanged. With gradient accumulation over k calls, the train loader ends with the last complete update, and the
    scheduler's ``step()`` counts once per update.

    Args:
        model: a module, or a function that creates one.
        optimizer: an optimizer of the model's parameters, or a function that creates one from them; None: the one that
            the configuration names. An engine without an optimizer only predicts.
        criterion: any callable that returns the loss; a module's parameters are trained if they are in the optimizer.
        train_dataloader: batches of this rank for training.
        test_dataloader: batches of this rank for evaluation.
        lr_scheduler: a scheduler of the optimizer, or a function that creates one from it; the training loop steps it.
        config: a dict, or the path of a Python file; None: the configuration of ``launch()``.
        verbose: rank 0 prints the engine's options.

    Returns:
        The engine, the train loader, the test loader, and the scheduler.

    Raises:
        ConfigError: an argument has the wrong type, there is no configuration, or it has an unknown key or value.
    """
    settings = settings_of(config)
    model = _model(model)
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion={criterion!r:.60}: give a module or function that returns the loss, or None")
    engine_optimizer = _optimizer(optimizer, model, criterion, settings)
    scheduler = _scheduler(lr_scheduler, engine_optimizer, settings)
    options = Config()
    settings.configure(options)
    if verbose and rank() == 0:
        print(f"zerograph: {options.shown(changed=True)}", flush=True)
    engine = Engine(model, engine_optimizer, criterion, options)
    calls = engine.gradient_accumulation
    if calls > 1 and engine_optimizer is not None:
        if train_dataloader is not None and hasattr(train_dataloader, "__len__"):
            train_dataloader = WholeUpdates(train_dataloader, calls)
        scheduler = None if scheduler is None else EachUpdate(scheduler, calls)
    return engine, train_dataloader, test_dataloader, scheduler


def _model(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else model() if callable(model) else None
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model={model!r:.60}: give a torch.nn.Module, or a function that creates one")
    return module


def _optimizer(value: Any, model: nn.Module, criterion: Any, settings: Settings) -> torch.optim.Optimizer | None:
    if value is None:
        modules = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return None if settings.optimizer is None else settings.optimizer(parameters)
    created = not isinstance(value, torch.optim.Optimizer) and callable(value)
    optimizer = value(model.parameters()) if created else value
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={value!r:.60}: give a torch.optim.Optimizer, or a function of the parameters")
    return optimizer


def _scheduler(value: Any, optimizer: torch.optim.Optimizer | None, settings: Settings) -> Any:
    if value is None:
        return None if settings.scheduler is None or optimizer is None else settings.scheduler(optimizer)
    if hasattr(value, "step"):
        return value
    if not callable(value) or optimizer is None:
        raise ConfigError(
            f"lr_scheduler={value!r:.60}: give a scheduler of the optimizer, or a function that creates one from it"
        )
    return value(optimizer)


class WholeUpdates:
    """A loader without its last batches that do not complete an update. Other attributes are the loader's.

    Args:
        loader: the loader, which has a length.
        calls: number of batches of an update.
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
    """A scheduler whose ``step()`` counts only every ``calls`` calls. Other attributes are the scheduler's.

    Args:
        scheduler: the scheduler.
        calls: number of calls of an update.
    """

    def __init__(self, scheduler: LRScheduler, calls: int) -> None:
        self._scheduler, self._calls, self._count = scheduler, calls, 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, at the last call of each update."""
        self._count = (self._count + 1) % self._calls
        if not self._count:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
