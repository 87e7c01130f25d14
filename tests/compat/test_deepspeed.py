"""A DeepSpeed configuration trains as plain PyTorch does with what it asks for."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import sliced
from tests.models import TokenLoss, batches, make, part, update_by
from tests.pool import Pool

# Most of these configurations do not say whether to clip.
pytestmark = pytest.mark.filterwarnings("ignore:zerograph. the DeepSpeed configuration has no gradient_clipping")
UPDATES = 6
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3, "warmup_type": "linear"}}
FP32: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": ADAM,
    "scheduler": WARMUP,
    "steps_per_print": 100,
}
FP16: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "adam_w_mode": False}},
    "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1},
    "gradient_clipping": 1.0,
}


class Step(zg.ZeroGraph):
    def __init__(self, model: nn.Module, settings: zg.Settings) -> None:
        super().__init__()
        self.model, self.loss_fn = model, TokenLoss()
        settings.set_up(self, model.parameters())

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def trained(config: dict[str, Any], stages: list[int]) -> list[tuple[list[float], dict[str, Tensor], float]]:
    """For each stage: losses, parameters, and the loss scale in the end."""
    found = []
    for stage in stages:
        settings = zg.from_deepspeed({**config, "zero_optimization": {"stage": stage, "overlap_comm": True}})
        step = Step(make("mlp"), settings)
        losses = [float(step(part(x), part(y))) for x, y in batches("mlp", UPDATES)]
        scaler = step.config.precision.grad_scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        found.append((losses, step.state_dict()["modules"]["model"], scale))
    return found


@sliced("stages", [[0, 3]], [[1, 2]])
def test_clipping_accumulation_and_warm_up_are_those_of_plain_pytorch_at_every_stage(
    pool: Pool, stages: list[int]
) -> None:
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for number, (x, y) in enumerate(batches("mlp", UPDATES)):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, max(0, number - 1) / 3)
        losses.append(update_by(optimizer, TokenLoss()(model(x), y), clip=0.5).item())
    for ours, parameters, _ in pool.run(2, trained, FP32, stages)[0]:
        assert ours == pytest.approx(losses, abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), atol=2e-5, rtol=0)


def clipped_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
    x: Tensor,
    y: Tensor,
) -> float:
    """One step of plain PyTorch in low precision, gradients clipped to a norm of 1: its loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = TokenLoss()(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def test_fp16_scales_skips_and_clips_as_torchs_grad_scaler_does(pool: Pool) -> None:
    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    losses = []
    for x, y in batches("mlp", UPDATES):
        losses.append(clipped_step(model, optimizer, scaler, torch.float16, x, y))
    assert scaler.get_scale() < 2.0**24  # some were skipped
    (ours, _, scale), *_ = pool.run(2, trained, FP16, [3])[0]
    assert scale == scaler.get_scale()
    assert ours == pytest.approx(losses, abs=2e-3)


STEPS = 20
WARM = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}}


def published(folder: Path) -> dict[str, tuple[torch.dtype, dict[str, Any]]]:
    """Configurations of DeepSpeed's own pages: each stage, both low precisions, state on the CPU and in files."""
    files = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    common = {"optimizer": ADAM, "scheduler": WARM, "gradient_clipping": 1.0}
    half = {**common, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 1}}
    brain = {**common, "bf16": {"enabled": True}}
    cpu = {"device": "cpu", "pin_memory": True}
    return {
        "stage 1": (torch.float16, {**half, "zero_optimization": {"stage": 1}}),
        "stage 2 on the CPU": (torch.float16, {**half, "zero_optimization": {"stage": 2, "offload_optimizer": cpu}}),
        "stage 3 in files": (
            torch.float16,
            {**half, "zero_optimization": {"stage": 3, "offload_optimizer": files, "offload_param": files}},
        ),
        "stage 2, bf16": (torch.bfloat16, {**brain, "zero_optimization": {"stage": 2}}),
        "stage 3, bf16, micro-batches": (
            torch.bfloat16,
            {**brain, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}},
        ),
    }


def trained_as_published(config: dict[str, Any]) -> list[float]:
    step = Step(make("mlp"), zg.from_deepspeed(config))
    return [float(step(part(x), part(y))) for x, y in batches("mlp", STEPS)]


def in_low_precision_on_one_device(dtype: torch.dtype) -> list[float]:
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for number, (x, y) in enumerate(batches("mlp", STEPS)):
        at = number - 1  # DeepSpeed counts from behind the first update
        warm = 0.0 if at < 0 else math.log(at + 1) / math.log(5) if at < 5 else (20 - at) / 15
        optimizer.param_groups[0]["lr"] = 1e-3 * warm
        losses.append(clipped_step(model, optimizer, scaler, dtype, x, y))
    return losses


@sliced("name", ["stage 3 in files", "stage 3, bf16, micro-batches"], published(Path()))
def test_twenty_steps_of_published_configurations_are_those_of_one_device(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    dtype, configuration = published(tmp_path)[name]
    expected = in_low_precision_on_one_device(dtype)
    assert expected[0] != expected[-1]
    losses = pool.run(2, trained_as_published, configuration)[0]
    assert losses == pytest.approx(expected, abs=2e-3 if dtype is torch.float16 else 1e-2)


def test_a_file_says_what_the_dict_says(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FP32))
    assert zg.from_deepspeed(path).options == zg.from_deepspeed(FP32).options


def test_a_rank_gives_all_micro_batches_of_an_update() -> None:
    assert zg.from_deepspeed(FP32).samples == 4


def test_persistent_parameters_stay_whole_and_large_buckets_keep_to_the_default() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 1e4, "stage3_prefetch_bucket_size": 5e7}
    options = zg.from_deepspeed({"zero_optimization": zero}).options
    assert options["shard_min_size"] == 10001
    assert options["bucket_size"] is None
    small = zg.from_deepspeed({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}).options
    assert small["bucket_size"] == 4000


def test_each_graph_gets_a_loss_scale_of_its_own() -> None:
    settings = zg.from_deepspeed(FP16)
    first, second = zg.Config(), zg.Config()
    settings.configure(first)
    settings.configure(second)
    assert first.precision.grad_scaler is not second.precision.grad_scaler


def test_adam_decouples_weight_decay_unless_told_not_to_as_deepspeeds_kernel_does() -> None:
    kinds = {
        mode: type(
            zg.from_deepspeed({"optimizer": {"type": "Adam", "params": params}}).make_optimizer([nn.Parameter(x)])
        )
        for mode, params, x in ((True, {}, torch.ones(1)), (False, {"adam_w_mode": False}, torch.ones(1)))
    }
    assert kinds == {True: torch.optim.AdamW, False: torch.optim.Adam}


def test_files_go_where_the_configuration_says(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 1000}}
    options = zg.from_deepspeed({"zero_optimization": zero}).options
    assert options["offload"].optimizer.nvme_path == str(tmp_path)
    assert options["offload"].parameters.max_in_cpu == 4000  # elements there, bytes here


def test_codes_of_zero_plus_plus_are_wire_formats() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert zg.from_deepspeed({"zero_optimization": zero}).options["wire"] == {"gather": "int8", "reduce": "int4"}
    assert zg.from_deepspeed({"zero_optimization": {"stage": 3}}).options["wire"] == "exact"


def test_loco_is_error_feedback() -> None:
    zero = {"stage": 2, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    with pytest.warns(UserWarning, match="err_beta and reset_T have no effect"):
        options = zg.from_deepspeed({"zero_optimization": zero, "gradient_clipping": 0.0}).options
    assert options["wire"] == {"reduce": zg.wire("int4", feedback=True)}


def test_a_partition_of_hpz_is_a_column_of_a_grid_that_zero_splits_both_ways(pool: Pool) -> None:
    for stage, grid in ((3, ([[0, 2], [1, 3]], (0, 1))), (2, None)):
        assert pool.run(4, _hpz, stage) == [grid] * 4


def _hpz(stage: int) -> tuple[list[list[int]], Any] | None:
    with warnings.catch_warnings(action="ignore"):
        settings = zg.from_deepspeed({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": 2}})
    config = zg.Config()
    settings.configure(config)
    # A rank that is done at once would close connections of the grid that another has not seen open yet.
    torch.distributed.barrier()
    return None if config.mesh.placement is None else (config.mesh.placement.mesh.tolist(), config.zero.shard_dims)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "2 does not divide the 1 ranks"),
        ({"zero_optimization": {"stage": 2, "zeropp_loco_param": {}}}, "needs zero_quantized_gradients"),
        ({"zero": {"stage": 1}}, "no key 'zero'"),
        ({"zero_optimization": {"stages": 1}}, "did you mean 'stage'"),
        ({"zero_optimization": {"stage": 4}}, "choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": 8}}, "give true or false"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "sends all weights as int8"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "needs offload_optimizer"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "lacks nvme_path"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        ({"tensor_parallel": {"autotp_size": 2}}, "zg.annotate"),
        ({"sequence_parallel_size": 2}, "not supported"),
        ({"gradient_allreduce_op": "sum"}, "those of the whole batch's loss"),
        ({"optimizer": {"type": "adamax"}}, "did you mean 'Adamax'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "is a text: give a number"),
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled is 'auto'"),
        ({"communication_data_type": {"enabled": True}}, "choose one of fp32"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, "fp16.initial_scale_power = 2000: .* than 128"),
        ({"sparse_gradients": True}, "gradients are dense"),
        ({"optimizer": {"type": "OneBitAdam"}}, "there is no optimizer 'OneBitAdam'"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}, "other defaults than torch.optim.Muon"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": "false"}}}, "adam_w_mode = 'false': give true or"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr is 'auto'"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "no parameter 'learning_rate'"),
        ({"scheduler": {"type": "Cosine"}}, "choose one of LRRangeTest"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size = 7 is not"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_the_key(config: dict[str, Any], says: str) -> None:
    with pytest.raises(zg.ConfigError, match=says):
        zg.from_deepspeed(config)


def test_a_schedule_may_have_a_rate_for_each_group() -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.2, 0.4]}}
    settings = zg.from_deepspeed({"scheduler": cycle, "gradient_clipping": 0.0})
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=1.0)
    assert settings.scheduler is not None
    assert settings.scheduler(optimizer).get_last_lr() == [0.1, 0.2]


def test_what_has_no_effect_is_said_once_and_what_is_usual_is_not() -> None:
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "stage3_max_live_parameters": 1e9}
    config = {
        "zero_optimization": zero,
        "wall_clock_breakdown": True,
        "tensorboard": {"enabled": False},
        "gradient_clipping": 0.0,
        "_comment": "mine",
        "sequence_parallel_size": 1,
    }
    with pytest.warns(UserWarning, match="without effect") as said:
        zg.from_deepspeed(config)
    assert [str(one.message) for one in said] == [
        "zerograph: without effect in the DeepSpeed configuration: wall_clock_breakdown, "
        "zero_optimization.stage3_max_live_parameters"
    ]
    with warnings.catch_warnings(action="error"):
        usual = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 10}
        zg.from_deepspeed({**usual, "gradient_clipping": 1.0})


def test_a_configuration_that_does_not_say_whether_to_clip_is_told_what_happens() -> None:
    with pytest.warns(UserWarning, match="gradients are not clipped here, where DeepSpeed clips to 1.0") as said:
        assert zg.from_deepspeed({"zero_optimization": {"stage": 1}}).options["clip_grad_norm"] is None
    assert said[0].filename == __file__


def test_field_names_are_taken_as_well_as_their_aliases() -> None:
    zero = {"stage": 3, "param_persistence_threshold": 10, "prefetch_bucket_size": 1000}
    options = zg.from_deepspeed({"zero_optimization": zero, "gradient_clipping": 0}).options
    assert (options["shard_min_size"], options["bucket_size"]) == (11, 4000)


def test_static_loss_scale_and_its_options() -> None:
    static = zg.from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128}}).options["grad_scaler"]
    assert isinstance(static, zg.StaticGradScaler)
    assert static.get_scale() == 128
    dynamic = zg.from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 10}}).options["grad_scaler"]
    assert math.log2(dynamic.get_scale()) == 10
    assert (dynamic.hysteresis, dynamic.min_scale, dynamic.growth_interval) == (2, 1.0, 1000)


def test_autocast_to_fp16_scales_the_loss_as_torchs_scaler_does() -> None:
    for dtype, scaler in (("float16", zg.GradScaler()), ("bfloat16", None)):
        options = zg.from_deepspeed({"torch_autocast": {"enabled": True, "dtype": dtype}}).options
        assert repr(options["grad_scaler"]) == repr(scaler)


def test_bf16_skips_an_update_with_gradients_that_are_not_finite_if_it_is_told_to_check() -> None:
    changed = []
    for bf16 in ({}, {"check_grad_overflow": False}, {"check_grad_overflow": True}):
        step = Step(make("mlp"), zg.from_deepspeed({"optimizer": ADAM, "bf16": {"enabled": True, **bf16}}))
        before = step.state_dict()["modules"]["model"]
        for x, y in batches("mlp", 1):
            step(x * math.inf, y)
        after = step.state_dict()["modules"]["model"]
        changed.append(any(not torch.equal(after[name], before[name]) for name in before))
    assert changed == [True, True, False]
