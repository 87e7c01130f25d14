"""Translate ColossalAI's second version of a section ``zero``: with ``model_config`` and ``optimizer_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerograph.compat.notices import say
from zerograph.compat.sections import Section
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler

# The value that describes what a graph does anyway (see Section); ...: any value.
_MODEL_WITHOUT_EFFECT: Mapping[str, Any] = {
    "shard_strategy": ...,
    "gradient_predivide_factor": 1.0,
    "reshard_after_forward": True,
    "reuse_fp16_shard": ...,
    "use_memory_tracer": ...,
}
_OPTIMIZER_WITHOUT_EFFECT: Mapping[str, Any] = {"gpu_margin_mem_ratio": 0.0, "max_scale": 2**32, "verbose": ...}
_SCALER = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
_GROUP = "a graph runs on all ranks\nLeave it out, or set engine.graph.config.placement."


def is_second(zero: Any) -> bool:
    """Return whether a section ``zero`` is one of the second version."""
    return isinstance(zero, Mapping) and ("model_config" in zero or "optimizer_config" in zero)


def as_first(value: Mapping[str, Any]) -> tuple[Section, GradScaler, list[str]]:
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
        (
            "cpu_offload",
            "initial_scale",
            "min_scale",
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "hysteresis",
        ),
        _OPTIMIZER_WITHOUT_EFFECT,
        dict.fromkeys(("dp_process_group", "mp_process_group"), _GROUP),
    )
    if zero.get("level", 3) != 3:
        raise ConfigError(f"zero.level = {zero['level']!r}, but model_config means level 3\nLeave one of the two out.")
    first: dict[str, Any] = {"level": 3, "dynamic_loss_scale": True, **_offload(model, optimizer)}
    if "reduce_scatter_bucket_size_mb" in model:
        # Megabytes of fp16 gradients: 2**19 elements each.
        first["reduce_bucket_size"] = max(1, int(model.number("reduce_scatter_bucket_size_mb") * 2**19))
    if "fp32_reduce_scatter" in model:
        first["allreduce_always_fp32"] = model.switch("fp32_reduce_scatter")
    return Section(first, "zero", first), _scaler(optimizer), [*model.unused, *optimizer.unused]


def _offload(model: Section, optimizer: Section) -> dict[str, Any]:
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


def _scaler(optimizer: Section) -> GradScaler:
    return GradScaler(
        # ColossalAI starts at 2**32, from which about sixteen updates would be skipped first.
        optimizer.number("initial_scale", 2.0**16),
        optimizer.number("growth_factor", 2.0),
        optimizer.number("backoff_factor", 0.5),
        optimizer.whole("growth_interval", 1000, 1),
        min_scale=optimizer.number("min_scale", 1.0),
        hysteresis=optimizer.whole("hysteresis", 2, 1),
    )
