"""A step that is not in the cache is traced by rank 0 alone, for all ranks."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

import zerograph as zg
from tests.compiler.test_step_cache import TwoRanks, X, cache_in
from tests.models import part
from tests.pool import Pool
from zerograph.capture.trace import Capture
from zerograph.compiler import step_cache
from zerograph.runtime.job import exchange
from zerograph.runtime.job.process_group import Job


class Reading(TwoRanks):
    """A step that reads a clock: it cannot be written to a file."""

    def build(self, x: Tensor) -> Tensor:
        return super().build(x) + 0 * time.time()


def traces_of(folder: str, kind: type[TwoRanks]) -> tuple[int, bool]:
    """Compile a step; return the number of traces, and whether this rank has waited for rank 0."""
    answers, wait = [], step_cache.broadcast_when_ready

    def noted(job: Job, number: int, doing: str) -> tuple[int, BaseException | None]:
        answers.append(doing)
        return wait(job, number, doing)

    with cache_in(folder) as cache, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_cache, "broadcast_when_ready", noted)
        kind().compile(X)
        return cache.traces, bool(answers)


def test_each_rank_traces_a_step_that_cannot_be_sent_and_waits_for_rank_0_once(pool: Pool, tmp_path: Path) -> None:
    first, second = (pool.run(2, traces_of, str(tmp_path), Reading) for _ in range(2))
    assert [traces for traces, _ in first] == [traces for traces, _ in second] == [1, 1]
    assert first[1][1]
    assert not any(waited for _, waited in second)


class Marking(nn.Linear):
    """Marks itself in its first forward, as models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_is_marked", False):
            object.__setattr__(self, "_is_marked", True)
        return super().forward(x)


class MarkedStep(TwoRanks):
    def __init__(self) -> None:
        super().__init__()
        self.marking = Marking(4, 4)

    def build(self, x: Tensor) -> Tensor:
        return super().build(self.marking(x).detach())


def steps_of(folder: str) -> int:
    with cache_in(folder) as cache:
        step = MarkedStep()
        for _ in range(2):
            step(X)
        return cache.traces


def test_each_rank_traces_a_step_whose_trace_changes_modules(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run(2, steps_of, str(tmp_path))) > 0


class Failing(TwoRanks):
    def build(self, x: Tensor) -> Tensor:
        if self.model(x).sum() > 0:
            return x.sum()
        return x.mean()


def error_of(folder: str) -> str:
    with cache_in(folder), pytest.raises(zg.CaptureError) as caught:
        Failing()(X)
    return str(caught.value)


def test_an_error_of_build_is_raised_on_every_rank_as_it_is_on_rank_0(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, error_of, str(tmp_path))
    assert first == second
    assert "if self.model(x).sum() > 0" in first


def slowly(folder: str, interrupted: bool) -> tuple[str, float]:
    """Run a step that rank 0 takes longer to trace than ``config.checks.timeout``; return the error and a loss."""
    run = Capture.run

    def slow(capture: Capture) -> object:
        if zg.rank() == 0:
            time.sleep(1.0 if interrupted else 2.5)
        return run(capture)

    error = ""
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "run", slow)
        step = TwoRanks()
        step.config.checks.timeout = 60.0 if interrupted else 1.2
        # Ignored signals, as of a job in a shell's background, would stay ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted and zg.rank():
            signals = iter([signal.SIGINT])

            def interrupted_sleep(seconds: float) -> None:
                time.sleep(seconds)
                for number in signals:
                    signal.raise_signal(number)

            # Ranks sleep elsewhere too, while they compare notes.
            patch.setattr(exchange, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted_sleep))
        try:
            step.compile(X)
        except (KeyboardInterrupt, zg.RankMismatchError) as caught:
            error = type(caught).__name__
        finally:
            signal.signal(signal.SIGINT, before)
        return error, step(X).item()


def test_ranks_wait_for_rank_0_longer_than_the_timeout(pool: Pool, tmp_path: Path) -> None:
    errors = [error for error, _ in pool.run(2, slowly, str(tmp_path), False)]
    assert errors == ["", ""]


def test_an_interrupt_of_a_rank_that_waits_ends_the_compilation_and_no_more(pool: Pool, tmp_path: Path) -> None:
    (first, loss), (second, other_loss) = pool.run(2, slowly, str(tmp_path), True)
    assert (first, second) == ("RankMismatchError", "KeyboardInterrupt")
    assert loss == other_loss


def test_a_folder_that_the_system_refuses_is_an_empty_one(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run(2, steps_of, str(tmp_path / ("long" * 100)))) > 0


# Two keys that a set yields in the order in which they came.
KEYS = next(
    (first, second)
    for first, second in itertools.combinations([(number,) for number in range(1, 50)], 2)
    if [*{first, second}] != [*{second, first}]
)


class Unordered(TwoRanks):
    """Its trace has operators in another order on rank 1: texts in a set have one of their own in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = set(KEYS if zg.rank() == 0 else reversed(KEYS))

    def build(self, x: Tensor) -> Tensor:
        parts = {key: (x * key[0]).cos() for key in self.keys}
        return super().build(parts[KEYS[0]] + 2 * parts[KEYS[1]])


def unordered() -> tuple[list[float], list[tuple[int]], int]:
    run, traces = Capture.run, []

    def counted(capture: Capture) -> object:
        traces.append(1)
        return run(capture)

    step = Unordered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "run", counted)
        return [step(part(X)).item() for _ in range(3)], [*step.keys], len(traces)


def test_ranks_whose_code_runs_in_another_order_take_the_step_of_rank_0(pool: Pool) -> None:
    (alone, *_) = pool.run(1, unordered)[0]
    (first, order, traces), (second, other_order, other_traces) = pool.run(2, unordered)
    assert order != other_order
    assert (traces, other_traces) == (2, 1)
    assert first == second == pytest.approx(alone)
