"""Translate ColossalAI's configuration, a dict or a Python file, into settings of a training step."""

from __future__ import annotations

import os
import runpy
import types
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.colossalai.second_version import as_first, is_second
from zerograph.compat.notices import say
from zerograph.compat.optimizers import by_name
from zerograph.compat.sections import number, section, switch, warn_without_effect, whole, without_effect
from zerograph.compat.settings import MakeOptimizer, Settings, loss_scaler, offload, precision_options, zero_options
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler, StaticGradScaler
from zerograph.ir.offload import Offload

_KEYS = (
    "bf16",
    "clip_grad_norm",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "fp16",
    "gradient_accumulation",
    "gradient_clipping",
    "gradient_handler",
    "optimizer",
    "parallel",
    "seed",
    "torch_ddp",
    "zero",
)
# Keys of the section "zero" that have an effect.
_ZERO = (
    "type",
    "level",
    "static_loss_scale",
    "dynamic_loss_scale",
    "dynamic_loss_args",
    "clip_grad",
    "reduce_bucket_size",
    "prefetch_bucket_size",
    "max_elements_per_comm",
    "param_persistence_threshold",
    "gradient_accumulation_steps",
    "sub_group_size",
    "offload_optimizer_config",
    "offload_param_config",
    "cpu_offload",
    "allreduce_always_fp32",
)
# The value that describes what a graph does anyway (see without_effect); ...: any value.
_ZERO_WITHOUT_EFFECT: Mapping[str, Any] = {
    "allgather_bucket_size": ...,
    "aio_config": ...,
    "contiguous_gradients": True,
    "elastic_checkpoint": False,
    "gradient_predivide_factor": 1.0,
    "ignore_unused_parameters": True,
    "max_live_parameters": ...,
    "max_reuse_distance": ...,
    "overlap_comm": True,
    "postscale_gradients": True,
    "reduce_scatter": True,
    "round_robin_gradients": False,
    "verbose": ...,
}
_TYPE = "ZeroRedundancyOptimizer_Level_"
# ColossalAI starts at 2**32, from which about twenty updates would be skipped first.
_SCALER = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 1}


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Translate a configuration of ColossalAI into settings of a training step.

    With a section ``zero`` the step computes in fp16 with fp32 masters, as in ColossalAI; ``bf16 = True`` chooses bf16,
    ``fp16 = False`` fp32. In a Python file, names in capitals are the user's own. ``max_in_cpu`` is in bytes.

    Args:
        config: a dict, or the path of a Python file.

    Returns:
        The settings.

    Raises:
        ConfigError: a key is unknown or not supported, or an option cannot have its value; the message names the key
            and the choices.
    """
    if not isinstance(config, (Mapping, str, os.PathLike)):
        raise ConfigError(f"config={config!r:.60}: give a dict, or the path of a Python file")
    values = config if isinstance(config, Mapping) else _file(config)
    own = [key for key in values if isinstance(key, str) and key.isupper()]
    top = section({k: v for k, v in values.items() if k not in own}, _NAME, _KEYS)
    parallel = section(top.get("parallel") or {}, "parallel", ("data", "pipeline", "tensor"))
    for kind in ("pipeline", "tensor"):
        size = parallel.get(kind, 1)
        if (size.get("size", 1) if isinstance(size, Mapping) else size) not in (None, 1):
            raise ConfigError(f"parallel.{kind} = {size!r}: only data parallel training is supported; leave it out")
    zero, scaler = top.get("zero"), None
    if zero is not None and is_second(zero):
        zero, scaler = as_first(zero)
    elif zero is not None:
        zero = section(zero, "zero", sorted([*_ZERO, *_ZERO_WITHOUT_EFFECT]))
    options = _without_zero(top) if zero is None else _with_zero(zero, top, scaler)
    steps = whole(top.get("gradient_accumulation", options.get("gradient_accumulation_steps", 1)), _ACCUMULATION, 1)
    if options.setdefault("gradient_accumulation_steps", steps) != steps:
        raise ConfigError(f"{_ACCUMULATION} = {steps}, but zero says {options['gradient_accumulation_steps']}")
    for key in ("clip_grad_norm", "gradient_clipping"):
        if key in top:
            options["clip_grad_norm"] = number(top[key], key) or options.get("clip_grad_norm")
    if "seed" in top:
        options["seed"] = whole(top["seed"], "seed")
    settings = Settings(options, _optimizer(top.get("optimizer")))
    unused = [key for key in ("gradient_handler", "torch_ddp") if top.get(key)]
    warn_without_effect([*unused, *without_effect(zero or {}, "zero", _ZERO_WITHOUT_EFFECT)], _NAME)
    return settings


_NAME, _ACCUMULATION = "the ColossalAI configuration", "gradient_accumulation"


def _file(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise ConfigError(f"there is no configuration file {os.fspath(path)!r}")
    names = runpy.run_path(os.fspath(path))
    skipped = (types.ModuleType, types.FunctionType, type)
    return {key: value for key, value in names.items() if key[0] != "_" and not isinstance(value, skipped)}


def _without_zero(top: Mapping[str, Any]) -> dict[str, Any]:
    if _bf16(top):
        return {"mode": "off", **precision_options(torch.bfloat16)}
    fp16 = top.get("fp16")
    if fp16 in (None, False) or (isinstance(fp16, Mapping) and fp16.get("mode") is None):
        return {"mode": "off", **precision_options(None)}
    names = {"init_scale": "init_scale", "initial_scale": "init_scale", "min_scale": "min_scale"}
    names |= {key: key for key in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "enabled")}
    values = section({"mode": "torch"} if fp16 is True else fp16, "fp16", ["mode", *names])
    # A string, or a member of ColossalAI's enumeration.
    mode = values.pop("mode")
    mode = str(getattr(mode, "value", mode)).lower()
    if mode not in ("torch", "naive", "apex"):
        raise ConfigError(f"fp16.mode = {mode!r}: choose 'torch' or 'naive'")
    if mode == "apex":
        raise ConfigError("fp16.mode: NVIDIA's Apex is not supported; choose 'torch' or 'naive'")
    scaler = GradScaler(**{names[key]: value for key, value in values.items()})
    return {"mode": "off", **precision_options(torch.float16, scaler)}


def _bf16(top: Mapping[str, Any]) -> bool:
    value = top.get("bf16") or False
    if isinstance(value, Mapping):
        value = section(value, "bf16", ("enabled",)).get("enabled", True)
    if switch(value, "bf16") and top.get("fp16"):
        raise ConfigError("fp16 and bf16 are both asked for: choose one")
    return bool(value)


def _with_zero(zero: dict[str, Any], top: Mapping[str, Any], scaler: GradScaler | None) -> dict[str, Any]:
    """Translate a section ``zero``; ``scaler`` is the loss scaler of one of the second version."""
    fp16 = top.get("fp16")
    if fp16 is True or (isinstance(fp16, Mapping) and fp16.get("mode") is not None):
        raise ConfigError(
            "fp16 and zero together: ZeRO turns fp16 on by itself, and its section has the options of loss scaling\n"
            "Leave fp16 out; fp16 = False computes in fp32, bf16 = True in bf16."
        )
    level = _level(zero)
    offloads = {
        "offload_optimizer_config": _offload_of_optimizer(zero),
        "offload_param_config": _offload_of_parameters(zero),
    }
    # Upper bounds of a collective's size, and with offload of an update's, in elements.
    bucket_keys = ["max_elements_per_comm"] if level == 1 else ["reduce_bucket_size"]
    if level == 3:
        bucket_keys.append("prefetch_bucket_size")
    if offloads["offload_optimizer_config"] is not None:
        bucket_keys.append("sub_group_size")
    for key in bucket_keys:
        whole(zero.get(key, 1), f"zero.{key}", 1)
    options = zero_options(
        zero,
        "zero",
        level,
        stage_key="level",
        bucket_keys=bucket_keys,
        whole_key="param_persistence_threshold",
        offloads=offloads,
    )
    if _bf16(top):
        options |= precision_options(torch.bfloat16)
    elif fp16 is False:
        options |= precision_options(None)
    else:
        options |= precision_options(torch.float16, scaler or _scaler(zero))
    if switch(zero.get("allreduce_always_fp32", False), "zero.allreduce_always_fp32"):
        options["reduce_dtype"] = torch.float32
    options["clip_grad_norm"] = number(zero.get("clip_grad", 0), "zero.clip_grad") or None
    key = "gradient_accumulation_steps"
    if key in zero:
        options[key] = whole(zero[key], f"zero.{key}", 1)
    return options


def _level(zero: Mapping[str, Any]) -> int:
    kind, level = zero.get("type"), zero.get("level")
    types = [f"{_TYPE}{number}" for number in (1, 2, 3)]
    choices = ", ".join(map(repr, types))
    if kind is not None and kind not in types:
        raise ConfigError(f"zero.type = {kind!r}: choose one of {choices}")
    if level is not None and (isinstance(level, bool) or level not in (1, 2, 3)):
        raise ConfigError(f"zero.level = {level!r}: choose 1, 2 or 3")
    if kind is None and level is None:
        raise ConfigError(f"zero lacks 'type', one of {choices}, or 'level', 1, 2 or 3")
    chosen = int(str(level if kind is None else kind)[-1])
    if level not in (None, chosen):
        raise ConfigError(f"zero.type = {kind!r}, but zero.level = {level}: leave one out")
    return chosen


def _scaler(zero: Mapping[str, Any]) -> GradScaler:
    static, arguments = zero.get("static_loss_scale"), zero.get("dynamic_loss_args")
    if not switch(zero.get("dynamic_loss_scale", False), "zero.dynamic_loss_scale"):
        if arguments:
            raise ConfigError("zero.dynamic_loss_args, but no dynamic_loss_scale: set it to True, or leave them out")
        return StaticGradScaler(number(1.0 if static is None else static, "zero.static_loss_scale"))
    if static not in (None, 1.0):
        raise ConfigError(f"zero.static_loss_scale = {static} and dynamic_loss_scale: choose one")
    name = "zero.dynamic_loss_args"
    values = {**_SCALER, **section(arguments or {}, name, [*_SCALER, "consecutive_hysteresis"])}
    if values.get("consecutive_hysteresis", False):
        raise ConfigError(f"{name}.consecutive_hysteresis: not supported; leave it out")
    factor = number(values["scale_factor"], f"{name}.scale_factor")
    values["backoff"] = 1 / factor if factor else 0.0
    keys = {
        "init_scale": "init_scale",
        "growth_factor": "scale_factor",
        "backoff_factor": "backoff",
        "growth_interval": "scale_window",
        "min_scale": "min_scale",
        "hysteresis": "delayed_shift",
    }
    return loss_scaler(values, name, keys)


# Tuning of DeepSpeed's file engine. Ours always prefetches, and writes asynchronously.
_FILE_TUNING = ("buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write")


def _offload_of_optimizer(zero: Mapping[str, Any]) -> Offload | None:
    if zero.get("offload_optimizer_config") is None:
        return Offload("cpu") if switch(zero.get("cpu_offload", False), "zero.cpu_offload") else None
    name = "zero.offload_optimizer_config"
    keys = ("device", "pin_memory", "fast_init", "nvme_path", *_FILE_TUNING)
    return _offload(section(zero["offload_optimizer_config"], name, keys), name)


def _offload_of_parameters(zero: Mapping[str, Any]) -> Offload | None:
    name, value = "zero.offload_param_config", zero.get("offload_param_config")
    if value is None:
        return None
    keys = ["device", "pin_memory", "max_in_cpu", "nvme_path", *_FILE_TUNING]
    slip = value.get("fast_init") if isinstance(value, Mapping) else None
    if isinstance(slip, (int, float)) and not isinstance(slip, bool) and "max_in_cpu" not in value:
        say(
            f"{name}.fast_init = {slip}: parameters have no fast_init, and published examples write it for max_in_cpu; "
            "taken as that"
        )
        value = {key: part for key, part in value.items() if key != "fast_init"} | {"max_in_cpu": slip}
    values = section(value, name, keys)
    return _offload({**values, "fast_init": True}, name, whole(values.get("max_in_cpu", 0), f"{name}.max_in_cpu"))


def _offload(values: Mapping[str, Any], name: str, max_in_cpu: int = 0) -> Offload | None:
    if values.get("device") == "cpu" and values.get("nvme_path") is not None:
        raise ConfigError(f"{name}.nvme_path is for the device 'nvme', not 'cpu'")
    return offload(values, name, "'cpu' or 'nvme'", max_in_cpu)


def _optimizer(value: Any) -> MakeOptimizer | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), (str, type)):
        raise ConfigError(f"optimizer = {value!r:.60}: give a dict with a 'type', such as dict(type='Adam', lr=0.001)")
    params = {key: parameter for key, parameter in value.items() if key != "type"}
    kind = value["type"]
    if isinstance(kind, type):
        if not issubclass(kind, torch.optim.Optimizer):
            raise ConfigError(f"optimizer.type = {kind.__name__}: give the name, or the class, of an optimizer")
        return lambda parameters: kind(parameters, **params)
    return by_name("SGD" if kind == "FusedSGD" else str(kind), params)
