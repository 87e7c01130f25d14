"""Two thousand steps with all that a run of weeks does in between: memory, files and threads stay what they were."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.survival_table import Tally
from tests.harness import Predict
from tests.models import TokenLoss, TrainStep, adamw, batches, make, part
from tests.pool import Pool


@dataclass(frozen=True)
class Usage:
    """Bytes in memory that are no file's, open files and threads of a process."""

    resident: int
    files: int
    threads: int


def usage() -> Usage:
    """Return what is in use, without the reserves of Python and glibc: collect garbage and return free heap first.

    Without that, the size goes up and down by some percent with the moment of the last collection. Pages of files do
    not count: libraries have megabytes of code, which a rare error is the first to read, and the system may drop it.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Usage(
        sum(1024 * int(status[kind].split()[0]) for kind in ("RssAnon", "RssShmem")),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def begun() -> tuple[TrainStep, Predict]:
    """Return a training step, and the loss from its parameters."""
    model = make("mlp")
    step = TrainStep(model, adamw(model), 2)
    return step, Predict(model, lambda model, x, y: TokenLoss()(model(x), y))


def soak(steps: int, moments: int, folder: str) -> list[Usage]:
    """Return the usage at that many moments; before the first, everything has happened once."""
    step, evaluate = begun()
    data, small = batches("mlp", 8), batches("mlp", 8, size=4)
    every = steps // (2 * moments)
    found = []
    for number in range(1, steps + 1):
        # Two shapes of the batch in turn: the second is a compile of its own.
        x, y = (small if number % 7 == 0 else data)[number % 8]
        step(part(x), part(y))
        if number % (every // 2) == 0:
            evaluate(part(x), part(y))
            step.save(folder, asynchronous=number % every == 0, keep=2)
        if number % (2 * every) == every:
            # A restart, with all but the process new.
            step.wait_for_save()
            del step, evaluate
            step, evaluate = begun()
            step.load(folder)
            assert step.steps_done == number
        if number % (2 * every) == 0:
            step.wait_for_save()
            found.append(usage())
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux shows in /proc")
@pytest.mark.long
@pytest.mark.parametrize(("steps", "moments"), [(80, 2), (2000, 10)])
def test_nothing_grows(pool: Pool, tmp_path: Path, tally: Callable[[str], Tally], steps: int, moments: int) -> None:
    row = tally(f"a soak of {steps} steps on two ranks")
    for first, *rest in pool.run(2, soak, steps, moments, str(tmp_path)):
        # A short run has not been everywhere when it is measured first: of memory it tells only what is gross.
        allowed = 0.01 if steps >= 2000 else 0.05
        growth = rest[-1].resident / first.resident - 1
        assert growth < allowed, f"memory grew by {growth:.1%}: {[one.resident for one in (first, *rest)]}"
        assert rest[-1].files <= first.files
        assert rest[-1].threads <= first.threads
    row.add(True)
