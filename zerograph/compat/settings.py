"""What a configuration of another system says, in zerograph's words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph.config import Config, check_name
from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph
from zerograph.ir.grad_scaler import GradScaler

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class Settings:
    """Everything that a configuration says of a training step.

    Attributes:
        options: values of :class:`zerograph.Config`'s options, by name.
        optimizer: makes the one that the configuration names, of parameters or parameter groups; None: it names none.
        scheduler: makes the schedule of the learning rate for an optimizer; None: the configuration names none.
        samples: how many samples each rank gives to one call of the graph; None: the configuration does not say.

    Raises:
        ConfigError: an option that cannot have its value.
    """

    options: Mapping[str, Any]
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"Settings({self.options!r:.60}): give options by name, as {{'stage': 2}}")
        for name in self.options:
            check_name(name)
        Config(**self.options)
        for name, made in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if made is not None and not callable(made):
                raise ConfigError(f"Settings({name}={made!r:.60}): give a function that makes one")

    def configure(self, config: Config) -> None:
        """Set the options; others stay as they are.

        Raises:
            ConfigError: not a configuration.
        """
        if not isinstance(config, Config):
            raise ConfigError(f"configure() takes a graph's config, not {type(config).__name__}")
        for name, value in self.options.items():
            # It has a state, and the next graph that is configured so another.
            setattr(config, name, copy.deepcopy(value) if isinstance(value, GradScaler) else value)

    def set_up(self, graph: ZeroGraph, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Configure the graph and register the optimizer, and the schedule, that the configuration names.

        Call it in the graph's ``__init__``, as ``settings.set_up(self, model.parameters())``.

        Raises:
            ConfigError: not a graph, or the configuration names no optimizer.
        """
        if not isinstance(graph, ZeroGraph):
            raise ConfigError(f"set_up() takes a graph and its parameters, not {type(graph).__name__}")
        self.configure(graph.config)
        optimizer = self.make_optimizer(parameters)
        graph.add_optimizer(optimizer, None if self.scheduler is None else self.scheduler(optimizer))

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer that the configuration names, over these parameters or groups of them.

        Raises:
            ConfigError: it names none.
        """
        if self.optimizer is None:
            raise ConfigError(
                "the configuration names no optimizer\nAdd its 'optimizer' section, or make the optimizer yourself and "
                "call configure() and add_optimizer()."
            )
        return self.optimizer(parameters)
