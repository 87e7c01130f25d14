"""ColossalAI's configuration, a dict or a Python file, as options of a graph."""

from __future__ import annotations

import os
import runpy
import types
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.colossalai.second_version import as_first, is_second
from zerograph.compat.notices import say
from zerograph.compat.optimizers import ADAMS, adam, torchs
from zerograph.compat.sections import bucket_bytes, number, section, switch, whole
from zerograph.compat.settings import MakeOptimizer, Settings
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
# Of a section "zero": what means something here, and what does not.
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
# With what a graph does anyway; None: with what nothing here compares.
_ZERO_WITHOUT_EFFECT: Mapping[str, Any] = {
    "allgather_bucket_size": None,
    "aio_config": None,
    "contiguous_gradients": True,
    "elastic_checkpoint": False,
    "gradient_predivide_factor": 1.0,
    "ignore_unused_parameters": True,
    "max_live_parameters": None,
    "max_reuse_distance": None,
    "overlap_comm": True,
    "postscale_gradients": True,
    "reduce_scatter": True,
    "round_robin_gradients": False,
    "verbose": None,
}
_TYPE = "ZeroRedundancyOptimizer_Level_"
# From a scale of 2**32, as there, some twenty updates would be skipped first.
_SCALER = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 1}


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Translate a configuration of ColossalAI into settings of a training step.

    With ``zero`` the step computes in fp16 with fp32 masters, as there; ``bf16 = True`` chooses bf16, ``fp16 = False``
    fp32. In a Python file names in capitals are the user's own. ``max_in_cpu`` is bytes, as in zerograph's options.

    Raises:
        ConfigError: an unknown key, one that is not supported, or a value that an option cannot have; the message names
            the key and the choices.
    """
    if not isinstance(config, (Mapping, str, os.PathLike)):
        raise ConfigError(f"config={config!r:.60}: give a dict, or the path of a Python file")
    every = config if isinstance(config, Mapping) else _file(config)
    own = [key for key in every if isinstance(key, str) and key.isupper()]
    given = section({k: v for k, v in every.items() if k not in own}, "the ColossalAI configuration", _KEYS)
    parallel = section(given.get("parallel") or {}, "parallel", ("data", "pipeline", "tensor"))
    for kind in ("pipeline", "tensor"):
        wanted = parallel.get(kind, 1)
        if (wanted.get("size", 1) if isinstance(wanted, Mapping) else wanted) not in (None, 1):
            raise ConfigError(
                f"parallel.{kind} = {wanted!r}: only data parallel training is configured so; leave it out"
            )
    zero = given.get("zero")
    if zero is None:
        options = _without_zero(given)
    elif is_second(zero):
        zero, scaler = as_first(zero)
        options = _with_zero(zero, given)
        if options["grad_scaler"] is not None:
            options["grad_scaler"] = scaler
    else:
        options = _with_zero(section(zero, "zero", sorted([*_ZERO, *_ZERO_WITHOUT_EFFECT])), given)
    steps = whole(given.get("gradient_accumulation", options.get("gradient_accumulation_steps", 1)), _ACCUMULATION, 1)
    if options.setdefault("gradient_accumulation_steps", steps) != steps:
        raise ConfigError(f"{_ACCUMULATION} = {steps}, but zero says {options['gradient_accumulation_steps']}")
    for key in ("clip_grad_norm", "gradient_clipping"):
        if key in given:
            options["clip_grad_norm"] = number(given[key], key) or options.get("clip_grad_norm")
    if "seed" in given:
        options["seed"] = whole(given["seed"], "seed")
    settings = Settings(options, _optimizer(given.get("optimizer")))
    unused = [key for key in ("gradient_handler", "torch_ddp") if given.get(key)]
    if zero is not None:
        unused += [
            f"zero.{key}"
            for key, same in _ZERO_WITHOUT_EFFECT.items()
            if key in zero and same is not None and zero[key] != same
        ]
    if unused:
        say(f"without effect in the ColossalAI configuration: {', '.join(unused)}")
    return settings


_ACCUMULATION = "gradient_accumulation"


def _file(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise ConfigError(f"there is no configuration file {os.fspath(path)!r}")
    found = runpy.run_path(os.fspath(path))
    skipped = (types.ModuleType, types.FunctionType, type)
    return {key: value for key, value in found.items() if key[0] != "_" and not isinstance(value, skipped)}


def _without_zero(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": "off", "amp_dtype": None, "grad_scaler": None}
    if _bf16(given):
        return {**options, "amp_dtype": torch.bfloat16}
    half = given.get("fp16")
    if half in (None, False) or (isinstance(half, Mapping) and half.get("mode") is None):
        return options
    names = {"init_scale": "init_scale", "initial_scale": "init_scale", "min_scale": "min_scale"}
    names |= {one: one for one in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "enabled")}
    asked = section({"mode": "torch"} if half is True else half, "fp16", ["mode", *names])
    # A string, or a member of the enumeration that there is for it.
    mode = asked.pop("mode")
    mode = str(getattr(mode, "value", mode)).lower()
    if mode not in ("torch", "naive", "apex"):
        raise ConfigError(f"fp16.mode = {mode!r}: choose 'torch' or 'naive'")
    if mode == "apex":
        raise ConfigError("fp16.mode: NVIDIA's Apex is not supported; choose 'torch' or 'naive'")
    scaler = GradScaler(**{names[key]: value for key, value in asked.items()})
    return {**options, "amp_dtype": torch.float16, "grad_scaler": scaler}


def _bf16(given: Mapping[str, Any]) -> bool:
    wanted = given.get("bf16") or False
    if isinstance(wanted, Mapping):
        wanted = section(wanted, "bf16", ("enabled",)).get("enabled", True)
    if switch(wanted, "bf16") and given.get("fp16"):
        raise ConfigError("fp16 and bf16 are both asked for: choose one")
    return bool(wanted)


def _with_zero(zero: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    half = given.get("fp16")
    if half is True or (isinstance(half, Mapping) and half.get("mode") is not None):
        raise ConfigError(
            "fp16 and zero together: ZeRO turns fp16 on by itself, and its section has the options of loss scaling\n"
            "Leave fp16 out; fp16 = False computes in fp32, bf16 = True in bf16."
        )
    level = _level(zero)
    options: dict[str, Any] = {"mode": "distributed_split", "stage": level}
    if _bf16(given):
        options |= {"amp_dtype": torch.bfloat16, "grad_scaler": None}
    elif half is False:
        options |= {"amp_dtype": None, "grad_scaler": None}
    else:
        options |= {"amp_dtype": torch.float16, "grad_scaler": _scaler(zero)}
    if switch(zero.get("allreduce_always_fp32", False), "zero.allreduce_always_fp32"):
        options["reduce_dtype"] = torch.float32
    options["clip_grad_norm"] = number(zero.get("clip_grad", 0), "zero.clip_grad") or None
    if "gradient_accumulation_steps" in zero:
        options["gradient_accumulation_steps"] = whole(
            zero["gradient_accumulation_steps"], "zero.gradient_accumulation_steps", 1
        )
    if level == 3 and "param_persistence_threshold" in zero:
        # Those of so many elements stay whole there, smaller ones here.
        options["shard_min_size"] = whole(zero["param_persistence_threshold"], "zero.param_persistence_threshold") + 1
    state, parameters = _offload_of_optimizer(zero), _offload_of_parameters(zero)
    if parameters is not None and state is None:
        raise ConfigError("zero.offload_param_config needs offload_optimizer_config as well: add it")
    if parameters is not None and level < 3:
        raise ConfigError(f"zero.offload_param_config needs level 3, not {level}: parameters are whole below")
    options |= {"optimizer_offload": state, "parameter_offload": parameters}
    options["bucket_size"] = bucket_bytes(_bucket_sizes(zero, level, offloads=state is not None))
    return options


def _level(zero: Mapping[str, Any]) -> int:
    kind, level = zero.get("type"), zero.get("level")
    choices = ", ".join(f"'{_TYPE}{one}'" for one in (1, 2, 3))
    if kind is not None and kind not in [f"{_TYPE}{one}" for one in (1, 2, 3)]:
        raise ConfigError(f"zero.type = {kind!r}: choose one of {choices}")
    if level is not None and (isinstance(level, bool) or level not in (1, 2, 3)):
        raise ConfigError(f"zero.level = {level!r}: choose 1, 2 or 3")
    if kind is None and level is None:
        raise ConfigError(f"zero lacks 'type', one of {choices}, or 'level', 1, 2 or 3")
    found = int(str(level if kind is None else kind)[-1])
    if level not in (None, found):
        raise ConfigError(f"zero.type = {kind!r}, but zero.level = {level}: leave one out")
    return found


def _scaler(zero: Mapping[str, Any]) -> GradScaler:
    fixed, given = zero.get("static_loss_scale"), zero.get("dynamic_loss_args")
    if not switch(zero.get("dynamic_loss_scale", False), "zero.dynamic_loss_scale"):
        if given:
            raise ConfigError("zero.dynamic_loss_args, but no dynamic_loss_scale: set it to True, or leave them out")
        return StaticGradScaler(number(1.0 if fixed is None else fixed, "zero.static_loss_scale"))
    if fixed not in (None, 1.0):
        raise ConfigError(f"zero.static_loss_scale = {fixed} and dynamic_loss_scale: choose one")
    asked = {**_SCALER, **section(given or {}, "zero.dynamic_loss_args", [*_SCALER, *_MORE])}
    if asked.pop("consecutive_hysteresis", False):
        raise ConfigError("zero.dynamic_loss_args.consecutive_hysteresis: not supported; leave it out")
    factor = number(asked["scale_factor"], "zero.dynamic_loss_args.scale_factor")
    return GradScaler(
        init_scale=number(asked["init_scale"], "zero.dynamic_loss_args.init_scale"),
        growth_factor=factor,
        backoff_factor=1 / factor if factor else 0.0,
        growth_interval=whole(asked["scale_window"], "zero.dynamic_loss_args.scale_window", 1),
        min_scale=number(asked["min_scale"], "zero.dynamic_loss_args.min_scale"),
        hysteresis=whole(asked["delayed_shift"], "zero.dynamic_loss_args.delayed_shift", 1),
    )


_MORE = ("consecutive_hysteresis",)


def _bucket_sizes(zero: Mapping[str, Any], level: int, *, offloads: bool) -> list[int]:
    """Return the upper bounds of a collective's size, and with offload of an update's, in elements."""
    names = ["max_elements_per_comm"] if level == 1 else ["reduce_bucket_size"]
    if level == 3:
        names.append("prefetch_bucket_size")
    if offloads:
        names.append("sub_group_size")
    return [whole(zero[name], f"zero.{name}", 1) for name in names if name in zero]


def _offload_of_optimizer(zero: Mapping[str, Any]) -> Offload | None:
    name = "zero.offload_optimizer_config"
    if zero.get("offload_optimizer_config") is None:
        return Offload("cpu") if switch(zero.get("cpu_offload", False), "zero.cpu_offload") else None
    keys = ("device", "pin_memory", "fast_init", "nvme_path", *_READING_AHEAD)
    given = section(zero["offload_optimizer_config"], name, keys)
    fast = switch(given.get("fast_init", False), f"{name}.fast_init")
    return _offload(given, name, fast_init=fast, max_in_cpu=0)


# How DeepSpeed's engine for files is tuned; ours always prefetches and writes asynchronously.
_READING_AHEAD = ("buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write")


def _offload_of_parameters(zero: Mapping[str, Any]) -> Offload | None:
    name = "zero.offload_param_config"
    if zero.get("offload_param_config") is None:
        return None
    keys = ["device", "pin_memory", "max_in_cpu", "nvme_path", *_READING_AHEAD]
    given = dict(zero["offload_param_config"]) if isinstance(zero["offload_param_config"], Mapping) else {}
    slip = given.get("fast_init")
    if isinstance(slip, (int, float)) and not isinstance(slip, bool) and "max_in_cpu" not in given:
        say(
            f"{name}.fast_init = {slip}: parameters have no fast_init, and published examples write it for max_in_cpu; "
            "taken as that"
        )
        given["max_in_cpu"] = given.pop("fast_init")
        section(given, name, keys)
    else:
        given = section(zero["offload_param_config"], name, keys)
    kept = whole(given.get("max_in_cpu", 0), f"{name}.max_in_cpu")
    return _offload(given, name, fast_init=True, max_in_cpu=kept)


def _offload(given: Mapping[str, Any], name: str, *, fast_init: bool, max_in_cpu: int) -> Offload | None:
    device, path = given.get("device"), given.get("nvme_path")
    if device in (None, "none"):
        return None
    if device not in ("cpu", "nvme"):
        raise ConfigError(f"{name}.device = {device!r}: choose 'cpu' or 'nvme'")
    if device == "nvme" and path is None:
        raise ConfigError(f"{name} lacks nvme_path, a directory on the disk to store the state in")
    if device == "cpu" and path is not None:
        raise ConfigError(f"{name}.nvme_path is for the device 'nvme', not 'cpu'")
    pinned = switch(given.get("pin_memory", True), f"{name}.pin_memory")
    return Offload(device, None if path is None else os.fspath(path), pinned, fast_init, max_in_cpu)


def _optimizer(given: Any) -> MakeOptimizer | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), (str, type)):
        raise ConfigError(f"optimizer = {given!r:.60}: give a dict with a 'type', such as dict(type='Adam', lr=0.001)")
    params = {key: value for key, value in given.items() if key != "type"}
    if isinstance(given["type"], type):
        kind = given["type"]
        if not issubclass(kind, torch.optim.Optimizer):
            raise ConfigError(f"optimizer.type = {kind.__name__}: give the name, or the class, of an optimizer")
        return lambda parameters: kind(parameters, **params)
    name = "SGD" if given["type"] == "FusedSGD" else str(given["type"])
    return adam(name, params) if name in ADAMS else torchs(name, params)
