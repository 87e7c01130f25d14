"""The pool of worker processes that the suite runs in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import MORE_THREADS, Pool

KEPT: list[Any] = []


def leave_a_group() -> int:
    """Keep a process group in a cycle until the next call; return the number of threads."""
    KEPT.clear()
    cycle: list[Any] = [dist.new_group()]
    cycle.append(cycle)
    KEPT.append(cycle)
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them in /proc")
def test_process_groups_that_calls_leave_in_cycles_are_freed(pool: Pool) -> None:
    threads = [pool.run(1, leave_a_group)[0] for _ in range(12)]
    assert max(threads) - threads[0] < 2 * MORE_THREADS
