"""Translate ColossalAI's configuration, a dict or a Python file, into settings of a training step."""

from __future__ import annotations

import os
import runpy
import types
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.notices import say
from zerograph.compat.optimizers import by_name
from zerograph.compat.sections import Section, switch, warn_without_effect
from zerograph.compat.settings import MakeOptimizer, Settings, offload, precision_options, zero_options
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler, StaticGradScaler
from zerograph.ir.offload import OffloadTo

_KEYS = (
    *("bf16", "fp16", "clip_grad_norm", "gradient_clipping", "gradient_accumulation", "optimizer", "parallel", "zero"),
    *("cudnn_benchmark", "cudnn_deterministic", "seed"),
)
_WITHOUT_EFFECT = {"gradient_handler": None, "torch_ddp": None}
# Keys of the section "zero" that have an effect.
_ZERO = (
    *("type", "level", "clip_grad", "gradient_accumulation_steps", "allreduce_always_fp32"),
    *("static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args"),
    *("reduce_bucket_size", "prefetch_bucket_size", "max_elements_per_comm", "param_persistence_threshold"),
    *("offload_optimizer_config", "offload_param_config", "cpu_offload", "sub_group_size"),
)
# The value that describes what a graph does anyway (see Section); ...: any value.
_ZERO_WITHOUT_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(
        ("allgather_bucket_size", "aio_config", "max_live_parameters", "max_reuse_distance", "verbose"), ...
    ),
    **dict.fromkeys(("contiguous_gradients", "ignore_unused_parameters", "overlap_comm", "reduce_scatter"), True),
    "postscale_gradients": True,
    **dict.fromkeys(("elastic_checkpoint", "round_robin_gradients"), False),
    "gradient_predivide_factor": 1.0,
}
_TYPE = "ZeroRedundancyOptimizer_Level_"


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
    shown = {key: value for key, value in values.items() if key not in own}
    top = Section(shown, _NAME, _KEYS, _WITHOUT_EFFECT, is_whole=True)
    parallel = top.section("parallel", ("data", "pipeline", "tensor"))
    for kind in ("pipeline", "tensor"):
        size = parallel.get(kind, 1)
        if (size.get("size", 1) if isinstance(size, Mapping) else size) not in (None, 1):
            raise ConfigError(f"parallel.{kind} = {size!r}: only data parallel training is supported; leave it out")
    zero, scaler, unused = None, None, top.unused
    if _is_second(top.get("zero")):
        zero, scaler, of_zero = _as_first(top["zero"])
        unused += of_zero
    elif top.get("zero") is not None:
        zero = Section(top["zero"], "zero", _ZERO, _ZERO_WITHOUT_EFFECT)
        unused += zero.unused
    options = _without_zero(top) if zero is None else _with_zero(zero, top, scaler)
    steps = top.whole(_ACCUMULATION, options.get("gradient_accumulation_steps", 1), 1)
    if options.setdefault("gradient_accumulation_steps", steps) != steps:
        raise ConfigError(f"{_ACCUMULATION} = {steps}, but zero says {options['gradient_accumulation_steps']}")
    for key in ("clip_grad_norm", "gradient_clipping"):
        if key in top:
            options["clip_grad_norm"] = top.number(key) or options.get("clip_grad_norm")
    if "seed" in top:
        options["seed"] = top.whole("seed")
    settings = Settings(options, _optimizer(top.get("optimizer")))
    warn_without_effect(unused, _NAME)
    return settings


_NAME, _ACCUMULATION = "the ColossalAI configuration", "gradient_accumulation"


def _file(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise ConfigError(f"there is no configuration file {os.fspath(path)!r}")
    names = runpy.run_path(os.fspath(path))
    skipped = (types.ModuleType, types.FunctionType, type)
    return {key: value for key, value in names.items() if key[0] != "_" and not isinstance(value, skipped)}


def _without_zero(top: Section) -> dict[str, Any]:
    if _bf16(top):
        return {"stage": 0, **precision_options(torch.bfloat16)}
    fp16 = top.get("fp16")
    if fp16 in (None, False) or (isinstance(fp16, Mapping) and fp16.get("mode") is None):
        return {"stage": 0, **precision_options(None)}
    names = {"init_scale": "init_scale", "initial_scale": "init_scale", "min_scale": "min_scale"}
    names |= {key: key for key in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "enabled")}
    values = Section({"mode": "torch"} if fp16 is True else fp16, "fp16", ["mode", *names])
    # A string, or a member of ColossalAI's enumeration.
    mode = values.pop("mode")
    mode = str(getattr(mode, "value", mode)).lower()
    if mode not in ("torch", "naive", "apex"):
        raise ConfigError(f"fp16.mode = {mode!r}: choose 'torch' or 'naive'")
    if mode == "apex":
        raise ConfigError("fp16.mode: NVIDIA's Apex is not supported; choose 'torch' or 'naive'")
    # ColossalAI's own scaler has other defaults than torch's.
    defaults = {"growth_interval": 1000, "hysteresis": 2} if mode == "naive" else {}
    scaler = GradScaler(**defaults | {names[key]: value for key, value in values.items()})
    return {"stage": 0, **precision_options(torch.float16, scaler)}


def _bf16(top: Section) -> bool:
    value = top.get("bf16") or False
    if isinstance(value, Mapping):
        value = top.section("bf16", ("enabled",)).get("enabled", True)
    if switch(value, "bf16") and top.get("fp16"):
        raise ConfigError("fp16 and bf16 are both asked for: choose one")
    return bool(value)


def _with_zero(zero: Section, top: Section, scaler: GradScaler | None) -> dict[str, Any]:
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
        zero.whole(key, 1, 1)
    options = zero_options(
        zero,
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
    if zero.switch("allreduce_always_fp32"):
        options["reduce_dtype"] = torch.float32
    options["clip_grad_norm"] = zero.number("clip_grad") or None
    if "gradient_accumulation_steps" in zero:
        options["gradient_accumulation_steps"] = zero.whole("gradient_accumulation_steps", low=1)
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


def _scaler(zero: Section) -> GradScaler:
    static, keys = zero.get("static_loss_scale"), ("init_scale", "scale_factor", "scale_window", "min_scale")
    if not zero.switch("dynamic_loss_scale"):
        if zero.get("dynamic_loss_args"):
            raise ConfigError("zero.dynamic_loss_args, but no dynamic_loss_scale: set it to True, or leave them out")
        return StaticGradScaler(zero.number("static_loss_scale", 1.0) if static is not None else 1.0)
    if static not in (None, 1.0):
        raise ConfigError(f"zero.static_loss_scale = {static} and dynamic_loss_scale: choose one")
    refused = {"consecutive_hysteresis": "not supported; leave it out"}
    values = zero.section("dynamic_loss_args", (*keys, "delayed_shift"), refused)
    factor = values.number("scale_factor", 2.0)
    return GradScaler(
        # ColossalAI starts at 2**32, from which about twenty updates would be skipped first.
        values.number("init_scale", 2.0**16),
        growth_factor=factor,
        backoff_factor=1 / factor if factor else 0.0,
        growth_interval=values.whole("scale_window", 1000, 1),
        min_scale=values.number("min_scale", 1.0),
        hysteresis=values.whole("delayed_shift", 1, 1),
    )


# Tuning of DeepSpeed's file engine. Ours always prefetches, and writes asynchronously.
_FILE_TUNING = ("buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write")


def _offload_of_optimizer(zero: Section) -> OffloadTo | None:
    if zero.get("offload_optimizer_config") is None:
        return OffloadTo("cpu") if zero.switch("cpu_offload") else None
    keys = ("device", "pin_memory", "fast_init", "nvme_path", *_FILE_TUNING)
    return _offload(zero.section("offload_optimizer_config", keys))


def _offload_of_parameters(zero: Section) -> OffloadTo | None:
    name, value = "zero.offload_param_config", zero.get("offload_param_config")
    if value is None:
        return None
    slip = value.get("fast_init") if isinstance(value, Mapping) else None
    if isinstance(slip, (int, float)) and not isinstance(slip, bool) and "max_in_cpu" not in value:
        say(
            f"{name}.fast_init = {slip}: parameters have no fast_init, and published examples write it for max_in_cpu; "
            "taken as that"
        )
        value = {key: part for key, part in value.items() if key != "fast_init"} | {"max_in_cpu": slip}
    values = Section(value, name, ["device", "pin_memory", "max_in_cpu", "nvme_path", *_FILE_TUNING])
    values["fast_init"] = True
    return _offload(values, values.whole("max_in_cpu"))


def _offload(values: Section, max_in_cpu: int = 0) -> OffloadTo | None:
    if values.get("device") == "cpu" and values.get("nvme_path") is not None:
        raise ConfigError(f"{values.path('nvme_path')} is for the device 'nvme', not 'cpu'")
    return offload(values, "'cpu' or 'nvme'", max_in_cpu)


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


# The second version of a section "zero": with model_config and optimizer_config.
_MODEL_WITHOUT_EFFECT: Mapping[str, Any] = {
    "shard_strategy": ...,
    "gradient_predivide_factor": 1.0,
    "reshard_after_forward": True,
    "reuse_fp16_shard": ...,
    "use_memory_tracer": ...,
}
_OPTIMIZER_WITHOUT_EFFECT: Mapping[str, Any] = {"gpu_margin_mem_ratio": 0.0, "max_scale": 2**32, "verbose": ...}
_SCALER = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
_GROUP = "a graph runs on all ranks\nLeave it out, or set engine.graph.config.mesh.placement."


def _is_second(zero: Any) -> bool:
    """Return whether a section ``zero`` is one of the second version."""
    return isinstance(zero, Mapping) and ("model_config" in zero or "optimizer_config" in zero)


def _as_first(value: Mapping[str, Any]) -> tuple[Section, GradScaler, list[str]]:
    """Translate a section into one of the first version, and return it with its loss scaler and its unused keys.

    The second version shards parameters, gradients and optimizer state: level 3.

    Raises:
        ConfigError: a key is unknown, a process group is passed, or only one of parameters and optimizer is offloaded.
    """
    zero = Section(value, "zero", ("level", "model_config", "optimizer_config"))
    model = Section(
        zero.get("model_config") or {},
        "zero.model_config",
        ("reduce_scatter_bucket_size_mb", "fp32_reduce_scatter", "offload_config", "tensor_placement_policy"),
        _MODEL_WITHOUT_EFFECT,
        dict.fromkeys(("process_group", "reduce_scatter_process_group"), _GROUP),
    )
    optimizer = Section(
        zero.get("optimizer_config") or {},
        "zero.optimizer_config",
        ("cpu_offload", *_SCALER),
        _OPTIMIZER_WITHOUT_EFFECT,
        dict.fromkeys(("dp_process_group", "mp_process_group"), _GROUP),
    )
    if zero.get("level", 3) != 3:
        raise ConfigError(f"zero.level = {zero['level']!r}, but model_config means level 3\nLeave one of the two out.")
    first: dict[str, Any] = {"level": 3, "dynamic_loss_scale": True, **_offload_of_second(model, optimizer)}
    if "reduce_scatter_bucket_size_mb" in model:
        # Megabytes of fp16 gradients: 2**19 elements each.
        first["reduce_bucket_size"] = max(1, int(model.number("reduce_scatter_bucket_size_mb") * 2**19))
    if "fp32_reduce_scatter" in model:
        first["allreduce_always_fp32"] = model.switch("fp32_reduce_scatter")
    return Section(first, "zero", first), _scaler_of_second(optimizer), [*model.unused, *optimizer.unused]


def _offload_of_second(model: Section, optimizer: Section) -> dict[str, Any]:
    policy = model.get("tensor_placement_policy", "cuda")
    if policy not in ("cuda", "cpu", "auto"):
        raise ConfigError(f"{model.path('tensor_placement_policy')} = {policy!r:.60}: choose 'cuda', 'cpu' or 'auto'")
    if policy == "auto":
        say(
            f"{model.path('tensor_placement_policy')} = 'auto': parameters and state stay on the device; 'cpu' "
            "offloads them"
        )
    device = model.section("offload_config", ("device",)).get("device")
    if device not in (None, "cpu"):
        raise ConfigError(f"{model.name}.offload_config.device = {device!r:.60}: choose 'cpu', or leave it out")
    parameters = policy == "cpu" or device == "cpu"
    state = optimizer.switch("cpu_offload", policy == "cpu")
    if parameters != state:
        raise ConfigError(
            f"{model.name} {'offloads' if parameters else 'does not offload'} parameters, and {optimizer.name}."
            f"cpu_offload = {state}: both are offloaded, or neither\nSet cpu_offload = {parameters}, or change "
            "offload_config and tensor_placement_policy."
        )
    cpu = {"device": "cpu"}
    return {"offload_param_config": cpu, "offload_optimizer_config": cpu} if parameters else {}


def _scaler_of_second(optimizer: Section) -> GradScaler:
    return GradScaler(
        # ColossalAI starts at 2**32, from which about sixteen updates would be skipped first.
        optimizer.number("initial_scale", 2.0**16),
        optimizer.number("growth_factor", 2.0),
        optimizer.number("backoff_factor", 0.5),
        optimizer.whole("growth_interval", 1000, 1),
        min_scale=optimizer.number("min_scale", 1.0),
        hysteresis=optimizer.whole("hysteresis", 2, 1),
    )
