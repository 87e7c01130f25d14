"""The pool of worker processes that the suite runs in."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import pool as of_pool
from tests.pool import MORE_THREADS, Pool, RanksError

KEPT: list[Any] = []


def leave_a_group() -> int:
    """Keep a process group in a cycle until the next call; return the number of threads."""
    KEPT.clear()
    cycle: list[Any] = [dist.new_group()]
    cycle.append(cycle)
    KEPT.append(cycle)
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them in /proc")
def test_process_groups_that_calls_leave_in_cycles_are_freed(workers: Pool) -> None:
    # Each call leaves three threads. What other tests have left counts too, before it is looked through.
    threads = [workers.run(1, leave_a_group)[0] for _ in range(MORE_THREADS)]
    assert any(after < before for before, after in itertools.pairwise(threads))


def compute(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def test_ranks_that_compute_may_take_long_and_ranks_that_wait_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_pool, "MOST_WAITS", 1_000)
    workers = Pool(1, patience=1.0)
    try:
        workers.run(1, compute, workers._seconds() + 2.0)
        with pytest.raises(RanksError, match=r"rank 0 did not answer within .* s in sleep"):
            workers.run(1, time.sleep, 600.0)
    finally:
        workers.close()
