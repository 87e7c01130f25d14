"""Optimizers by the names that configurations use for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerograph.errors import ConfigError

# The kernels of Adam that DeepSpeed and ColossalAI bring along: by default they decouple weight decay, of which there
# is none unless it is asked for.
ADAMS = ("FusedAdam", "CPUAdam", "HybridAdam", "DeepSpeedCPUAdam")


def adam(name: str, params: Mapping[str, Any]) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a factory of Adam as those kernels compute it: ``adam_w_mode`` (default True) is AdamW's decay.

    Raises:
        ConfigError: a parameter that the update here does not have.
    """
    given = {"weight_decay": 0.0, **params}
    decoupled = given.pop("adam_w_mode", given.pop("adamw_mode", True))
    for key, default in (("bias_correction", True), ("amsgrad", False), ("fp32_optimizer_states", True)):
        if given.pop(key, default) is not default:
            raise ConfigError(f"optimizer {name}: {key} = {params[key]!r} is not supported; leave it out")
    for key in ("set_grad_none", "torch_adam", "nvme_offload_fraction", "nvme_offload_dir"):
        given.pop(key, None)
    return torchs("AdamW" if decoupled else "Adam", {**given, "fused": True}, name)


def torchs(
    name: str, params: Mapping[str, Any], called: str | None = None
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a factory of the optimizer of that name in ``torch.optim``.

    Raises:
        ConfigError: there is none, or it has no such parameter; the message says what there is.
    """
    found = getattr(torch.optim, name, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        choices = sorted(n for n, one in vars(torch.optim).items() if isinstance(one, type) and n != "Optimizer")
        meant = [one for one in (*choices, *ADAMS) if one.lower() == name.lower()]
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        raise ConfigError(
            f"there is no optimizer {name!r}{hint}\nChoose one of torch.optim's ({', '.join(choices)}), "
            f"{', '.join(ADAMS)}, or make it yourself and leave it out of the configuration."
        )
    known = [one for one in inspect.signature(found).parameters if one != "params"]
    for key, value in params.items():
        if key not in known:
            raise ConfigError(f"optimizer {called or name} has no parameter {key!r}; it has {', '.join(known)}")
        if value == "auto":
            raise ConfigError(f"optimizer.{key} is 'auto', which transformers' Trainer fills in: give a value")
        if isinstance(value, str) and key in ("lr", "eps", "weight_decay", "momentum"):
            raise ConfigError(f"optimizer.{key} = {value!r} is a text: give a number")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return lambda parameters: found(parameters, **values)
