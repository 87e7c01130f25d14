"""State that a plan offloads: its bytes, its time, and when the search for the fastest uses it."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares, sliced
from zerograph.ir.mesh import line
from zerograph.ir.offload import Offload, OffloadTo
from zerograph.planner import search as searching
from zerograph.planner.machine import Machine, machine
from zerograph.planner.plan import laid_out

LAYER = 4 * 64 * 65
LAYERS, RANKS = 8, 4
# AdamW: parameters and two moments. An accelerator's memory is dealt out in blocks of 512 bytes.
STATE = 3 * LAYERS * LAYER
ON_DEVICE = LAYERS * 512 * (2 * math.ceil(LAYER / RANKS / 512) + math.ceil(LAYER / 512))
X = torch.zeros(4, 64)


class Wide(LossStep):
    """Much state for few activations: a bucket for each layer."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
        super().__init__(model, optimizer, loss=mean_of_squares, bucket_size=LAYER)


def plan(**arguments: Any) -> zg.Plan:
    return zg.plan(Wide, X, world_size=RANKS, **{"device": "a100", "headroom": 0, **arguments})


# Plans that several tests read, and nobody may change.
@functools.cache
def offloaded() -> zg.Plan:
    return plan(stage=2, offload=Offload("cpu"))


@functools.cache
def at_stage(stage: Any) -> zg.Plan:
    return plan(stage=stage)


def test_what_rests_on_the_cpu_counts_there_and_not_on_the_device() -> None:
    found, here = offloaded(), at_stage(2)
    assert here.memory.at_rest == ON_DEVICE
    assert found.memory.at_rest == 0
    assert found.host is not None
    # And step counts.
    assert found.host.at_rest == pytest.approx(STATE / RANKS, abs=200)
    assert "in the CPU's memory: 97." in str(found)
    assert "in the CPU's memory" not in str(here)


def test_its_transfers_take_the_hosts_link_and_its_update_the_cpus_memory() -> None:
    found, described = offloaded(), machine("a100")
    taken = dict.fromkeys(("host", "cpu", "files"), 0.0)
    for event in found.time.events:
        if event.stream in taken:
            taken[event.stream] += event.seconds
    # Shards go up once, gradients' shards come down once.
    assert taken["host"] == pytest.approx(2 * LAYERS * LAYER / RANKS / described.device.host)
    # One kernel a bucket, of parameters, gradients and moments.
    read = 4 * LAYERS * LAYER / RANKS
    expected = LAYERS * described.device.overhead + read / described.device.cpu
    assert taken["cpu"] == pytest.approx(expected, rel=0.01)
    assert found.time.updating == pytest.approx(taken["cpu"])
    assert taken["files"] == 0
    assert found.time.seconds >= found.time.compute + found.time.updating


def test_what_rests_in_files_is_in_neither_memory() -> None:
    found = plan(stage=3, offload=Offload(OffloadTo("nvme", "/nowhere"), OffloadTo("nvme", "/nowhere")))
    assert found.in_files == STATE / RANKS
    assert found.host is not None
    assert found.memory.at_rest == 0
    assert found.host.at_rest < 1000
    assert any(event.stream == "files" for event in found.time.events)


def names(found: zg.Plan) -> set[str]:
    return {one.trade_offs for one in found.alternatives}


def test_an_accelerator_offloads_what_does_not_fit() -> None:
    needs = {"here": at_stage(3).memory.peak, "there": offloaded().memory.peak}
    found = plan(stage="auto", fit=needs["there"])
    assert needs["there"] < needs["here"]
    assert found.fits
    assert "offload=" in found.options
    assert not any("files" in name for name in names(found))
    best = next(one for one in found.alternatives if one.verdict == "the fastest that fits")
    assert best.options["offload"] == Offload("cpu")
    fitting = [one.plan.time.seconds for one in found.alternatives if one.plan is not None and one.plan.fits]
    assert found.time.seconds == min(fitting)


def test_a_search_leaves_the_headroom_free() -> None:
    needs = {stage: at_stage(stage).memory.peak for stage in ("off", 3)}
    assert needs[3] < needs["off"]
    found = plan(stage="auto", fit=needs[3] + 2 * 2**30, headroom=None)
    assert found.headroom == 2 * 2**30
    assert found.fits
    assert found.memory.peak <= needs[3]
    # As it is it would fit the device, and leave too little of it.
    assert needs["off"] < found.capacity
    assert all(
        "does not fit" in one.verdict for one in found.alternatives if (one.stage, one.trade_offs) == ("off", "")
    )


def test_the_cpu_has_nothing_to_offload_to_but_files() -> None:
    without = plan(stage="auto", device="cpu", fit=LAYER)
    assert not any("optimizer" in name for name in names(without))
    within = plan(stage="auto", device="cpu", fit=STATE // RANKS, nvme_path="/nowhere")
    assert any("optimizer in files" in name for name in names(within))
    assert not any("on the CPU" in name for name in names(within))
    assert within.fits
    assert within.in_files > 0


def test_a_cpu_that_is_too_small_leaves_files() -> None:
    described = machine("a100")
    # Enough for parameters and for the three buckets of state that are in memory at once, not for all of it.
    small = replace(described, device=replace(described.device, cpu_memory=STATE // RANKS * 19 // 20))
    found = plan(stage="auto", device=small, fit=offloaded().memory.peak, nvme_path="/nowhere")
    lost = {one.verdict for one in found.alternatives if one.trade_offs == "optimizer on the CPU"}
    assert lost == {"does not fit: 97.5 KiB stored in the CPU's memory"}
    assert found.fits
    assert found.in_files > 0


def test_what_cannot_fit_by_its_layout_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(*arguments: Any, **options: Any) -> zg.Plan:
        compiled.append(options)
        return planned(*arguments, **options)

    planned = searching.planned
    monkeypatch.setattr(searching, "planned", counted)
    none = plan(stage="auto", device="cpu", fit=LAYER)
    assert not none.fits
    # The least of them, to be looked at.
    assert len(compiled) == 1
    verdicts = {one.stage: one.verdict for one in none.alternatives if one.plan is None}
    assert verdicts["off"] == "does not fit: 390.0 KiB stored"


@sliced("device, stage", [("a100", "off"), ("cpu", "2")], itertools.product(("a100", "cpu"), ("off", "1", "2", "3")))
def test_no_plan_takes_less_than_its_layout_says(device: str, stage: str) -> None:
    files = OffloadTo("nvme", "/nowhere")
    places: list[dict[str, Any]] = [{}]
    if device == "cpu" or stage != "off":
        places.append({"offload": Offload(files)})
    if device != "cpu" and stage != "off":
        places.append({"offload": Offload("cpu")})
    if stage == "3":
        places.append({"offload": Offload(files, files)})
    for place in places:
        options = {**searching.STAGES[stage], **place, "gradient_accumulation_steps": 2, "amp_dtype": torch.bfloat16}
        stored = laid_out(Wide(), X, (RANKS,), machine(device), **options)
        found = searching.planned(Wide(), X, (RANKS,), machine(device), **options)
        assert 0 < stored.lower_bound <= found.memory.peak
        assert stored.device <= found.memory.at_rest
        assert stored.files == found.in_files


def test_what_is_farther_away_than_it_need_be_is_not_compiled() -> None:
    roomy = plan(stage="auto", fit=10**9)
    there = [one for one in roomy.alternatives if one.trade_offs]
    assert there
    assert all(one.plan is None and one.verdict == "not needed: fits without" for one in there)


def slow_cpu() -> Machine:
    described = machine("a100")
    return replace(described, device=replace(described.device, cpu=1e3))


def test_what_the_cpu_alone_makes_slower_is_not_compiled() -> None:
    # Stage 3 fits as it is, others do not: with their state on a CPU this slow they might, but much later.
    limit = at_stage(3).memory.peak
    assert at_stage(1).memory.peak > limit
    found = plan(stage="auto", fit=limit, device=slow_cpu())
    lost = {one.stage: one for one in found.alternatives if one.trade_offs == "optimizer on the CPU"}
    assert lost["1"].plan is None
    assert "the CPU's update takes" in lost["1"].verdict


def test_attention_of_an_accelerator_is_one_operator_in_bf16_too() -> None:
    class Attention(Wide):
        def build(self, x: Tensor) -> Tensor:
            rows = self.model(x).view(-1, 4, 8, 8)
            loss = nn.functional.scaled_dot_product_attention(rows, rows, rows).square().mean()
            loss.backward()
            return loss

    with torch.device("meta"):
        step = Attention()
    step.config.precision.amp_dtype = torch.bfloat16
    graph = step.prepare(line(2, 0, "ranks"), torch.empty(8, 256, 64, device="meta")[:, 0], device="meta").graph.graph
    attention = [node for node in graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(attention) == 2
    assert all(one.device.type == "meta" for node in attention for one in node.meta["val"])


def test_more_micro_batches_than_the_graph_has_are_tried() -> None:
    step = Wide()
    step.config.gradient_accumulation_steps = 2
    least = laid_out(step, X, (RANKS,), machine("cpu"), stage=3).lower_bound
    found = zg.plan(step, X, world_size=RANKS, stage="auto", device="cpu", fit=least, headroom=0)
    tried = {one.trade_offs for one in found.alternatives}
    assert "recompute, 4 micro-batches" in tried
    assert "recompute, 2 micro-batches" not in tried
    step.config.zero.stage = "auto"
    again = zg.plan(step, X, world_size=RANKS, device="cpu", fit=least, headroom=0)
    assert [one.verdict for one in again.alternatives] == [one.verdict for one in found.alternatives]
    with pytest.warns(zg.ZeroGraphWarning, match="'mode'"):
        assert zg.plan(step, X, world_size=RANKS, device="cpu", mode="off").alternatives == ()


def test_a_directory_without_a_search_is_a_mistake() -> None:
    with pytest.raises(zg.ConfigError, match="stage='auto'"):
        plan(stage=1, nvme_path="/nowhere")
