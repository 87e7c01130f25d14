"""A ColossalAI configuration sets the options of a graph; what a graph cannot do is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerograph as zg
from zerograph.compat.colossalai.configuration import read


def options(**zero: Any) -> dict[str, Any]:
    return dict(read({"zero": {"level": 3, **zero}}).options)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_level_is_the_stage_by_type_or_by_level(level: int) -> None:
    for zero in ({"type": f"ZeroRedundancyOptimizer_Level_{level}"}, {"level": level}):
        found = read({"zero": zero}).options
        assert found["stage"] == level


def test_zero_computes_in_fp16_unless_another_precision_is_chosen() -> None:
    assert options()["amp_dtype"] is torch.float16
    assert read({"zero": {"level": 1}, "bf16": True}).options["amp_dtype"] is torch.bfloat16
    assert read({"zero": {"level": 1}, "fp16": False}).options["amp_dtype"] is None
    assert read({}).options["amp_dtype"] is None


def test_the_loss_scale_is_static_or_dynamic_with_its_arguments() -> None:
    static = options(static_loss_scale=128)["grad_scaler"]
    assert isinstance(static, zg.StaticGradScaler)
    assert static.get_scale() == 128
    arguments = {"init_scale": 1024, "scale_factor": 4, "scale_window": 7, "min_scale": 2, "delayed_shift": 3}
    dynamic = options(dynamic_loss_scale=True, dynamic_loss_args=arguments)["grad_scaler"]
    assert (dynamic.init_scale, dynamic.growth_factor, dynamic.backoff_factor) == (1024, 4, 0.25)
    assert (dynamic.growth_interval, dynamic.min_scale, dynamic.hysteresis) == (7, 2, 3)


def test_the_scaler_of_naive_fp16_has_other_defaults_than_that_of_torch() -> None:
    for mode, interval, hysteresis in (("torch", 2000, 1), ("naive", 1000, 2)):
        for given in ({}, {"growth_interval": 7}, {"hysteresis": 3}):
            scaler = read({"fp16": {"mode": mode, **given}}).options["grad_scaler"]
            expected = {"growth_interval": interval, "hysteresis": hysteresis, **given}
            assert {name: getattr(scaler, name) for name in expected} == expected


def test_clipping_accumulation_and_persistent_parameters_have_their_options() -> None:
    found = options(clip_grad=1.5, gradient_accumulation_steps=4, param_persistence_threshold=99)
    assert found["clip_grad_norm"] == 1.5
    assert found["gradient_accumulation_steps"] == 4
    assert found["shard_min_size"] == 100  # those of 99 elements persist there


def test_the_least_of_the_bucket_sizes_counts_in_elements() -> None:
    assert options(reduce_bucket_size=5000, prefetch_bucket_size=1000)["bucket_size"] == 4000
    assert options(reduce_bucket_size=int(5e8))["bucket_size"] is None


def test_offload_keeps_its_options(tmp_path: Path) -> None:
    files = {"device": "nvme", "pin_memory": False, "nvme_path": str(tmp_path)}
    found = options(
        offload_optimizer_config={**files, "fast_init": True}, offload_param_config={**files, "max_in_cpu": 5}
    )
    state, parameters = found["offload"].optimizer, found["offload"].parameters
    assert (state.device, state.nvme_path, state.pin_memory, state.fast_init) == ("nvme", str(tmp_path), False, True)
    assert (parameters.device, parameters.max_in_cpu) == ("nvme", 5)


def test_the_published_slip_is_taken_for_max_in_cpu_and_said_so() -> None:
    cpu = {"device": "cpu", "pin_memory": True}
    with pytest.warns(UserWarning, match="published examples write it for max_in_cpu"):
        found = options(offload_optimizer_config=cpu, offload_param_config={**cpu, "fast_init": 12345})
    assert found["offload"].parameters.max_in_cpu == 12345


def test_the_optimizer_is_made_with_its_arguments() -> None:
    made = read({"optimizer": {"type": "Adam", "lr": 0.002, "weight_decay": 0}}).make_optimizer(
        [nn.Parameter(torch.ones(2))]
    )
    assert type(made) is torch.optim.Adam
    assert made.param_groups[0]["lr"] == 0.002


def test_a_python_file_is_read_with_names_in_capitals_left_to_the_user(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "import math\nBATCH_SIZE = 128\nLEVEL = 2\ndef helper(): return 1\nzero = dict(level=LEVEL, clip_grad=1.0)\n"
    )
    assert read(path).options["stage"] == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zer0": {}}, "did you mean 'zero'"),
        ({"zero": {}}, "zero lacks 'type'"),
        ({"zero": {"level": 4}}, "choose 1, 2 or 3"),
        ({"zero": {"type": "ZeRO_3"}}, "choose one of 'ZeroRedundancyOptimizer_Level_1'"),
        ({"zero": {"type": "ZeroRedundancyOptimizer_Level_3", "level": 2}}, "leave one out"),
        ({"zero": {"level": 3, "clip_gard": 1}}, "did you mean 'clip_grad'"),
        ({"zero": {"level": 3}, "fp16": {"mode": "torch"}}, "ZeRO turns fp16 on by itself"),
        ({"zero": {"level": 3, "dynamic_loss_args": {"init_scale": 2}}}, "no dynamic_loss_scale"),
        ({"zero": {"level": 3, "dynamic_loss_scale": True, "static_loss_scale": 2}}, "choose one"),
        ({"zero": {"level": 3, "offload_optimizer_config": {"device": "nvme"}}}, "lacks nvme_path"),
        ({"zero": {"level": 3, "offload_optimizer_config": {"device": "disk"}}}, "choose 'cpu' or 'nvme'"),
        ({"zero": {"level": 3, "offload_optimizer_config": {"devise": "cpu"}}}, "did you mean 'device'"),
        ({"zero": {"level": 3, "offload_param_config": {"device": "cpu"}}}, "needs offload_optimizer_config"),
        (
            {"zero": {"level": 2, "cpu_offload": True, "offload_param_config": {"device": "cpu"}}},
            "needs level 3, not 2",
        ),
        (
            {"zero": {"level": 3, "cpu_offload": True, "offload_param_config": {"device": "cpu", "fast_init": True}}},
            "no key 'fast_init'",
        ),
        ({"parallel": {"pipeline": 2}}, "only data parallel"),
        ({"optimizer": {"type": "Lamb"}}, "there is no optimizer 'Lamb'"),
        ({"optimizer": {"lr": 1}}, "with a 'type'"),
        ({"fp16": {"mode": "apex"}}, "Apex is not supported"),
    ],
)
def test_what_cannot_be_said_names_the_key_and_the_choices(config: dict[str, Any], says: str) -> None:
    with pytest.raises(zg.ConfigError, match=says):
        read(config)
