"""Modules and optimizers that other libraries wrap for their own parallel training.

If a wrapper only adds what a graph does itself, such as exchanging gradients or compiling, tracing calls the module
inside. A wrapper that has split the parameters, or that changes the update, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.base.source import warn_user
from zerograph.errors import ConfigError

# By package and class, so that no library is imported.
_REFUSED = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP has flattened and split its parameters"),
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard() has split its parameters"),
    ("deepspeed", "DeepSpeedEngine", "DeepSpeed's engine holds its parameters and makes updates of its own"),
    ("fairscale", "FullyShardedDataParallel", "fairscale has flattened and split its parameters"),
    ("fairscale", "ShardedDataParallel", "fairscale exchanges gradients as its own optimizer wants them"),
)
_OPTIMIZERS = (
    "accelerate.optimizer.AcceleratedOptimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer",
    "lightning.fabric.wrappers._FabricOptimizer",
    "lightning_fabric.wrappers._FabricOptimizer",
)


def check_modules(root: nn.Module) -> None:
    """Refuse modules whose parameters another library manages.

    Raises:
        ConfigError: there is one; names the module, the library and what to do.
    """
    for name, module in root.named_modules():
        names = [(f"{base.__module__}.", base.__qualname__) for base in type(module).__mro__]
        for package, wrapper, reason in _REFUSED:
            if any(own.startswith(f"{package}.") and kind == wrapper for own, kind in names):
                raise ConfigError(
                    f"{name} is wrapped: {wrapper}, {reason}\n"
                    "Give the graph the model as it was before, and choose ZeRO by set_zero_mode(): one of both can "
                    "hold the parameters."
                )


def is_seen_through(module: nn.Module) -> bool:
    """Return True for a wrapper whose inner module tracing calls instead."""
    return isinstance(module, (*_PARALLEL, *_torch.compiled_modules()))


_PARALLEL: tuple[type[nn.Module], ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def seen_through() -> Iterator[tuple[Any, str, Any]]:
    """Yield the methods by which wrappers call the module that they wrap, and do nothing else: owner, name, method."""
    yield from ((kind, "forward", _inside) for kind in _PARALLEL)
    yield from ((kind, "__call__", _not_compiled) for kind in _torch.compiled_modules())
    yield nn.SyncBatchNorm, "forward", _batch_norm


def _inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    warn_user(
        f"{type(self).__name__} is not run inside a graph, which exchanges gradients itself: its module is called\n"
        "Give the graph the module without it."
    )
    return self.module(*args, **kwargs)


def _not_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
    warn_user(
        "torch.compile(module) is not run inside a graph, which is compiled as a whole: the module itself is called\n"
        "config.backend = 'inductor' compiles the graph with Inductor."
    )
    return self._orig_mod(*args, **kwargs)


def _batch_norm(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """Run batch norm over the whole batch, as every batch norm of a graph."""
    group = self.process_group
    if group is not None and dist.is_initialized() and dist.get_world_size(group) != dist.get_world_size():
        raise source.refusal(
            f"SyncBatchNorm with a process group of {dist.get_world_size(group)} of {dist.get_world_size()} ranks",
            "Batch norm of a graph is over the whole batch, or over each rank's part with config.batch_norm = 'local'. "
            "Leave process_group out.",
        )
    result: Tensor = nn.BatchNorm1d.forward(self, x)
    return result


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a library's wrapper, with a warning; any other optimizer as it is.

    Raises:
        ConfigError: the wrapper scales losses, or its inner optimizer is unknown.
    """
    is_wrapper = any(f"{base.__module__}.{base.__qualname__}" in _OPTIMIZERS for base in type(optimizer).__mro__)
    inner = getattr(optimizer, "optimizer", None)
    if is_wrapper and isinstance(inner, torch.optim.Optimizer):
        if getattr(optimizer, "scaler", None) is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} has a torch.amp.GradScaler, which a graph cannot use\n"
                "Register the optimizer without it, and set config.enable_amp(dtype=torch.float16): the graph scales "
                "the loss."
            )
        warn_user(
            f"{type(optimizer).__name__} is not run by a graph, which makes the update itself: the "
            f"{type(inner).__name__} inside is registered\nGive add_optimizer() the optimizer without it."
        )
        return inner_optimizer(inner)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} is a torch.optim.Optimizer whose __init__ was never run: a wrapper around "
            "another\nGive add_optimizer() the optimizer inside."
        )
    held = held_optimizer(optimizer)
    if held is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} is a wrapper around {type(held).__name__}, whose step() the graph would not "
            f"run\nRegister the {type(held).__name__}, or write a subclass of it with its own step()."
        )
    return optimizer


def held_optimizer(wrapper: object) -> torch.optim.Optimizer | None:
    """Return the optimizer that another one, which is no library's wrapper, holds and steps; None if it holds none."""
    is_known = any(f"{base.__module__}.{base.__qualname__}" in _OPTIMIZERS for base in type(wrapper).__mro__)
    if is_known or not isinstance(wrapper, torch.optim.Optimizer):
        return None
    held = (one for one in vars(wrapper).values() if isinstance(one, torch.optim.Optimizer))
    return next(held, None)
