"""DeepSpeed's JSON configuration: what it asks of a training step, as options of a graph."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.notices import say
from zerograph.compat.optimizers import ADAMS, adam, torchs
from zerograph.compat.schedules import SCHEDULES
from zerograph.compat.sections import bucket_bytes, number, say_without_effect, section, switch, whole
from zerograph.compat.settings import MakeOptimizer, MakeScheduler, Settings
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler, StaticGradScaler
from zerograph.ir.offload import Offload
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

# Other things than the training step: other tools' business, or a matter of DeepSpeed's own kernels. True: nobody would
# miss it, nothing to be said.
_WITHOUT_EFFECT = {
    "activation_checkpointing": False,
    "aio": False,
    "autotuning": False,
    "checkpoint": False,
    "comms_logger": False,
    "compile": False,
    "csv_monitor": False,
    "dataloader_drop_last": False,
    "disable_allgather": False,
    "disable_python_gc": True,
    "dump_state": False,
    "flops_profiler": False,
    "graph_harvesting": True,
    "gradient_predivide_factor": True,
    "managed_gradient_accumulation": True,
    "memory_breakdown": False,
    "monitor_config": False,
    "nebula": False,
    "prescale_gradients": True,
    "seq_parallel_communication_data_type": False,
    "steps_per_print": True,
    "tensorboard": False,
    "use_data_before_expert_parallel_": True,
    "use_data_before_expert_parallelism": True,
    "wandb": False,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": True,
}
# These would change what is computed.
_REFUSED = {
    "amp": "NVIDIA's Apex is not supported: use 'fp16' or 'bf16'",
    "compression_training": "not supported",
    "curriculum_learning": "not supported: choose the data yourself",
    "data_efficiency": "not supported: choose the data yourself",
    "eigenvalue": "not supported",
    "elasticity": "not supported: load_state_dict() goes on with any number of ranks",
    "hybrid_engine": "not supported",
    "pipeline": "not supported",
    "progressive_layer_drop": "not supported",
    "sequence_parallel_size": "not supported",
    "sparse_attention": "not supported: write the attention in the model",
    "sparse_gradients": "not supported: gradients are dense",
    "tensor_parallel": "annotate parameters with zg.annotate() instead",
}
_READ = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "torch_autocast",
    "communication_data_type",
    "data_types",
    "zero_optimization",
)
_FP16 = {
    "enabled": False,
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}
_BF16 = (
    "enabled",
    "check_grad_overflow",
    "check_overflow",
    "immediate_grad_update",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)
_ZERO_READ = (
    "stage",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "sub_group_size",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_params",
)
# Nothing to be said of the value that is what a graph does anyway, and of any (...) that nobody would miss.
_ZERO_WITHOUT_EFFECT: Mapping[str, Any] = {
    "allgather_bucket_size": ...,
    "allgather_partitions": True,
    "compute_grad_norm": ...,
    "contiguous_gradients": ...,
    "cpu_offload_use_pin_memory": None,
    "elastic_checkpoint": ...,
    "enable_sanity_checks": None,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "load_from_fp32_weights": True,
    "log_trace_cache_warnings": None,
    "memory_efficient_linear": ...,
    "overlap_comm": True,
    "override_module_apply": None,
    "parameter_alignment": None,
    "pipeline_loading_checkpoint": None,
    "reduce_scatter": True,
    "round_robin_gradients": ...,
    "save_muon_momentum_buffer_in_memory": None,
    "stage3_allgather_sequential": None,
    "stage3_gather_16bit_weights_on_model_save": ...,
    "stage3_gather_fp16_weights_on_model_save": ...,
    "stage3_max_live_parameters": None,
    "stage3_max_reuse_distance": None,
    "stage3_model_persistence_threshold": None,
    "stage3_module_granularity_threshold": None,
    "stage3_use_all_reduce_for_fetch_params": None,
    "use_multi_rank_bucket_allreduce": ...,
}
# Field names that DeepSpeed also takes.
_ZERO_ALIASES = {
    name: f"stage3_{name}"
    for name in (
        "allgather_sequential",
        "gather_16bit_weights_on_model_save",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "use_all_reduce_for_fetch_params",
    )
}
_ZERO_REFUSED = {
    "leaf_module": "give zg.local(module) what must not be looked into",
    "mics_hierarchical_params_gather": "set config.placement to a grid of ranks for hybrid sharding",
    "mics_shard_size": "set config.placement to a grid of ranks for hybrid sharding",
    "zenflow": "not supported",
    "zero_hpz_partition_size": "set config.placement to a grid of ranks for hybrid sharding",
    "zero_quantized_gradients": "not supported: it changes the numbers",
    "zero_quantized_nontrainable_weights": "not supported: it changes the numbers",
    "zero_quantized_weights": "not supported: it changes the numbers",
}


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Translate a DeepSpeed configuration, a dict or a JSON file, into settings of a training step.

    ``settings.set_up(self, model.parameters())`` in a graph's ``__init__`` does all of it; ``settings.configure()``
    only sets options. ``gradient_accumulation_steps`` = k makes one call of the graph take the k micro-batches at once:
    ``settings.samples`` per rank. Sizes of buckets are upper bounds, in elements.

    Raises:
        ConfigError: an unknown key, one that would change what is computed and is not supported, a value left to
            ``"auto"``, or batch sizes that contradict each other.
    """
    if not isinstance(config, (Mapping, str, os.PathLike)):
        raise ConfigError(f"from_deepspeed({config!r:.60}): give a dict, or the path of a JSON file")
    read = config if isinstance(config, Mapping) else _file(config)
    given = section(
        # Comments, for want of better ones in JSON.
        {key: value for key, value in read.items() if not str(key).startswith(("_", "//", "#"))},
        "the DeepSpeed configuration",
        sorted([*_READ, *_WITHOUT_EFFECT, *_REFUSED]),
    )
    if given.get("gradient_allreduce_op", "mean") != "mean":
        raise ConfigError("gradient_allreduce_op: gradients are those of the whole batch's loss; leave it out")
    for key, advice in _REFUSED.items():
        if _is_on(given.get(key), key):
            raise ConfigError(f"{key}: {advice}")
    zero = section(
        _unaliased(given.get("zero_optimization", {})),
        "zero_optimization",
        sorted([*_ZERO_READ, *_ZERO_WITHOUT_EFFECT, *_ZERO_REFUSED]),
    )
    for key, advice in _ZERO_REFUSED.items():
        if _is_on(zero.get(key), key):
            raise ConfigError(f"zero_optimization.{key}: {advice}")
    options = {**_precision(given), **_zero(zero)}
    clip = number(_known(given, "gradient_clipping", 0), "gradient_clipping")
    if "gradient_clipping" not in given:
        say(
            "the DeepSpeed configuration has no gradient_clipping: gradients are not clipped here, where DeepSpeed "
            "clips to 1.0 from version 0.19 on\nGive it, 0.0 for none."
        )
    options["clip_grad_norm"] = clip or None
    options["gradient_accumulation_steps"], samples = _batch(given)
    settings = Settings(options, _optimizer(given.get("optimizer")), _scheduler(given.get("scheduler")), samples)
    say_without_effect([*_unused(given), *_unused_of_zero(zero)], "the DeepSpeed configuration")
    return settings


def _unaliased(zero: Any) -> Any:
    if not isinstance(zero, Mapping):
        return zero
    return {_ZERO_ALIASES.get(key, key): value for key, value in zero.items()}


def _file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ConfigError(f"the DeepSpeed configuration {os.fspath(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed configuration {os.fspath(path)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"the DeepSpeed configuration {os.fspath(path)!r} is no JSON object")
    return found


def _known(given: Mapping[str, Any], key: str, default: Any, where: str = "") -> Any:
    """Return a value, refusing ``"auto"``."""
    value = given.get(key, default)
    if value == "auto":
        raise ConfigError(f"{where}{key} is 'auto', which transformers' Trainer fills in: give a value")
    return value


def _batch(given: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return micro-batches and samples per rank of an update: ``train_batch_size`` = micro * k * ranks."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # Trainers that fill these in give the batches as well.
    total, micro, steps = (None if given.get(k) in (None, "auto") else whole(given[k], k, 1) for k in keys)
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


def _precision(given: Mapping[str, Any]) -> dict[str, Any]:
    half = section(given.get("fp16", {}), "fp16", _FP16)
    brain = section(given.get("bf16", given.get("bfloat16", {})), "bf16", _BF16)
    auto = section(
        given.get("torch_autocast", {}), "torch_autocast", ("enabled", "dtype", "lower_precision_safe_modules")
    )
    wanted = [
        name
        for name, one in (("fp16", half), ("bf16", brain), ("torch_autocast", auto))
        if switch(_known(one, "enabled", False, f"{name}."), f"{name}.enabled")
    ]
    if len(wanted) > 1:
        raise ConfigError(f"{' and '.join(wanted)} are enabled: choose one")
    low = {
        "fp16.fp16_master_weights_and_grads": half.get("fp16_master_weights_and_grads"),
        "bf16.bf16_master_weights_and_grads": brain.get("bf16_master_weights_and_grads"),
        "bf16.bf16_optimizer_states": brain.get("bf16_optimizer_states"),
    }
    for key, value in low.items():
        if value:
            raise ConfigError(f"{key}: not supported, masters and optimizer state are fp32")
    options: dict[str, Any] = {"amp_dtype": None, "grad_scaler": None}
    if wanted == ["fp16"]:
        options = {"amp_dtype": torch.float16, "grad_scaler": _scaler(half)}
    elif wanted == ["bf16"]:
        options["amp_dtype"] = torch.bfloat16
    elif wanted == ["torch_autocast"]:
        options["amp_dtype"] = _dtype(auto.get("dtype", "bfloat16"), "torch_autocast.dtype")
        if auto.get("lower_precision_safe_modules") is not None:
            raise ConfigError("torch_autocast.lower_precision_safe_modules: not supported, torch's lists decide")
    if (reduced := given.get("communication_data_type")) is not None:
        options["reduce_dtype"] = _dtype(reduced, "communication_data_type")
    types = section(given.get("data_types", {}), "data_types", ("grad_accum_dtype",))
    if types.get("grad_accum_dtype") not in (None, "fp32"):
        raise ConfigError("data_types.grad_accum_dtype: gradients are accumulated in fp32; leave it out")
    return options


def _scaler(half: Mapping[str, Any]) -> GradScaler:
    def read(key: str) -> float:
        return number(_known(half, key, _FP16[key], "fp16."), f"fp16.{key}")

    if read("loss_scale"):
        return StaticGradScaler(read("loss_scale"))
    if half.get("consecutive_hysteresis"):
        raise ConfigError("fp16.consecutive_hysteresis: not supported, overflows count until the scale is next raised")
    power = read("initial_scale_power")
    if power >= 128:
        raise ConfigError(f"fp16.initial_scale_power = {power:g}: give less than 128, for the scale is fp32")
    scale = 2.0**power
    return GradScaler(
        init_scale=scale,
        growth_interval=whole(read("loss_scale_window"), "fp16.loss_scale_window", 1),
        min_scale=min(scale, read("min_loss_scale")),
        hysteresis=whole(read("hysteresis"), "fp16.hysteresis", 1),
    )


def _dtype(value: Any, name: str) -> torch.dtype:
    if value not in _DTYPES:
        raise ConfigError(f"{name} = {value!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    stage = whole(_known(zero, "stage", 0, "zero_optimization."), "zero_optimization.stage")
    if stage > 3:
        raise ConfigError(f"zero_optimization.stage = {stage}: choose 0, 1, 2 or 3")
    state, parameters = _offload(zero, "offload_optimizer", "cpu_offload"), _offload(zero, "offload_param", *_OLD)
    if parameters is not None and state is None:
        raise ConfigError("zero_optimization.offload_param needs offload_optimizer as well: add it")
    if parameters is not None and stage < 3:
        raise ConfigError(f"zero_optimization.offload_param needs stage 3, not {stage}: parameters are whole below")
    options: dict[str, Any] = {
        "mode": "distributed_split" if stage else "off",
        "optimizer_offload": state,
        "parameter_offload": parameters,
    }
    if stage:
        options["stage"] = stage
    sizes = ["reduce_bucket_size"]
    if stage == 3:
        sizes.insert(0, "stage3_prefetch_bucket_size")
        if (least := zero.get("stage3_param_persistence_threshold", "auto")) != "auto":
            # Those of so many elements stay whole there, smaller ones here.
            name = "zero_optimization.stage3_param_persistence_threshold"
            options["shard_min_size"] = whole(least, name) + 1
    if state is not None:
        sizes.append("sub_group_size")
    elements = [whole(zero[one], f"zero_optimization.{one}") for one in sizes if zero.get(one, "auto") != "auto"]
    options["bucket_size"] = bucket_bytes(filter(None, elements))
    return options


_OLD = ("cpu_offload_param", "cpu_offload_params")


def _offload(zero: Mapping[str, Any], name: str, *older: str) -> Offload | None:
    where = f"zero_optimization.{name}"
    if any(zero.get(one) for one in older):
        return Offload("cpu")
    keys = ["device", "nvme_path", "pin_memory", "buffer_count", "buffer_size"]
    keys += ["max_in_cpu"] if name == "offload_param" else ["pipeline_read", "pipeline_write", "pipeline", "fast_init"]
    keys += [] if name == "offload_param" else ["ratio", "super_offload", "cpuadam_cores_perc"]
    given = section(zero.get(name) or {}, where, keys)
    if given.get("ratio", 1) != 1:
        raise ConfigError(f"{where}.ratio: not supported, all of the state is offloaded")
    device = given.get("device", "none")
    if device in (None, "none"):
        return None
    if device not in ("cpu", "nvme"):
        raise ConfigError(f"{where}.device = {device!r}: choose 'cpu', 'nvme' or 'none'")
    if device == "nvme" and not given.get("nvme_path"):
        raise ConfigError(f"{where} lacks nvme_path, a directory on the disk to store the state in")
    return Offload(
        device,
        os.fspath(given["nvme_path"]) if device == "nvme" else None,
        switch(given.get("pin_memory", True), f"{where}.pin_memory"),
        switch(given.get("fast_init", False), f"{where}.fast_init"),
        # Elements there, bytes of fp32 here; of files only.
        4 * whole(given.get("max_in_cpu", 1e9), f"{where}.max_in_cpu") if name == "offload_param" else 0,
    )


def _optimizer(given: Any) -> MakeOptimizer | None:
    if given is None:
        return None
    found = section(given, "optimizer", ("type", "params", "legacy_fusion"))
    if "type" not in found:
        raise ConfigError("optimizer lacks 'type', such as 'AdamW'")
    name = str(found["type"])
    params = dict(found.get("params") or {})
    if params.pop("max_grad_norm", 0):
        raise ConfigError("optimizer.params.max_grad_norm: set 'gradient_clipping' instead, as DeepSpeed asks for")
    if any(value == "auto" for value in params.values()):
        key = next(key for key, value in params.items() if value == "auto")
        raise ConfigError(f"optimizer.params.{key} is 'auto', which transformers' Trainer fills in: give a value")
    torch_adam = params.pop("torch_adam", False)
    if name.lower() in ("adam", "adamw"):
        if name.lower() == "adamw":
            params["adam_w_mode"] = True
        if torch_adam:
            decoupled = params.pop("adam_w_mode", True)
            return torchs("AdamW" if decoupled else "Adam", params, name)
        return adam(name, params)
    return adam(name, params) if name in ADAMS else torchs(name, params)


def _scheduler(given: Any) -> MakeScheduler | None:
    if given is None:
        return None
    found = section(given, "scheduler", ("type", "params"))
    kind, params = found.get("type"), found.get("params") or {}
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise ConfigError(f"scheduler.type = {kind!r}: choose one of {', '.join(SCHEDULES)}")
    make = SCHEDULES[kind]
    # What is wrong with it is said here, not when there is an optimizer.
    make(torch.optim.SGD([torch.zeros(1)], lr=0.1), {k: v for k, v in params.items() if not isinstance(v, list)})
    return lambda optimizer: make(optimizer, params)


def _is_on(value: Any, key: str = "") -> bool:
    """Return whether a key asks for anything: a section does unless it is disabled, a size of 1 does not."""
    if key.endswith("_size") and value == 1:
        return False
    if isinstance(value, Mapping):
        sizes = [one for key, one in value.items() if key.endswith("size")]
        return bool(value) and value.get("enabled", True) is not False and sizes != [1]
    return value not in (None, False, 0, -1, "none")


def _unused(given: Mapping[str, Any]) -> list[str]:
    return [key for key, same in _WITHOUT_EFFECT.items() if not same and _is_on(given.get(key))]


def _unused_of_zero(zero: Mapping[str, Any]) -> list[str]:
    return [
        f"zero_optimization.{key}"
        for key, same in _ZERO_WITHOUT_EFFECT.items()
        if key in zero and same is not ... and zero[key] != same and zero[key] not in ("auto", None)
    ]
