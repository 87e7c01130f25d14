"""GraphConfig and the switches: what chooses a stage, what means nothing here, what is refused."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import Predict, mlp, switches
from zerograph.compat import notices
from zerograph.compat.oneflow import nn
from zerograph.compat.oneflow.boxing import nccl
from zerograph.compat.oneflow.nn.graph.config import GraphConfig


class Made(nn.Graph):
    def __init__(self, told: Any = None) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 2)
        self.add_optimizer(torch.optim.SGD(self.model.parameters()))
        if told is not None:
            told(self.config)


def by_mode(config: GraphConfig) -> None:
    config.set_zero_redundancy_optimizer_mode("distributed_split")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_switches_choose_the_stage_of_a_mode(stage: int) -> None:
    with switches(stage):
        assert Made(by_mode).config.zero.stage == stage


def test_switches_set_while_a_graph_is_constructed_hold_for_it_and_for_later_ones() -> None:
    def told(config: GraphConfig) -> None:
        by_mode(config)
        flow.boxing.nccl.enable_use_compute_stream(True)

    with switches(1):
        assert Made(told).config.zero.stage == 2
        assert Made(by_mode).config.zero.stage == 2


def test_a_graph_keeps_the_stage_that_it_got() -> None:
    with switches(3):
        made = Made(by_mode)
    assert made.config.zero.stage == 3
    made.config.set_zero_redundancy_optimizer_mode("distributed_split")
    assert made.config.zero.stage == 3


def test_false_undoes_a_switch() -> None:
    with switches(2):
        flow.boxing.nccl.enable_use_compute_stream(False)
        assert Made(by_mode).config.zero.stage == 1


def test_without_a_mode_the_switches_mean_nothing() -> None:
    with switches(3):
        assert Made().config.zero.stage == 0


def test_enable_zero_wins_over_the_switches() -> None:
    with switches(3):
        assert Made(lambda config: config.enable_zero(True, stage=1)).config.zero.stage == 1


def test_disabled_group_boxing_alone_is_stage_1_and_says_so() -> None:
    flow.boxing.nccl.disable_group_boxing_by_dst_parallel(True)
    try:
        with pytest.warns(UserWarning, match="only together with"):
            assert Made(by_mode).config.zero.stage == 1
    finally:
        flow.boxing.nccl.disable_group_boxing_by_dst_parallel(False)


def test_enable_zero_has_oneflows_defaults() -> None:
    config = GraphConfig()
    config.set_zero_redundancy_optimizer_mode("non_distributed")
    assert (config.zero.shard_by, config.zero.stage) == ("parameters", 1)
    config.enable_zero()
    # On one rank a slice is the whole.
    assert (config.zero.shard_by, config.zero.stage, config.zero.shard_min_size) == ("elements", 2, 1024)
    config.enable_zero(False)
    assert config.zero.stage == 0


def small_slices() -> list[int]:
    config = GraphConfig()
    sizes = []
    config.enable_zero(shard_min_size=8)
    sizes.append(config.zero.shard_min_size)
    config.enable_zero(min_shard_size=4)
    sizes.append(config.zero.shard_min_size)
    config.set_zero_redundancy_optimizer_min_size_after_split(3)
    # Nothing else keeps the first rank from leaving before the second has come.
    torch.distributed.barrier()
    return [*sizes, config.zero.shard_min_size]


def test_the_least_size_is_that_of_one_ranks_slice(pool: Any) -> None:
    assert pool.run(2, small_slices) == [[16, 8, 6]] * 2


def test_amp_is_fp16_without_loss_scaling_unless_told() -> None:
    config = GraphConfig()
    config.enable_amp()
    assert (config.precision.amp_dtype, config.precision.grad_scaler) == (torch.float16, None)
    for scaler in (flow.amp.StaticGradScaler(scale_factor=200.0), flow.amp.GradScaler(init_scale=2.0**30)):
        graph = Predict(mlp())
        graph.set_grad_scaler(scaler)
        assert graph.config.precision.grad_scaler is scaler
    config.enable_amp(True, dtype=torch.bfloat16)
    assert config.precision.amp_dtype is torch.bfloat16
    config.enable_amp(False)
    assert config.precision.amp_dtype is None


TUNING = [name for name, one in vars(GraphConfig).items() if "No effect here" in (inspect.getdoc(one) or "")]


def test_options_that_tune_oneflows_kernels_say_once_that_they_have_no_effect() -> None:
    assert len(TUNING) > 15
    config = GraphConfig()
    before = config.key()
    for name in TUNING:
        notices._warned_calls.discard(f"config.{name}()")
        with pytest.warns(UserWarning, match=rf"config.{name}\(\) has no effect"):
            getattr(config, name)(True)
        with warnings.catch_warnings(action="error"):
            getattr(config, name)(True)
    assert config.key() == before


def test_switches_that_tune_oneflows_runtime_say_once_that_they_have_no_effect() -> None:
    notices._warned_calls.clear()
    with pytest.warns(UserWarning, match="set_fusion_threshold_mbytes"):
        nccl.set_fusion_threshold_mbytes(16)


def test_zerographs_own_options_are_there_and_unknown_ones_are_refused() -> None:
    config = GraphConfig()
    config.clip_grad_norm = 1.0
    with pytest.raises(zg.ConfigError, match="did you mean 'memory_budget'"):
        config.memory_bugdet = "1GiB"  # type: ignore[attr-defined]


MISTAKES: list[tuple[Any, str]] = [
    (lambda c: c.set_zero_redundancy_optimizer_mode("split"), "unknown ZeRO mode"),
    (lambda c: c.enable_zero(stage=4), "choose 0, 1, 2 or 3"),
    (lambda c: c.enable_zero(shard_min_size=0), "1 or more"),
    (lambda c: c.enable_zero(shard_restore_level=3), "0, 1 or 2"),
    (lambda c: c.enable_amp("fp16"), "True or False"),
    (lambda c: c.enable_amp(dtype=torch.float32), "torch.bfloat16 or torch.float16"),
    (lambda c: c.set_zero_redundancy_optimizer_min_size_after_split(1.5), "whole number"),
    (lambda c: c.set_gradient_accumulation_steps(0), "1 or more"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_wrong_value_is_refused_and_changes_nothing(mistake: Any, message: str) -> None:
    config = GraphConfig()
    before = config.key()
    with pytest.raises(zg.ConfigError, match=message):
        mistake(config)
    assert config.key() == before


def test_a_switch_takes_true_or_false() -> None:
    with pytest.raises(zg.ConfigError, match="True or False"):
        flow.boxing.nccl.enable_use_compute_stream(1)  # type: ignore[arg-type]


GRAPH_MISTAKES: list[tuple[Any, str]] = [
    (lambda g: g.set_grad_scaler(torch.amp.GradScaler("cpu")), "flow.amp.GradScaler"),
    (lambda g: g.debug(4), "from -1"),
    (lambda g: g.debug(ranks="all"), "a list of ranks"),
    (lambda g: g.model.to(nn.graph.GraphModule).set_stage(0), "pipeline"),
    (lambda g: setattr(g.model.to(nn.graph.GraphModule), "stage_id", 1), "pipeline"),
    (lambda g: setattr(g.model.to(nn.graph.GraphModule), "activation_checkpointing", 2), "True or False"),
    (lambda g: g.add_optimizer(torch.optim.SGD(g.model.parameters()), is_sparse=True), "dense"),
    (
        lambda g: g.add_optimizer(torch.optim.SGD([{"params": g.model.parameters(), "clip_grad_max_norm": 1.0}])),
        "no clip_grad_norm_type",
    ),
    (lambda g: nn.Graph.trace(g.model), "takes a function"),
]


@pytest.mark.parametrize(("mistake", "message"), GRAPH_MISTAKES)
def test_what_a_graph_cannot_do_is_refused(mistake: Any, message: str) -> None:
    with pytest.raises(zg.ConfigError, match=message):
        mistake(Predict(mlp()))


def test_a_graph_that_does_not_call_super_init_is_told_to() -> None:
    class Forgetful(nn.Graph):
        def __init__(self) -> None:
            self.anything = 1

    with pytest.raises(zg.ConfigError, match="must call super"):
        Forgetful()


def test_an_unknown_name_is_said_to_be_in_neither_namespace() -> None:
    for namespace in (flow, nn, nn.functional, flow.optim, flow.optim.lr_scheduler):
        with pytest.raises(AttributeError, match="no_such_thing"):
            namespace.no_such_thing  # noqa: B018
    assert flow.randn(2).shape == (2,)
    assert nn.LayerNorm is torch.nn.LayerNorm
    assert flow.optim.NAdam is torch.optim.NAdam
    assert issubclass(flow.optim.AdamW, torch.optim.AdamW)
    assert nn.functional.gelu is torch.nn.functional.gelu


def test_an_option_that_does_not_exist_is_named_with_those_alike() -> None:
    config: Any = GraphConfig()
    with pytest.raises(AttributeError, match="no 'enable_zeros'; did you mean 'enable_zero'"):
        config.enable_zeros(True)
    assert not hasattr(config, "enable_foo")


def test_one_process_that_names_several_ranks_is_told_how_to_start() -> None:
    with pytest.raises(zg.PlacementError, match=r"one process alone: start it with .* --nproc_per_node 2"):
        flow.placement("cpu", ranks=[0, 1])


def test_an_sbp_given_as_text_is_named_whole() -> None:
    with pytest.raises(zg.PlacementError, match="'broadcast' is not an SBP"):
        flow.ones(2, placement=flow.placement.all("cpu"), sbp="broadcast")


@pytest.mark.parametrize("name", ["nn.init", "nn.parallel", "nn.utils", "nn.utils.rnn", "utils.data"])
def test_what_is_torchs_can_be_imported_under_oneflows_name(name: str) -> None:
    assert importlib.import_module(f"zerograph.compat.oneflow.{name}") is importlib.import_module(f"torch.{name}")
