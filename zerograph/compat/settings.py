"""Settings of a training step, translated from another system's configuration.

:class:`Settings` is what a translation returns. The functions after it translate what DeepSpeed and ColossalAI describe
alike: ZeRO with its buckets and offload, and precision.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compat.sections import Section
from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph
from zerograph.ir.buckets import MAX_BUCKET_BYTES
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.offload import Offload, OffloadTo

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class Settings:
    """The settings of a training step that a configuration describes.

    Attributes:
        options: values of :class:`zerograph.Config`'s options, by name.
        optimizer: creates the optimizer from parameters or parameter groups; None if the configuration names none.
        scheduler: creates the learning-rate schedule of an optimizer; None if the configuration names none.
        samples: number of samples that each rank passes to one call of the graph; None if the configuration does not
            say.

    Raises:
        ConfigError: an option does not exist or cannot have its value.
    """

    options: Mapping[str, Any]
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"Settings({self.options!r:.60}): give options by name, as {{'stage': 2}}")
        Config(**self.options)
        for name, factory in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if factory is not None and not callable(factory):
                raise ConfigError(f"Settings({name}={factory!r:.60}): give a function that creates the {name}")

    def configure(self, config: Config) -> None:
        """Set the options in ``config``; options that are not in the settings keep their values.

        Raises:
            ConfigError: ``config`` is not a :class:`zerograph.Config`.
        """
        if not isinstance(config, Config):
            raise ConfigError(f"configure() takes a graph's config, not {type(config).__name__}")
        # A loss scaler has state: each graph gets its own copy.
        options = {k: copy.deepcopy(v) if isinstance(v, GradScaler) else v for k, v in self.options.items()}
        if isinstance(offload := options.get("offload"), Offload):
            options["offload"] = replace(offload, activations=config.memory.offload.activations or offload.activations)
        config.set(**options)

    def set_up(self, graph: ZeroGraph, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Configure the graph and register the configuration's optimizer and schedule.

        Call it in the graph's ``__init__``, as ``settings.set_up(self, model.parameters())``.

        Raises:
            ConfigError: ``graph`` is not a graph, or the configuration names no optimizer.
        """
        if not isinstance(graph, ZeroGraph):
            raise ConfigError(f"set_up() takes a graph and its parameters, not {type(graph).__name__}")
        self.configure(graph.config)
        optimizer = self.make_optimizer(parameters)
        graph.add_optimizer(optimizer, None if self.scheduler is None else self.scheduler(optimizer))

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Create the configuration's optimizer over parameters or parameter groups.

        Raises:
            ConfigError: the configuration names no optimizer.
        """
        if self.optimizer is None:
            raise ConfigError(
                "the configuration names no optimizer\nAdd its 'optimizer' section, or create the optimizer yourself "
                "and call configure() and add_optimizer()."
            )
        return self.optimizer(parameters)


def zero_options(
    zero: Section,
    stage: int,
    *,
    stage_key: str,
    bucket_keys: Iterable[str],
    whole_key: str,
    offloads: Mapping[str, OffloadTo | None],
) -> dict[str, Any]:
    """Translate a ZeRO section into options.

    Args:
        zero: the section.
        stage: 0 (ZeRO is off), 1, 2 or 3.
        stage_key: the key of the stage, for messages.
        bucket_keys: keys of upper bounds of a collective's size, in elements; "auto" and 0 are no bound.
        whole_key: the key of the largest parameter that stage 3 keeps whole, in elements.
        offloads: the offload of the optimizer and that of parameters, in this order, by their keys.

    Raises:
        ConfigError: a value is not a number, or parameters are offloaded without the optimizer or below stage 3.
    """
    (state_key, state), (parameter_key, parameters) = offloads.items()
    if parameters is not None and state is None:
        raise ConfigError(f"{zero.path(parameter_key)} needs {state_key} as well: add it")
    if parameters is not None and stage < 3:
        raise ConfigError(
            f"{zero.path(parameter_key)} needs {stage_key} 3, not {stage}: parameters are not sharded below "
            f"{stage_key} 3"
        )
    options: dict[str, Any] = {"stage": stage, "offload": Offload(state, parameters)}
    if stage == 3 and zero.get(whole_key, "auto") != "auto":
        # Both systems keep parameters of at most this many elements whole, zerograph those below shard_min_size.
        options["shard_min_size"] = zero.whole(whole_key) + 1
    bounds = [zero.whole(key) for key in bucket_keys if zero.get(key, "auto") != "auto"]
    smallest = min((4 * elements for elements in bounds if elements), default=MAX_BUCKET_BYTES)
    # Published bounds are hundreds of millions of elements: then zerograph's default, which is smaller, stays.
    options["bucket_size"] = None if smallest >= MAX_BUCKET_BYTES else smallest
    return options


def precision_options(dtype: torch.dtype | None, scaler: GradScaler | None = None) -> dict[str, Any]:
    """Return the options of mixed precision in ``dtype`` with a loss scaler; ``dtype`` None is fp32."""
    return {"amp_dtype": dtype, "grad_scaler": scaler}


def offload(section: Section, choices: str, max_in_cpu: int = 0) -> OffloadTo | None:
    """Translate a section with a ``device`` and options of it; return None if nothing is offloaded.

    Args:
        section: the section.
        choices: the devices that the message lists.
        max_in_cpu: bytes of parameters that stay in CPU memory when the device is ``"nvme"``.

    Raises:
        ConfigError: an unknown device, a switch that is not a bool, or ``"nvme"`` without ``nvme_path``.
    """
    device, path = section.get("device"), section.get("nvme_path")
    if device in (None, "none"):
        return None
    if device not in ("cpu", "nvme"):
        raise ConfigError(f"{section.path('device')} = {device!r}: choose {choices}")
    if device == "nvme" and not path:
        raise ConfigError(f"{section.name} lacks nvme_path, a directory on the disk to store the state in")
    return OffloadTo(
        device,
        os.fspath(path) if device == "nvme" and path is not None else None,
        section.switch("pin_memory", True),
        section.switch("fast_init"),
        max_in_cpu,
    )
