"""A plan is read from the compiled step: it agrees with the ZeRO paper's closed form, and says what a step will do."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import zerograph as zg
from tests.harness import LossStep, mean_of_squares
from zerograph.planner.closed_form import model_states
from zerograph.planner.machine import Link, Machine, Rate, machine

ADAMW = functools.partial(torch.optim.AdamW, fused=True)
MIXED: dict[str, Any] = {"amp_dtype": torch.bfloat16}


def gpt(layers: int, width: int) -> nn.Module:
    """Return a GPT of OpenAI's shape whose weights take no memory."""
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, n_positions=128, use_cache=False)
    config.loss_type = "ForCausalLM"
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.zeros(samples, 128, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


class Squares(LossStep):
    """Four layers of 64 by 64 and a loss."""

    def __init__(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_of_squares)


X = torch.zeros(32, 64)


@pytest.fixture(scope="module")
def large() -> dict[int, zg.Plan]:
    """A GPT of 7.5 B parameters on 64 ranks, by stage: as a graph, captured once, and at stage 3 as a module."""
    model = gpt(1, 22848)
    step, batch = LossStep(model, ADAMW(model.parameters()), loss=loss_of_tokens), tuple(tokens(1).values())
    plans = {stage: zg.plan(step, batch, world_size=64, stage=stage, **MIXED) for stage in (0, 1, 2)}
    return {**plans, 3: zg.plan(model, tokens(1), ADAMW, world_size=64, stage=3, **MIXED)}


def loss_of_tokens(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def test_a_gpt_of_7_5_billion_parameters_takes_what_the_paper_says(large: dict[int, zg.Plan]) -> None:
    for stage, plan in large.items():
        assert plan.parameters == pytest.approx(7.5e9, rel=0.05)
        expected = model_states(plan.parameters, 64, stage).total
        if stage == 3:
            # Shards are cast when they are gathered: no copy in the compute dtype rests.
            expected -= 2 * plan.parameters / 64
        assert plan.model_states.total == pytest.approx(expected, rel=0.01)


def test_it_sends_what_the_paper_says(large: dict[int, zg.Plan]) -> None:
    for stage, plan in large.items():
        # Two Psi, three at stage 3 (section 7), of two bytes each.
        times = 3 if stage == 3 else 2
        assert plan.wire_bytes == pytest.approx(times * 2 * plan.parameters * 63 / 64, rel=0.05)
        gathers = sum(one.bytes for one in plan.wire if one.kind == "all-gather")
        assert (gathers > 0) == (stage > 0)


def test_what_fits_and_what_does_not(large: dict[int, zg.Plan]) -> None:
    assert not large[0].fits
    assert large[3].fits
    assert large[0].memory.peak > large[1].memory.peak > large[2].memory.peak > large[3].memory.peak


def test_compiling_for_more_ranks_yields_no_larger_graph() -> None:
    # Numbers that do not divide the parameters: both graphs cut off what fills up the last shard.
    few, many = (zg.plan(Squares, X, world_size=ranks, stage=3).prepared.graph.graph.nodes for ranks in (3, 16384))
    assert len(few) == len(many)


def test_the_weights_and_the_configuration_stay_as_they_are() -> None:
    step = Squares()
    before = [one.clone() for one in step.model.parameters()]
    options = step.config.key()
    zg.plan(step, X, world_size=8, stage="auto", fit=10**9)
    assert all(map(torch.equal, before, step.model.parameters()))
    assert step.config.key() == options


def test_a_plan_shows_the_stage_that_it_is_of() -> None:
    step = Squares()
    step.config.zero.stage = 3
    shown = {stage: str(zg.plan(step, X, world_size=4, stage=stage)).splitlines()[1] for stage in ("off", 1, None)}
    assert shown["off"] == "stage=0, backend=inductor"
    assert shown[1] == "stage=1, backend=inductor"
    assert shown[None] == "stage=3, backend=inductor"


def slow_network(rate: float) -> Machine:
    found = machine("a100")
    return Machine("test", found.device, (Link(None, Rate(((1.0, rate),)), 0.0),))


def test_a_step_takes_its_computation_and_what_it_waits_for() -> None:
    fast, slow = (zg.plan(Squares, X, world_size=4, stage=2, device=slow_network(rate)).time for rate in (1e15, 1e6))
    assert fast.exposed < 1e-9
    assert fast.seconds == pytest.approx(fast.compute, rel=1e-3)
    assert slow.compute == fast.compute
    assert slow.seconds == pytest.approx(slow.compute + slow.exposed)
    # All but what hides behind computation: which is nearly nothing beside a wire this slow.
    assert slow.exposed == pytest.approx(slow.communication, rel=0.01)
    # 1 MB/s: two times 3/4 of the bytes of the parameters.
    assert slow.communication == pytest.approx(2 * 0.75 * 4 * (64 * 65) * 4 / 1e6, rel=0.01)


def test_a_grid_keeps_the_larger_part_within_a_node() -> None:
    line = zg.plan(Squares, X, world_size=64, stage=3)
    grid = zg.plan(Squares, X, mesh=(8, 8), stage=3)
    across = sum(one.bytes for one in grid.wire if one.mesh_dim == 0)
    assert across < sum(one.bytes for one in line.wire) / 4
    assert grid.time.communication < line.time.communication


def test_a_grid_with_its_ranks_is_planned_over_the_links_between_them() -> None:
    # hpZ: a column is a host, so gathers in backward stay inside of it.
    links = (Link(2, Rate(((1.0, 1e9),)), 0.0), Link(None, Rate(((1.0, 1e6),)), 0.0))
    hosts = replace(machine("cpu"), links=links)
    by_host, turned = (
        zg.plan(Squares, X, mesh=mesh, stage=3, device=hosts, shard_dims=(0, 1)) for mesh in ([[0, 2], [1, 3]], (2, 2))
    )
    # Between hosts, at 1 MB/s: half of the parameters in forward, and of the gradients.
    assert by_host.time.communication == pytest.approx(2 * (4 * 64 * 65 * 4 / 2 / 2) / 1e6, rel=0.01)
    assert turned.time.communication > 1.4 * by_host.time.communication


class Tokens(zg.ZeroGraph):
    """Attention between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, 32), nn.Linear(32, 96)
        self.add_optimizer(torch.optim.SGD([*self.embed.parameters(), *self.qkv.parameters()], lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        hidden = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = hidden.transpose(1, 2).flatten(2) @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return loss


def tokens_plan(**options: Any) -> zg.Plan:
    return zg.plan(Tokens, torch.zeros(1, 64, dtype=torch.int64), world_size=4, stage=2, headroom=0, **options)


def test_ranks_that_split_sequences_are_rows_which_share_tokens() -> None:
    whole, split = tokens_plan(), tokens_plan(context_parallel=2)
    assert split.mesh == (2, 2)
    assert split.tokens_per_second is not None
    assert split.tokens_per_second * split.time.seconds == pytest.approx(64 / 2)
    activations = [plan.memory.peak - plan.memory.at_rest for plan in (split, whole)]
    assert activations[0] < 0.62 * activations[1]
    assert {one.mesh_dim for one in split.wire if one.kind == "all-to-all"} == {1}


def test_the_longest_sequences_are_those_of_which_longer_ones_do_not_fit() -> None:
    wanted = tokens_plan(context_parallel=2, length=200)
    found = tokens_plan(context_parallel=2, length="longest", fit=wanted.memory.peak)
    assert found.length == wanted.length == 200
    assert found.memory.peak == wanted.memory.peak
    longer = int(found.longer.split()[0])
    # The longest to 1/64 of the length, in multiples of the ranks.
    assert longer in (202, 204)
    assert not tokens_plan(context_parallel=2, length=longer, fit=wanted.memory.peak).fits


def test_lengths_that_cannot_be_planned_are_refused() -> None:
    for length in (0, "long"):
        with pytest.raises(zg.ConfigError, match="1 or more, or 'longest'"):
            tokens_plan(length=length)
    with pytest.raises(zg.ConfigError, match="no input is a sequence"):
        zg.plan(Squares, X, world_size=2, stage=2, length="longest")
    with pytest.raises(zg.InputError, match="63 positions in dimension 1"):
        tokens_plan(context_parallel=2, length=63)


def test_auto_finds_the_fastest_that_fits() -> None:
    def plan(**arguments: Any) -> zg.Plan:
        # A bucket for each layer, and next to no activations.
        return zg.plan(Squares, X[:1], world_size=8, bucket_size=4 * 64 * 65, headroom=0, **arguments)

    needs = {stage: plan(stage=stage).memory.peak for stage in ("off", 3)}
    assert needs[3] < needs["off"]
    enough = plan(stage="auto", fit=needs["off"])
    fitting = [one.plan.time.seconds for one in enough.alternatives if one.plan is not None and one.plan.fits]
    assert enough.fits
    assert enough.time.seconds == min(fitting)

    tight = plan(stage="auto", fit=needs[3])
    assert tight.fits
    lost = {one.stage: one.verdict for one in tight.alternatives if not one.trade_offs and one.mesh == (8,)}
    # Four layers, and as much again: it is not compiled.
    assert lost["off"] == "does not fit: 65.0 KiB stored, and 65.0 KiB of gradients"

    within = plan(stage="auto", memory_budget=needs[3])
    assert within.fits
    assert within.usable == needs[3]

    none = plan(stage="auto", fit=1000)
    assert not none.fits
    assert all("does not fit" in one.verdict for one in none.alternatives)


def test_what_is_planned_and_read_alike() -> None:
    plan = zg.plan(Squares, X, world_size=4, stage=1)
    text = str(plan)
    assert "4 ranks" in text
    assert "reduce-scatter" in text
    assert plan.as_dict()["peak"]["bytes"] == plan.memory.peak


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "world_size="),
        ({"world_size": 0}, "from 1 up"),
        ({"world_size": 2, "mesh": (1, 2)}, "world_size="),
        ({"mesh": [[0, 2], [1, 2]]}, "each rank from 0 up once"),
        ({"mesh": [[0, 1], [2]]}, "rows of equal length"),
        ({"world_size": 2, "stage": 4}, "choose 1, 2 or 3"),
        ({"world_size": 2, "device": "h900"}, "a100, cpu, h100, h200"),
        ({"world_size": 2, "optimizer": ADAMW}, "has its optimizer"),
        ({"world_size": 2, "machine": "h100"}, r"plan\(machine=\): the machine is device="),
        ({"world_size": 2, "shard_dim": 1}, "there is no option 'shard_dim'; did you mean 'shard_dims'"),
        ({"world_size": 2, "stage": 2, "mode": "off"}, r"plan\(stage=2, mode=\): give one of them"),
    ],
)
def test_mistakes(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(zg.ConfigError, match=words):
        zg.plan(Squares, X, **arguments)


def test_a_model_without_a_loss() -> None:
    with pytest.raises(zg.ConfigError, match="loss="):
        zg.plan(nn.Linear(3, 3), torch.zeros(2, 3), ADAMW, world_size=2)
