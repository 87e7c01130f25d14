"""Memory of steps whose sizes differ between calls: sizes that it is predicted for, and the budget for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.harness import compilations_of, sliced
from tests.models import TrainStep, adam_step
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool
from zerograph.ir.mesh import line

MAX_ROWS, MAX_LENGTH = 6, 16


def part(rows: int, length: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(rows + length))
    return x, x.roll(-1, 1)


def marked(rows: int, length: int) -> tuple[Tensor, Tensor]:
    batch = part(rows, length)
    for tensor in batch:
        zg.mark_dynamic(tensor, 0, max=MAX_ROWS)
        zg.mark_dynamic(tensor, 1, max=MAX_LENGTH)
    return batch


def step_of(budget: int | None = None, **options: Any) -> TrainStep:
    return adam_step("gpt", 2, memory_budget=budget, **options)


def peak_at_maximum() -> int:
    return step_of().prepare(line(2, 0, "ranks"), *marked(2, 3)).memory.peak


def within_maximum(budgets: Sequence[int | None]) -> list[tuple[zg.Memory, list[int], int]]:
    """Return the memory after a small batch, the live bytes of each further step, and the number of compilations.

    A mark counts for later batches too. There is one graph for all budgets, so captured once.
    """
    step, results = step_of(activation_checkpointing="auto"), []
    for budget in budgets:
        before, step.config.memory.memory_budget = compilations_of(step), budget
        step(*marked(1 + zg.rank(), 3))
        step(*part(2, 5))
        memory = step.inspect.memory
        rows = [(MAX_ROWS, MAX_ROWS), (MAX_ROWS, 0), (0, MAX_ROWS), (1, 2)]
        alive = [most_alive_bytes(step, *part(each[zg.rank()], MAX_LENGTH)) for each in rows]
        results.append((memory, alive, compilations_of(step) - before))
    return results


def test_memory_and_its_budget_hold_for_declared_maxima(pool: Pool) -> None:
    budgets = None, peak_at_maximum() * 9 // 10
    for rank, results in enumerate(pool.run(2, within_maximum, budgets)):
        for budget, (memory, alive, compilations) in zip(budgets, results, strict=True):
            assert memory.sizes == {"s0": 2 * MAX_ROWS, "s0_rows": MAX_ROWS, "s1": MAX_LENGTH}
            assert "s1 <= 16 (declared)" in str(memory)
            assert memory.peak == pytest.approx(max(alive), rel=0.1)
            # The rank that has the most rows alone needs no more than if all have so many.
            assert alive[1 + rank] <= 1.01 * alive[0]
            assert budget is None or memory.peak <= budget
            assert compilations == 1


@pytest.mark.long
def test_memory_without_maxima_is_for_the_largest_sizes_seen() -> None:
    step = step_of()
    step(*part(4, 9))
    assert step.inspect.memory.sizes == {}
    step(*part(3, 12))
    assert step.inspect.memory.sizes == {"s0": 4, "s1": 12}
    assert "bytes are for s0 <= 4 (seen), s1 <= 12 (seen)" in str(step)
    assert step.inspect.memory.peak == pytest.approx(most_alive_bytes(step, *part(4, 12)), rel=0.1)


def larger_sizes(budget: int) -> tuple[list[str], list[int], list[int], str]:
    """Return warnings, live bytes and number of compilations after each batch, and the error of one that is refused."""
    step = step_of(budget, activation_checkpointing="auto")
    alive, compilations = [], []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for batch in [(2, 4), (3, 5), (4, 6), (4, 14), (2, 5), (14, 4), (3, 13)]:
            step(*part(*batch))
            alive.append(most_alive_bytes(step, *part(*batch)))
            compilations.append(compilations_of(step))
    before = {name: value.clone() for name, value in step.state_dict()["modules"]["model"].items()}
    with pytest.raises(zg.MemoryBudgetError) as refused:
        step(*part(64, 16))
    torch.testing.assert_close(step.state_dict()["modules"]["model"], before, rtol=0, atol=0)
    assert step(*part(4, 14)).isfinite()
    assert compilations_of(step) == compilations[-1]
    return [str(one.message) for one in caught], alive, compilations, str(refused.value)


@sliced("ranks, budget", [(1, 670_000)], [(2, 590_000)])
def test_a_larger_batch_keeps_the_budget_by_a_further_compilation_or_is_refused(
    pool: Pool, ranks: int, budget: int
) -> None:
    for shown, alive, compilations, refused in pool.run(ranks, larger_sizes, budget):
        assert max(alive) <= 1.01 * budget
        # (4, 6) fits, (4, 14) does not without recomputation. (14, 4) fits then, although (14, 14) would not.
        assert compilations == [1, 2, 2, 3, 3, 3, 3]
        (warning,) = (text for text in shown if "config.memory.memory_budget" in text)
        assert "is compiled again: with inputs of these sizes" in warning
        assert "bytes are missing" in refused
        assert f"for s0 <= {64 * ranks} (seen)" in refused
