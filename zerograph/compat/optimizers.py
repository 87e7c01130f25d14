"""Create optimizers from the names and arguments that configurations use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerograph.compat.sections import not_auto, switch
from zerograph.errors import ConfigError

# DeepSpeed's and ColossalAI's Adam kernels. Their weight decay is decoupled and 0 by default.
ADAMS = ("FusedAdam", "CPUAdam", "HybridAdam", "DeepSpeedCPUAdam")


def by_name(name: str, params: Mapping[str, Any]) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a factory of the optimizer of this name: one of :data:`ADAMS` or of ``torch.optim``.

    Raises:
        ConfigError: there is no such optimizer, or it has no such parameter.
    """
    return adam(name, params) if name in ADAMS else of_torch(name, params)


def adam(name: str, params: Mapping[str, Any]) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a factory of Adam as DeepSpeed's kernels compute it: AdamW unless ``adam_w_mode`` is False.

    Args:
        name: the kernel's name, for messages.
        params: its arguments.

    Raises:
        ConfigError: an argument is not supported or does not exist.
    """
    options = {"weight_decay": 0.0, **params}
    decoupled = switch(options.pop("adam_w_mode", options.pop("adamw_mode", True)), f"optimizer {name}: adam_w_mode")
    for key, default in (("bias_correction", True), ("amsgrad", False), ("fp32_optimizer_states", True)):
        if options.pop(key, default) is not default:
            raise ConfigError(f"optimizer {name}: {key} = {params[key]!r} is not supported; leave it out")
    for key in ("set_grad_none", "torch_adam", "nvme_offload_fraction", "nvme_offload_dir"):
        options.pop(key, None)
    return of_torch("AdamW" if decoupled else "Adam", {**options, "fused": True}, name)


def of_torch(
    name: str, params: Mapping[str, Any], configured_name: str | None = None
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a factory of an optimizer of ``torch.optim``.

    Args:
        name: the class's name.
        params: its arguments; lists become tuples.
        configured_name: the name in the configuration, for messages. Default: ``name``.

    Raises:
        ConfigError: there is no such optimizer, or it has no such parameter; the message lists the choices.
    """
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        choices = sorted(n for n, value in vars(torch.optim).items() if isinstance(value, type) and n != "Optimizer")
        alike = [choice for choice in (*choices, *ADAMS) if choice.lower() == name.lower()]
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise ConfigError(
            f"there is no optimizer {name!r}{hint}\nChoose one of torch.optim's ({', '.join(choices)}), "
            f"{', '.join(ADAMS)}, or create it yourself and leave it out of the configuration."
        )
    parameters = [parameter for parameter in inspect.signature(kind).parameters if parameter != "params"]
    for key, value in params.items():
        if key not in parameters:
            message = f"optimizer {configured_name or name} has no parameter {key!r}; it has {', '.join(parameters)}"
            raise ConfigError(message)
        not_auto(value, f"optimizer.{key}")
        if isinstance(value, str) and key in ("lr", "eps", "weight_decay", "momentum"):
            raise ConfigError(f"optimizer.{key} = {value!r} is a text: give a number")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return lambda parameters: kind(parameters, **values)
