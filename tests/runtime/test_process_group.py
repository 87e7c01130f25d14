"""Jobs come and go in one process; what they held goes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerograph as zg
from tests.models import TrainStep, adamw, batches, make, part
from tests.pool import Pool

THREADS = Path("/proc/self/task")


def train_and_count_threads() -> int:
    model = make("mlp")
    step = TrainStep(model, adamw(model), 2)
    ((x, y),) = batches("mlp", 1)
    step(part(x), part(y))
    return len(list(THREADS.iterdir()))


@pytest.mark.skipif(not THREADS.exists(), reason="counts the threads that Linux shows in /proc")
def test_a_job_that_is_over_leaves_no_threads(pool: Pool) -> None:
    """Each process group of gloo has threads that wake a hundred times a second: hundreds of groups stop a machine."""
    counts = [pool.run(2, train_and_count_threads)[0] for _ in range(4)]
    assert counts[-1] <= counts[1]


def count_threads_of_placements() -> tuple[int, int]:
    """Threads after the first placement, and after many that are the same."""
    counts = []
    for _ in range(5):
        placement = zg.placement("cpu", ranks=[[0, 1]])
        model = make("mlp")
        step = TrainStep(model, adamw(model), 2, placement=placement, backend="eager")
        ((x, y),) = batches("mlp", 1)
        step(part(x), part(y))
        counts.append(len(list(THREADS.iterdir())))
    return counts[0], counts[-1]


@pytest.mark.skipif(not THREADS.exists(), reason="counts the threads that Linux shows in /proc")
def test_a_placement_asked_for_again_costs_nothing(pool: Pool) -> None:
    # In a second world as in the first, whose placements are over.
    for first, last in (pool.run(2, count_threads_of_placements)[0] for _ in range(2)):
        assert first == last
