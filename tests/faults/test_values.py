"""Values that no run should have: a loss that is not finite, and ranks whose copies of one tensor differ."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zerograph as zg
from tests.faults.survival_table import Tally
from tests.harness import LossStep, mean_of_squares
from tests.pool import Pool

TRIES = 4


class Step(LossStep):
    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss=mean_of_squares)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 6, generator=generator).chunk(2)[zg.rank()] for _ in range(2 * TRIES)]


def not_finite(stage: int) -> list[tuple[bool, float]]:
    """Every other batch is spoiled on one of the ranks; what is trained must be what the others alone would train."""
    step, other = Step(), Step()
    for one in (step, other):
        one.set_zero_mode("distributed_split" if stage else "off", stage=stage or 1)
    step.config.on_nonfinite = "raise"
    found = []
    for number, x in enumerate(batches()):
        if number % 2:
            step(x)
            other(x)
            continue
        if number // 2 % 2 == zg.rank():
            x[number % 4, 3] = float("inf" if number % 4 else "nan")
        step.compile(x)
        began = time.perf_counter()
        try:
            step(x)
        except zg.NonFiniteError as error:
            named = f"args[0][{number % 4}, 3]" in str(error) and f"rank {number // 2 % 2}" in str(error)
            found.append((named, time.perf_counter() - began))
    states = [one.state_dict()["modules"]["model"] for one in (step, other)]
    equal = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    return [(named and equal and step.steps_done == TRIES, seconds) for named, seconds in found]


def test_a_loss_that_is_not_finite_is_noticed_and_leaves_no_trace(pool: Pool, tally: Callable[[str], Tally]) -> None:
    row = tally("a loss is not finite")
    for rank in pool.run(2, not_finite, 3):
        for survived, seconds in rank:
            row.add(survived, lost_steps=0, seconds=seconds)
    assert row.tried == row.survived == 2 * TRIES


def flipped() -> list[tuple[bool, float]]:
    """One bit of one weight flips on one of the ranks."""
    step = Step()
    step.config.check_replicas = 1
    weight = step.model[3].weight
    found = []
    for number, x in enumerate(batches()[:TRIES]):
        step(x)
        with torch.no_grad():
            bits = weight.view(torch.int32).flatten()[number : number + 1]
            if number % 2 == zg.rank():
                bits ^= 1 << (7 * number)
            began = time.perf_counter()
            try:
                step(x)
                found.append((False, 0.0))
            except zg.ReplicaError as error:
                found.append((f"model.3.weight[0, {number}]" in str(error), time.perf_counter() - began))
            if number % 2 == zg.rank():
                bits ^= 1 << (7 * number)
    return found


def test_a_replica_that_differs_is_noticed_before_the_next_step(pool: Pool, tally: Callable[[str], Tally]) -> None:
    row = tally("a replica differs")
    for rank in pool.run(2, flipped):
        for survived, seconds in rank:
            row.add(survived, lost_steps=0, seconds=seconds)
    assert row.tried == row.survived == 2 * TRIES
