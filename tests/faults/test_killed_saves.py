"""A rank of a job is killed in the middle of a save: a whole checkpoint is there, and training goes on from it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zerograph as zg
from tests.faults.forked_pairs import Tell, Told, WarmPair
from tests.faults.survival_table import Tally
from tests.harness import sliced
from tests.models import TrainStep, adam_step, batches, part

SAVES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"asynchronous": True},
    "keeping two": {"keep": 2},
    "asynchronous, keeping two": {"asynchronous": True, "keep": 2},
}
DATA = batches("mlp", 40)
# Saves of each job: the last is that in which a rank is killed.
ATTEMPTS = 3


def new_step() -> TrainStep:
    return adam_step("mlp", 2, backend="eager")


def trained(step: TrainStep, upto: int) -> list[float]:
    return [float(step(part(x), part(y))) for x, y in DATA[step.steps_done : upto]]


def parameters_of(step: TrainStep) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in step.state_dict()["modules"]["model"].items()}


def undisturbed(tell: Tell, steps: int) -> None:
    step = new_step()
    tell(("losses", trained(step, steps)))
    tell(("parameters", parameters_of(step)))


class Suicide:
    """Counts what a rank does with files, and kills it when that is about to happen for the ``last`` time."""

    def __init__(self) -> None:
        self.counting, self.count, self.last = False, 0, -1
        sys.addaudithook(self._see)

    def _see(self, event: str, _: Any) -> None:
        if self.counting and (event == "open" or event.startswith(("os.", "shutil."))):
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(tell: Tell, path: Path, way: str, victim: int, by: str, when: float) -> None:
    """Go on from what is there, save after each step, and kill one rank in the last save.

    Args:
        by: of what ``when`` is the fraction: of the "files" that a save opens, moves and deletes, or of its "time".
    """
    step, suicide = new_step(), Suicide()
    if path.exists():
        step.load(path)
        tell(("loaded", step.steps_done))
    dies, length = zg.rank() == victim, 0.0
    for attempt in range(ATTEMPTS):
        tell(("loss", step.steps_done, *trained(step, step.steps_done + 1)))
        if attempt == ATTEMPTS - 1 and dies:
            if by == "files":
                suicide.last = 1 + int(when * suicide.count)
            else:
                tell(("kill me in", when * length))
        suicide.counting, suicide.count, start = True, 0, time.monotonic()
        step.save(path, **SAVES[way])
        step.wait_for_save()
        length, suicide.counting = time.monotonic() - start, False
        tell(("saved", step.steps_done))
    if dies:
        # It was a little faster than the one before.
        os.kill(os.getpid(), signal.SIGKILL)
    trained(step, step.steps_done + 1)


def gone_on(tell: Tell, path: Path, steps: int) -> None:
    step = new_step()
    step.load(path)
    tell(("loaded", step.steps_done))
    trained(step, steps)
    tell(("parameters", parameters_of(step)))


@pytest.fixture(scope="module")
def pair() -> Iterator[WarmPair]:
    made = WarmPair()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(pair: WarmPair, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the output of a job without a fault."""
    return pair.run(tmp_path_factory.mktemp("undisturbed") / "store", undisturbed, len(DATA))[0]


def kill(pair: WarmPair, expected: Told, folder: Path, way: str, tries: int, count: Tally) -> None:
    """Jobs in a row, each of which goes on from what the one before has left, and loses a rank while it saves."""
    ((_, losses),) = expected.words("losses")
    moments, path = random.Random(way), folder / "checkpoints"
    made = whole = 0
    seconds = 0.0
    for number in range(tries + 1):
        if number < tries:
            victim, by, when = moments.randrange(2), ("files", "time")[number % 2], moments.random()
            told = pair.run(folder / f"store {number}", killed_while_saving, path, way, victim, by, when)
        else:
            told = pair.run(folder / f"store {number}", gone_on, path, len(DATA))
        if number:
            began = {at for one in told for _, at in one.words("loaded")}
            right = all(loss == losses[at] for one in told for _, at, loss in one.words("loss"))
            survived = right and began in ({whole}, {made})
            count.add(survived, lost_steps=made - min(began, default=0), seconds=seconds)
            assert survived, (began, whole, made, told)
        if number < tries:
            died, left = told[victim], told[1 - victim]
            assert died.code == -signal.SIGKILL, told
            # Wherever the other one was, it says so in words of ours.
            assert left.words("told"), told
            seconds = left.ended - died.ended
            whole = max(at for one in told for _, at in one.words("saved"))
            made = max(at for _, at, _ in died.words("loss")) + 1
    assert told[0].words("parameters") == expected.words("parameters")


@sliced("way", ["asynchronous"], ["keeping two"])
def test_a_rank_killed_while_saving_leaves_a_whole_checkpoint(
    pair: WarmPair, expected: Told, folder: Path, tally: Callable[[str], Tally], way: str
) -> None:
    kill(pair, expected, folder, way, 2, tally(f"killed while saving, {way}"))


@pytest.mark.long
@pytest.mark.parametrize("way", SAVES)
def test_killed_at_many_moments(
    pair: WarmPair, expected: Told, folder: Path, tally: Callable[[str], Tally], way: str
) -> None:
    kill(pair, expected, folder, way, 12, tally(f"killed while saving, {way}"))
