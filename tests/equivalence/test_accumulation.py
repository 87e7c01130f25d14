"""Micro-batches one after another compute what the whole batch at once computes, at every stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture import test_local as routing
from tests.equivalence.test_stages import check
from tests.harness import LossStep, PlainRun, each_stage, set_stage, sliced
from tests.models import Batch, adam_step, adamw, batches, make, part, train_on, train_plainly
from tests.pool import Pool
from zerograph.ir.loop import loops
from zerograph.ir.step_graph import is_collective

STEPS = 3
Case = tuple[int, int]  # stage, micro-batches


def masked(name: str, dtype: torch.dtype) -> list[Batch]:
    """Batches in which each micro-batch has another number of targets that count."""
    found = batches(name, STEPS, 8, dtype)
    for _, y in found:
        y.view(8, -1)[1, ::2] = -100
        y.view(8, -1)[4] = -100
    return found


def train(name: str, cases: list[Case], dtype: torch.dtype) -> list[Any]:
    """Losses and the final state of the model for each case: run on every rank. One graph, so captured once."""
    step = adam_step(name, dtype=dtype)
    initial = step.state_dict()
    results = []
    for stage, micro_batches in cases:
        set_stage(step, stage)
        step.config.gradient_accumulation_steps = micro_batches
        step.load_state_dict(initial)
        results.append(train_on(step, masked(name, dtype)))
    return results


@sliced(
    "name, dtype, tolerance, cases",
    [
        ("mlp", torch.float32, 1e-6, [(0, 2), (1, 4), (2, 2), (3, 2)]),
        # That stages agree bitwise does not depend on the model: of this one the last.
        ("gpt_tied_of_one_block", torch.float64, 1e-12, [(3, 4)]),
    ],
    [("gpt_tied", torch.float64, 1e-12, [(0, 2), (1, 2), (2, 2), (3, 2), (3, 4)])],
)
def test_accumulation_changes_no_number(
    pool: Pool, name: str, dtype: torch.dtype, tolerance: float, cases: list[Case]
) -> None:
    results, others = pool.run(2, train, name, cases, dtype)
    model = make(name, dtype)
    losses = train_plainly(model, adamw(model), masked(name, dtype))
    found = dict(zip(cases, results, strict=True))
    for result, other in zip(results, others, strict=True):
        check(result, PlainRun(losses, model.state_dict()), tolerance)
        assert same(result, other)
    # Sums over micro-batches, then ranks, are other sums than over ranks, then micro-batches: bitwise equal are the
    # stages that add up in the same order.
    for one, other in (((0, 2), (1, 2)), ((2, 2), (3, 2))):
        assert not {one, other} <= found.keys() or same(found[one], found[other])


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one[0], other[0])) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


class Everything(nn.Module):
    """Parts that depend on other samples too: random numbers, batch norm, class weights, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("positive", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.dropout(F.gelu(self.first(x))))
        self.positive += (x > 0).sum()
        return self.last(hidden + 0.1 * torch.randn_like(hidden))


class Outputs(LossStep):
    """Return the loss, clipped gradients' norm, and outputs of other kinds, of a model that has class weights."""

    def build(self, x: Tensor, y: Tensor, scale: Any = 1) -> dict[str, Tensor]:
        logits = self.model(x)
        loss = F.cross_entropy(logits, y, weight=self.model.weights) * scale
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return {"loss": loss, "logits": logits, "norm": norm, "right": (logits.argmax(1) == y).sum(), "sq": loss * loss}


def step_with_everything(micro_batches: int, stage: int, outputs: str = "whole") -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Everything().double()
    step = Outputs(model, adamw(model), stage, seed=3, batch_norm="local", accumulation_outputs=outputs)
    step.config.gradient_accumulation_steps = micro_batches
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 6, generator=generator).double(), torch.randint(5, (16,), generator=generator)
    y[3:6] = -100
    for _ in range(STEPS):
        found = step(part(x), part(y), torch.tensor(2.0).double())
    return found, step.state_dict()["modules"]["model"]


@functools.cache
def two_micro_batches(pool: Pool) -> list[Any]:
    return pool.run(2, step_with_everything, 2, 2)


def test_a_micro_batch_is_to_time_what_a_ranks_part_is_to_ranks(pool: Pool) -> None:
    """Two ranks with two micro-batches each, and one with four: the same draws, statistics and clipping."""
    check_alike(two_micro_batches(pool), [step_with_everything(4, 0)])


@pytest.mark.long
def test_parts_of_four_ranks_are_micro_batches_of_one(pool: Pool) -> None:
    check_alike(pool.run(4, step_with_everything, 1, 1), [step_with_everything(4, 0)])


def check_alike(found: list[Any], wanted: list[Any]) -> None:
    """Compare results that are each rank's."""
    (outputs, state), (wanted_outputs, wanted_state) = found[0], wanted[0]
    for name in ("loss", "norm", "right", "sq"):
        torch.testing.assert_close(outputs[name], wanted_outputs[name], rtol=1e-12, atol=1e-12)
    logits, wanted_logits = (torch.cat([outputs["logits"] for outputs, _ in ranks]) for ranks in (found, wanted))
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, wanted_state, rtol=1e-12, atol=1e-12)


def test_packed_outputs_have_an_entry_for_each_micro_batch(pool: Pool) -> None:
    packed = pool.run(2, step_with_everything, 2, 2, "packed")
    for (found, _), (wanted, _) in zip(packed, two_micro_batches(pool), strict=True):
        assert found["loss"].shape == found["right"].shape == (2,)
        assert torch.equal(found["logits"].flatten(0, 1), wanted["logits"])
        torch.testing.assert_close(found["loss"].mean(), wanted["loss"], rtol=1e-12, atol=0)
        assert found["right"].sum() == 2 * wanted["right"]
        # What exists once.
        assert torch.equal(found["norm"], wanted["norm"])
        assert torch.equal(found["sq"], wanted["sq"])


def routed(micro_batches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = routing.Model(routing.as_region).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = LossStep(model, optimizer, gradient_accumulation_steps=micro_batches)
    losses = [step(part(x.double())) for x in routing.data()]
    return losses, step.state_dict()["modules"]["model"]


def test_a_local_region_sees_one_micro_batch(pool: Pool) -> None:
    wanted, found = pool.run(2, routed, 1)[0], routed(2)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-12, atol=1e-12)


def in_bf16() -> list[tuple[list[Tensor], set[torch.dtype], set[torch.dtype]]]:
    """At stages 1 and 2: losses, dtypes that gradients are summed in over micro-batches, and that they travel in."""
    step = adam_step("mlp")
    step.config.enable_amp(True, dtype=torch.bfloat16)
    step.config.gradient_accumulation_steps = 4
    found = []
    for _ in each_stage(step, (1, 2)):
        losses = [step(part(x), part(y)) for x, y in masked("mlp", torch.float32)]
        graph = step.inspect.graph.graph
        (loop,) = loops(graph)
        sums = {one.dtype for one in loop.results if one.gradient is not None}
        moved = [node for one in (graph, loop.body.graph) for node in one.nodes if is_collective(node)]
        wire = {one.meta["val"].dtype for one in moved if one.meta["boxing"].tensor.gradient_of("bucket0")}
        found.append((losses, sums, wire))
    return found


def test_gradients_of_a_low_precision_are_summed_in_fp32(pool: Pool) -> None:
    model = make("mlp")
    wanted = train_plainly(model, adamw(model), masked("mlp", torch.float32))
    for losses, sums, wire in pool.run(2, in_bf16)[0]:
        torch.testing.assert_close(losses, wanted, rtol=0.01, atol=0)
        assert sums == {torch.float32}
        assert wire == {torch.bfloat16}
