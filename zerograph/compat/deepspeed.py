"""Translate DeepSpeed's JSON configuration into settings of a training step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.base import cache
from zerograph.compat.notices import say
from zerograph.compat.optimizers import adam, by_name, of_torch
from zerograph.compat.schedules import SCHEDULES
from zerograph.compat.sections import Section, not_auto, switch, warn_without_effect, whole
from zerograph.compat.settings import MakeOptimizer, MakeScheduler, Settings, offload, precision_options, zero_options
from zerograph.compiler.placement import placement
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler, StaticGradScaler
from zerograph.ir.offload import OffloadTo
from zerograph.ir.wire import WireFormat, wire
from zerograph.runtime.job.process_group import world_size

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# Keys of other tools, or of DeepSpeed's own kernels (see Section); ...: any value is ignored without a warning.
_WITHOUT_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(("activation_checkpointing", "aio", "autotuning", "checkpoint", "compile", "nebula"), None),
    **dict.fromkeys(("comms_logger", "csv_monitor", "monitor_config", "tensorboard", "wandb"), None),
    **dict.fromkeys(("dump_state", "flops_profiler", "memory_breakdown", "wall_clock_breakdown"), None),
    **dict.fromkeys(("dataloader_drop_last", "disable_allgather", "seq_parallel_communication_data_type"), None),
    **dict.fromkeys(("disable_python_gc", "graph_harvesting", "managed_gradient_accumulation", "steps_per_print"), ...),
    **dict.fromkeys(("gradient_predivide_factor", "prescale_gradients"), ...),
    **dict.fromkeys(("use_data_before_expert_parallel_", "use_data_before_expert_parallelism"), ...),
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), ...),
}
# Keys that would change what is computed, with advice.
_REFUSED = {
    "amp": "NVIDIA's Apex is not supported: use 'fp16' or 'bf16'",
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), "not supported: choose the data yourself"),
    "elasticity": "not supported: zg.elastic() goes on with the ranks that are left",
    **dict.fromkeys(("compression_training", "eigenvalue", "hybrid_engine", "pipeline"), "not supported"),
    **dict.fromkeys(("progressive_layer_drop", "sequence_parallel_size"), "not supported"),
    "sparse_attention": "not supported: write the attention in the model",
    "sparse_gradients": "not supported: gradients are dense",
    "tensor_parallel": "annotate parameters with zg.annotate() instead",
}
_READ = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("fp16", "bf16", "bfloat16", "torch_autocast", "communication_data_type", "data_types", "gradient_allreduce_op"),
    *("optimizer", "scheduler", "zero_optimization"),
)
_FP16 = (
    *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"),
    *("hysteresis", "consecutive_hysteresis"),
)
_BF16 = ("enabled", "check_grad_overflow", "check_overflow", "immediate_grad_update")
_MASTERS = "not supported, masters and optimizer state are fp32"
_ZERO_READ = (
    *("stage", "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "cpu_offload_params", "sub_group_size"),
    *("zero_quantized_weights", "zero_quantized_gradients", "zeropp_loco_param", "zero_hpz_partition_size"),
)
# The value that describes what a graph does anyway (see Section); ...: any value is ignored without a warning.
_ZERO_WITHOUT_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(("allgather_bucket_size", "compute_grad_norm", "contiguous_gradients", "elastic_checkpoint"), ...),
    **dict.fromkeys(("memory_efficient_linear", "round_robin_gradients", "use_multi_rank_bucket_allreduce"), ...),
    **dict.fromkeys((f"stage3_gather_{bits}_weights_on_model_save" for bits in ("16bit", "fp16")), ...),
    **dict.fromkeys(("allgather_partitions", "ignore_unused_parameters", "load_from_fp32_weights"), True),
    **dict.fromkeys(("overlap_comm", "reduce_scatter"), True),
    "legacy_stage1": False,
    **dict.fromkeys(("cpu_offload_use_pin_memory", "enable_sanity_checks", "log_trace_cache_warnings"), None),
    **dict.fromkeys(("override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint"), None),
    **dict.fromkeys(("save_muon_momentum_buffer_in_memory", "stage3_allgather_sequential"), None),
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), None),
    **dict.fromkeys(("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"), None),
    "stage3_use_all_reduce_for_fetch_params": None,
}
# DeepSpeed takes these keys without their prefix too.
_ZERO_ALIASES = {
    key.removeprefix("stage3_"): key for key in (*_ZERO_READ, *_ZERO_WITHOUT_EFFECT) if key.startswith("stage3_")
}
_ZERO_REFUSED = {
    "leaf_module": "pass modules that must not be captured operator by operator to zg.local(module)",
    "mics_hierarchical_params_gather": "set config.mesh.placement to a grid of ranks for hybrid sharding",
    "mics_shard_size": "set config.mesh.placement to a grid of ranks for hybrid sharding",
    "zenflow": "not supported",
    "zero_quantized_nontrainable_weights": "not supported; 'zero_quantized_weights' sends all weights as int8",
}


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Translate a DeepSpeed configuration into settings of a training step.

    Call ``settings.set_up(self, model.parameters())`` in a graph's ``__init__`` to apply all of them, or
    ``settings.configure()`` to set options only. With ``gradient_accumulation_steps`` = k, one call of the graph takes
    all k micro-batches of an update: ``settings.samples`` samples per rank. Bucket sizes are upper bounds, in elements.

    Args:
        config: a dict, or the path of a JSON file.

    Returns:
        The settings.

    Raises:
        ConfigError: a key is unknown or not supported, a value is ``"auto"``, or batch sizes contradict each other.
    """
    if not isinstance(config, (Mapping, str, os.PathLike)):
        raise ConfigError(f"from_deepspeed({config!r:.60}): give a dict, or the path of a JSON file")
    values = config if isinstance(config, Mapping) else _file(config)
    # Keys that begin so are comments, which JSON lacks.
    values = {key: value for key, value in values.items() if not str(key).startswith(("_", "//", "#"))}
    if values.get("gradient_allreduce_op", "mean") != "mean":
        raise ConfigError("gradient_allreduce_op: gradients are those of the whole batch's loss; leave it out")
    top = Section(values, _NAME, _READ, _WITHOUT_EFFECT, _REFUSED, is_whole=True)
    unaliased = _unaliased(top.get("zero_optimization", {}))
    zero = Section(unaliased, "zero_optimization", _ZERO_READ, _ZERO_WITHOUT_EFFECT, _ZERO_REFUSED)
    options = {**_precision(top), **_zero(zero)}
    if "gradient_clipping" not in top:
        say(
            f"{_NAME} has no gradient_clipping: gradients are not clipped here, where DeepSpeed clips to 1.0 from "
            "version 0.19 on\nAdd it, as 0.0 for no clipping."
        )
    options["clip_grad_norm"] = top.number("gradient_clipping") or None
    options["gradient_accumulation_steps"], samples = _batch(top)
    settings = Settings(options, _optimizer(top.get("optimizer")), _scheduler(top.get("scheduler")), samples)
    warn_without_effect([*top.unused, *zero.unused], _NAME)
    return settings


_NAME = "the DeepSpeed configuration"


def _unaliased(zero: Any) -> Any:
    if not isinstance(zero, Mapping):
        return zero
    return {_ZERO_ALIASES.get(key, key): value for key, value in zero.items()}


def _file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        values = json.loads(cache.read(path))
    except OSError as error:
        raise ConfigError(f"{_NAME} {os.fspath(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{_NAME} {os.fspath(path)!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{_NAME} {os.fspath(path)!r} is not a JSON object")
    return values


def _batch(top: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return micro-batches and samples per rank of an update: ``train_batch_size`` = micro * k * ranks."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # "auto" counts as absent: trainers that replace it pass the batches themselves.
    total, micro, steps = (None if top.get(key) in (None, "auto") else whole(top[key], key, 1) for key in keys)
    if total is None:
        return steps or 1, None if micro is None else micro * (steps or 1)
    ranks = world_size()
    if micro is None:
        steps = steps or 1
        micro = total // (steps * ranks)
    elif steps is None:
        steps = total // (micro * ranks)
    if steps < 1 or micro * steps * ranks != total:
        raise ConfigError(
            f"train_batch_size = {total} is not {micro} samples (train_micro_batch_size_per_gpu) times {steps} "
            f"(gradient_accumulation_steps) times {ranks} ranks\nLeave one of the three out, or make them agree."
        )
    return steps, micro * steps


def _precision(top: Section) -> dict[str, Any]:
    fp16 = top.section("fp16", _FP16, {"fp16_master_weights_and_grads": _MASTERS})
    bf16 = Section(
        top.get("bf16", top.get("bfloat16", {})),
        "bf16",
        _BF16,
        refused={"bf16_master_weights_and_grads": _MASTERS, "bf16_optimizer_states": _MASTERS},
    )
    autocast = top.section("torch_autocast", ("enabled", "dtype", "lower_precision_safe_modules"))
    enabled = [each.name for each in (fp16, bf16, autocast) if each.switch("enabled")]
    if len(enabled) > 1:
        raise ConfigError(f"{' and '.join(enabled)} are enabled: choose one")
    options = precision_options(None)
    if enabled == ["fp16"]:
        options = precision_options(torch.float16, _scaler(fp16))
    elif enabled == ["bf16"]:
        checks = [bf16.switch(key) for key in ("check_grad_overflow", "check_overflow")]
        options = precision_options(torch.bfloat16, StaticGradScaler(1.0) if any(checks) else None)
    elif enabled == ["torch_autocast"]:
        dtype = _dtype(autocast.get("dtype", "bfloat16"), "torch_autocast.dtype")
        # DeepSpeed scales the loss by torch.amp.GradScaler() then.
        options = precision_options(dtype, GradScaler() if dtype == torch.float16 else None)
        if autocast.get("lower_precision_safe_modules") is not None:
            raise ConfigError("torch_autocast.lower_precision_safe_modules: not supported, torch's lists decide")
    if (reduced := top.get("communication_data_type")) is not None:
        options["reduce_dtype"] = _dtype(reduced, "communication_data_type")
    types = top.section("data_types", ("grad_accum_dtype",))
    if types.get("grad_accum_dtype") not in (None, "fp32"):
        raise ConfigError("data_types.grad_accum_dtype: gradients are accumulated in fp32; leave it out")
    return options


def _scaler(fp16: Section) -> GradScaler:
    if scale := fp16.number("loss_scale"):
        return StaticGradScaler(scale)
    if fp16.value("consecutive_hysteresis"):
        raise ConfigError("fp16.consecutive_hysteresis: not supported, overflows count until the scale is next raised")
    power = fp16.number("initial_scale_power", 16)
    if power >= 128:
        raise ConfigError(f"fp16.initial_scale_power = {power:g}: give less than 128, for the scale is fp32")
    return GradScaler(
        2.0**power,
        growth_interval=fp16.whole("loss_scale_window", 1000, 1),
        min_scale=min(2.0**power, fp16.number("min_loss_scale", 1)),
        hysteresis=fp16.whole("hysteresis", 2, 1),
        growth_delay=1,
    )


def _dtype(value: Any, name: str) -> torch.dtype:
    if not isinstance(value, str) or value not in _DTYPES:
        raise ConfigError(f"{name} = {value!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _zero(zero: Section) -> dict[str, Any]:
    stage = zero.whole("stage")
    if stage > 3:
        raise ConfigError(f"{zero.path('stage')} = {stage}: choose 0, 1, 2 or 3")
    offloads = {
        "offload_optimizer": _offload(zero, "offload_optimizer", _OPTIMIZER_KEYS, ("cpu_offload",)),
        "offload_param": _offload(zero, "offload_param", _PARAM_KEYS, ("cpu_offload_param", "cpu_offload_params")),
    }
    options: dict[str, Any] = {"wire": _wire(zero) or "exact", **_placement(zero, stage)}
    return options | zero_options(
        zero,
        stage,
        stage_key="stage",
        bucket_keys=[
            "reduce_bucket_size",
            *(["stage3_prefetch_bucket_size"] if stage == 3 else []),
            *(["sub_group_size"] if offloads["offload_optimizer"] is not None else []),
        ],
        whole_key="stage3_param_persistence_threshold",
        offloads=offloads,
    )


def _wire(zero: Section) -> dict[str, str | WireFormat]:
    """Translate the codes of ZeRO++ (arXiv 2306.10209): qwZ gathers int8, qgZ reduces int4."""
    codes: dict[str, str | WireFormat] = {}
    if zero.switch("zero_quantized_weights"):
        codes["gather"] = "int8"
    if zero.switch("zero_quantized_gradients"):
        codes["reduce"] = "int4"
    if zero.get("zeropp_loco_param") in (None, False):
        return codes
    name = zero.path("zeropp_loco_param")
    zero.section("zeropp_loco_param", ("err_beta", "reset_T"))
    if "reduce" not in codes:
        raise ConfigError(f"{name} needs zero_quantized_gradients: add it")
    codes["reduce"] = wire("int4", feedback=True)
    say(
        f"{name}: gradients are coded with error feedback; err_beta and reset_T have no effect, for each error is "
        "added once, whole, to the next gradient"
    )
    return codes


def _placement(zero: Section, stage: int) -> dict[str, Any]:
    """Translate hpZ of ZeRO++, a second copy of the parameters inside each partition, to ZeRO on a grid of ranks."""
    key, ranks = zero.path("zero_hpz_partition_size"), world_size()
    size = zero.whole("zero_hpz_partition_size", 1, 1)
    if size == 1:
        return {}
    if stage != 3:
        say(f"{key} has no effect below stage 3: there are no gathers in backward")
        return {}
    if ranks % size:
        raise ConfigError(f"{key} = {size} does not divide the {ranks} ranks of the job\nGive the ranks of one host.")
    if size == ranks:
        return {}
    # The first dimension cuts the larger pieces: a partition's copy is what a gather along the second one makes.
    rows = [list(range(place, ranks, size)) for place in range(size)]
    return {"placement": placement("cuda" if torch.cuda.is_available() else "cpu", rows), "shard_dims": (0, 1)}


_PARAM_KEYS = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
_OPTIMIZER_KEYS = (
    *_PARAM_KEYS[:-1],
    *("pipeline_read", "pipeline_write", "pipeline", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
)


def _offload(zero: Section, key: str, keys: tuple[str, ...], older_keys: tuple[str, ...]) -> OffloadTo | None:
    if any(zero.get(older) for older in older_keys):
        return OffloadTo("cpu")
    values = zero.section(key, keys)
    if values.get("ratio", 1) != 1:
        raise ConfigError(f"{values.path('ratio')}: not supported, all of the state is offloaded")
    # DeepSpeed counts elements of fp32, OffloadTo bytes.
    in_cpu = 4 * values.whole("max_in_cpu", 1e9) if "max_in_cpu" in keys else 0
    return offload(values, "'cpu', 'nvme' or 'none'", in_cpu)


def _optimizer(value: Any) -> MakeOptimizer | None:
    if value is None:
        return None
    values = Section(value, "optimizer", ("type", "params", "legacy_fusion"))
    if "type" not in values:
        raise ConfigError("optimizer lacks 'type', such as 'AdamW'")
    name = str(values["type"])
    params = dict(values.get("params") or {})
    if params.pop("max_grad_norm", 0):
        raise ConfigError("optimizer.params.max_grad_norm: set 'gradient_clipping' instead, as DeepSpeed asks for")
    for key, parameter in params.items():
        not_auto(parameter, f"optimizer.params.{key}")
    torch_adam = params.pop("torch_adam", False)
    if name.lower() == "muon":
        raise ConfigError(
            f"optimizer.type = {name!r}: DeepSpeed's has other defaults than torch.optim.Muon, and makes Adam's update "
            "where use_muon is False\nCreate the optimizer yourself, and leave it out of the configuration."
        )
    if name.lower() not in ("adam", "adamw"):
        return by_name(name, params)
    if name.lower() == "adamw":
        params["adam_w_mode"] = True
    if torch_adam:
        decoupled = switch(params.pop("adam_w_mode", True), "optimizer.params.adam_w_mode")
        return of_torch("AdamW" if decoupled else "Adam", params, name)
    return adam(name, params)


def _scheduler(value: Any) -> MakeScheduler | None:
    if value is None:
        return None
    values = Section(value, "scheduler", ("type", "params"))
    kind, params = values.get("type"), values.get("params") or {}
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise ConfigError(f"scheduler.type = {kind!r}: choose one of {', '.join(SCHEDULES)}")
    make = SCHEDULES[kind]
    # Report a wrong parameter now, not when the optimizer is created.
    make(torch.optim.SGD([torch.zeros(1)], lr=0.1), {k: v[:1] if isinstance(v, list) else v for k, v in params.items()})
    return lambda optimizer: make(optimizer, params)
