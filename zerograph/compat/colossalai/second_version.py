"""Translate ColossalAI's second version of a section ``zero``: with ``model_config`` and ``optimizer_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerograph.compat.notices import say
from zerograph.compat.sections import number, section, switch, warn_without_effect, without_effect
from zerograph.compat.settings import loss_scaler
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler

# The value that describes what a graph does anyway (see without_effect); ...: any value.
_MODEL_WITHOUT_EFFECT: Mapping[str, Any] = {
    "shard_strategy": ...,
    "gradient_predivide_factor": 1.0,
    "reshard_after_forward": True,
    "reuse_fp16_shard": ...,
    "use_memory_tracer": ...,
}
_OPTIMIZER_WITHOUT_EFFECT: Mapping[str, Any] = {"gpu_margin_mem_ratio": 0.0, "max_scale": 2**32, "verbose": ...}
_SCALER = {
    "initial_scale": 2.0**16,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
}
_MODEL, _OPTIMIZER = "zero.model_config", "zero.optimizer_config"


def is_second(zero: Any) -> bool:
    """Return whether a section ``zero`` is one of the second version."""
    return isinstance(zero, Mapping) and ("model_config" in zero or "optimizer_config" in zero)


def as_first(zero: Mapping[str, Any]) -> tuple[dict[str, Any], GradScaler]:
    """Translate a section into one of the first version, and return it with its loss scaler.

    The second version shards parameters, gradients and optimizer state: level 3. The loss scale starts at 2**16, not at
    2**32, from which about sixteen updates would be skipped first.

    Raises:
        ConfigError: a key is unknown, a process group is passed, or only one of parameters and optimizer is offloaded.
    """
    zero = section(zero, "zero", ("level", "model_config", "optimizer_config"))
    groups = "process_group", "reduce_scatter_process_group"
    keys = ("reduce_scatter_bucket_size_mb", "fp32_reduce_scatter", "offload_config", "tensor_placement_policy")
    model = section(zero.get("model_config") or {}, _MODEL, (*keys, *groups, *_MODEL_WITHOUT_EFFECT))
    groups_of_optimizer = "dp_process_group", "mp_process_group"
    keys_of_optimizer = ("cpu_offload", *_SCALER, *groups_of_optimizer, *_OPTIMIZER_WITHOUT_EFFECT)
    optimizer = section(zero.get("optimizer_config") or {}, _OPTIMIZER, keys_of_optimizer)
    for name, values, names in ((_MODEL, model, groups), (_OPTIMIZER, optimizer, groups_of_optimizer)):
        for group in names:
            if values.get(group) is not None:
                raise ConfigError(
                    f"{name}.{group}: a graph runs on all ranks\nLeave it out, or set engine.graph.config.placement."
                )
    if zero.get("level", 3) != 3:
        raise ConfigError(f"zero.level = {zero['level']!r}, but model_config means level 3\nLeave one of the two out.")
    first: dict[str, Any] = {"level": 3, "dynamic_loss_scale": True}
    if "reduce_scatter_bucket_size_mb" in model:
        # Megabytes of fp16 gradients: 2**19 elements each.
        size = number(model["reduce_scatter_bucket_size_mb"], f"{_MODEL}.reduce_scatter_bucket_size_mb")
        first["reduce_bucket_size"] = max(1, int(size * 2**19))
    if "fp32_reduce_scatter" in model:
        first["allreduce_always_fp32"] = switch(model["fp32_reduce_scatter"], f"{_MODEL}.fp32_reduce_scatter")
    first |= _offload(model, optimizer)
    unused = without_effect(model, _MODEL, _MODEL_WITHOUT_EFFECT)
    unused += without_effect(optimizer, _OPTIMIZER, _OPTIMIZER_WITHOUT_EFFECT)
    warn_without_effect(unused, "the ColossalAI configuration")
    return first, _scaler(optimizer)


def _offload(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    policy = model.get("tensor_placement_policy", "cuda")
    if policy not in ("cuda", "cpu", "auto"):
        raise ConfigError(f"{_MODEL}.tensor_placement_policy = {policy!r:.60}: choose 'cuda', 'cpu' or 'auto'")
    if policy == "auto":
        say(f"{_MODEL}.tensor_placement_policy = 'auto': parameters and state stay on the device; 'cpu' offloads them")
    device = section(model.get("offload_config") or {}, f"{_MODEL}.offload_config", ("device",)).get("device")
    if device not in (None, "cpu"):
        raise ConfigError(f"{_MODEL}.offload_config.device = {device!r:.60}: choose 'cpu', or leave it out")
    parameters = policy == "cpu" or device == "cpu"
    state = switch(optimizer.get("cpu_offload", policy == "cpu"), f"{_OPTIMIZER}.cpu_offload")
    if parameters != state:
        raise ConfigError(
            f"{_MODEL} {'offloads' if parameters else 'does not offload'} parameters, and {_OPTIMIZER}.cpu_offload = "
            f"{state}: both are offloaded, or neither\nSet cpu_offload = {parameters}, or change offload_config and "
            "tensor_placement_policy."
        )
    cpu = {"device": "cpu"}
    return {"offload_param_config": cpu, "offload_optimizer_config": cpu} if parameters else {}


def _scaler(optimizer: Mapping[str, Any]) -> GradScaler:
    keys = {"init_scale" if key == "initial_scale" else key: key for key in _SCALER}
    return loss_scaler({**_SCALER, **optimizer}, _OPTIMIZER, keys)
