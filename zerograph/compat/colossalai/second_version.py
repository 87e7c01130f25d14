"""A section ``zero`` with ``model_config`` and ``optimizer_config``: those of ``ShardedModelV2`` and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerograph.compat.notices import say
from zerograph.compat.sections import number, section, switch, whole
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler

# With what a graph does anyway; None: with what nothing here compares.
_MODEL_WITHOUT_EFFECT: Mapping[str, Any] = {
    "shard_strategy": None,
    "gradient_predivide_factor": 1.0,
    "reshard_after_forward": True,
    "reuse_fp16_shard": None,
    "use_memory_tracer": None,
}
_OPTIMIZER_WITHOUT_EFFECT: Mapping[str, Any] = {"gpu_margin_mem_ratio": 0.0, "max_scale": 2**32, "verbose": None}
_SCALER = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
_MODEL, _OPTIMIZER = "zero.model_config", "zero.optimizer_config"


def is_second(zero: Any) -> bool:
    """Return whether a section ``zero`` is one of the second version."""
    return isinstance(zero, Mapping) and ("model_config" in zero or "optimizer_config" in zero)


def as_first(zero: Mapping[str, Any]) -> tuple[dict[str, Any], GradScaler]:
    """Translate a section into one of the first version, with the loss scaler that it describes.

    Parameters, gradients and state are split, which is level 3. Loss scales start at 2**16, not 2**32, from which some
    sixteen updates would be skipped first.

    Raises:
        ConfigError: an unknown key, a process group, or offload of one without the other.
    """
    zero = section(zero, "zero", ("level", "model_config", "optimizer_config"))
    groups = "process_group", "reduce_scatter_process_group"
    keys = ("reduce_scatter_bucket_size_mb", "fp32_reduce_scatter", "offload_config", "tensor_placement_policy")
    model = section(zero.get("model_config") or {}, _MODEL, (*keys, *groups, *_MODEL_WITHOUT_EFFECT))
    groups_of_optimizer = "dp_process_group", "mp_process_group"
    keys_of_optimizer = ("cpu_offload", *_SCALER, *groups_of_optimizer, *_OPTIMIZER_WITHOUT_EFFECT)
    optimizer = section(zero.get("optimizer_config") or {}, _OPTIMIZER, keys_of_optimizer)
    for name, given, names in ((_MODEL, model, groups), (_OPTIMIZER, optimizer, groups_of_optimizer)):
        for group in names:
            if given.get(group) is not None:
                raise ConfigError(
                    f"{name}.{group}: a graph runs on all ranks\nLeave it out, or set engine.graph.config.placement."
                )
    if zero.get("level", 3) != 3:
        raise ConfigError(f"zero.level = {zero['level']!r}, but model_config means level 3\nLeave one of both out.")
    found: dict[str, Any] = {"level": 3, "dynamic_loss_scale": True}
    if "reduce_scatter_bucket_size_mb" in model:
        # Of fp16 gradients.
        size = number(model["reduce_scatter_bucket_size_mb"], f"{_MODEL}.reduce_scatter_bucket_size_mb")
        found["reduce_bucket_size"] = max(1, int(size * 2**19))
    if "fp32_reduce_scatter" in model:
        found["allreduce_always_fp32"] = switch(model["fp32_reduce_scatter"], f"{_MODEL}.fp32_reduce_scatter")
    found |= _offload(model, optimizer)
    unused = [
        f"{name}.{key}"
        for name, given, known in (
            (_MODEL, model, _MODEL_WITHOUT_EFFECT),
            (_OPTIMIZER, optimizer, _OPTIMIZER_WITHOUT_EFFECT),
        )
        for key, same in known.items()
        if key in given and same is not None and given[key] != same
    ]
    if unused:
        say(f"without effect in the ColossalAI configuration: {', '.join(unused)}")
    return found, _scaler(optimizer)


def _offload(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    policy = model.get("tensor_placement_policy", "cuda")
    if policy not in ("cuda", "cpu", "auto"):
        raise ConfigError(f"{_MODEL}.tensor_placement_policy = {policy!r:.60}: choose 'cuda', 'cpu' or 'auto'")
    if policy == "auto":
        say(f"{_MODEL}.tensor_placement_policy = 'auto': parameters and state stay on the device; 'cpu' offloads them")
    given = section(model.get("offload_config") or {}, f"{_MODEL}.offload_config", ("device",))
    device = given.get("device")
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


def _scaler(given: Mapping[str, Any]) -> GradScaler:
    def of(name: str, default: float) -> float:
        return number(given.get(name, default), f"{_OPTIMIZER}.{name}")

    return GradScaler(
        init_scale=of("initial_scale", 2.0**16),
        growth_factor=of("growth_factor", 2.0),
        backoff_factor=of("backoff_factor", 0.5),
        growth_interval=whole(given.get("growth_interval", 1000), f"{_OPTIMIZER}.growth_interval", 1),
        min_scale=of("min_scale", 1.0),
        hysteresis=whole(given.get("hysteresis", 2), f"{_OPTIMIZER}.hysteresis", 1),
    )
