"""A rank that raises, ends, is killed, is stopped or comes with something else is an error on every other, by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

import zerograph as zg
from tests.faults.lost_ranks import Answer, Failing, note_time, noted_time, run
from tests.faults.survival_table import Tally
from tests.harness import sliced, told
from tests.models import adam_step, batches, part
from zerograph.eager import program
from zerograph.runtime.checkpoint import storage
from zerograph.runtime.job.process_group import agree

# Of a rank that is stopped nothing else tells: what a try of that takes. The others learn at once.
TIMEOUT = {"is stopped": 8.0}
GENEROUS = 60.0
# Beyond the limit: asking who is there, and what a busy machine adds.
LITTLE_MORE = 15.0


def raises() -> None:
    raise OSError("the disk is on fire")


def ends() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {
    "raises": raises,
    "ends": ends,
    "is killed": is_killed,
    "is stopped": is_stopped,
}

# Just before which operator of the emitted graph.
OPERATORS = {"forward": "aten.gelu.default", "backward": "aten.gelu_backward.default", "update": "aten.sqrt"}
PHASES = (*OPERATORS, "save", "compile")


@dataclass(frozen=True)
class Case:
    """A fault: its kind, rank and place."""

    fault: str
    phase: str
    ranks: int = 2
    lost: int = 1
    store: str = "file"

    def __str__(self) -> str:
        return f"{self.fault} in {self.phase}, rank {self.lost} of {self.ranks}, {self.store}"

    @property
    def timeout(self) -> float:
        return TIMEOUT.get(self.fault, GENEROUS)


# Each fault and each phase once; and three ranks of which that one is lost that keeps the store.
SHORT = [
    Case("is stopped", "backward"),
    Case("is killed", "save"),
    Case("raises", "update"),
    Case("other shape", "compile"),
    Case("ends", "forward", ranks=3, lost=0, store="tcp"),
]
WHOLE = [Case(fault, phase) for fault in (*FAULTS, "other shape") for phase in PHASES]
WHOLE += [Case(fault, "backward", 3, lost, store) for fault in FAULTS for lost in (0, 2) for store in ("file", "tcp")]


def train(case: Case, folder: str) -> tuple[str, str, float]:
    """(type of error, message, when it came) of what a rank fails with, any rank being lost."""
    mine = dist.get_rank() == case.lost

    def happen() -> None:
        note_time(folder)
        FAULTS[case.fault]()

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        if mine and case.phase == "compile" and case.fault in FAULTS:
            happen()
        if mine and case.phase in OPERATORS and case.fault in FAULTS:
            return Failing(graph, OPERATORS[case.phase], happen).run
        # The others run what a user would.
        return graph.forward

    step = adam_step("mlp", 2, timeout=case.timeout, backend=backend)
    (x, y), *_ = batches("mlp", 1, size=12)
    x, y = part(x), part(y)
    keep = 2
    if case.fault == "other shape":
        if case.phase != "compile":
            step(x, y)
        if mine:
            note_time(folder)
            x, y, keep = x[:2], y[:2], 3
    if mine and case.phase == "save" and case.fault in FAULTS:

        def failing(*_: object) -> None:
            happen()

        storage.save_file = failing

    def work() -> None:
        if case.phase == "compile":
            step.compile(x, y)
        elif case.phase == "save":
            step.save(Path(folder) / "checkpoint", keep=keep)
        else:
            step(x, y)
            # Behind the last exchange of a step the others notice in the next one.
            step(x, y)

    return *told(work), time.monotonic()


def attempt(case: Case, folder: Path) -> list[Answer]:
    folder.mkdir()
    return run(case.ranks, case.lost, train, case, str(folder), store=case.store)


@pytest.fixture(scope="module")
def attempts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``(folder, future answers)`` of every case: most of their time goes by in waiting, so they wait together."""
    root = tmp_path_factory.mktemp("lost")
    cases = [*SHORT, *(WHOLE if request.config.getoption("--long") else [])]
    with ThreadPoolExecutor(3) as threads:
        found: dict[str, tuple[Path, Future[list[Answer]]]] = {}
        for number, case in enumerate(cases):
            folder = root / str(number)
            found[str(case)] = folder, threads.submit(attempt, case, folder)
        yield found
        threads.shutdown(cancel_futures=True)


@sliced("case", *([pytest.param(case, id=str(case)) for case in cases] for cases in (SHORT, WHOLE)))
def test_a_lost_rank_is_an_error_by_name_on_every_other(
    case: Case, attempts: Any, tally: Callable[[str], Tally]
) -> None:
    folder, answers = attempts[str(case)]
    seconds = 0.0
    for rank, answer in enumerate(answers.result()):
        if rank == case.lost:
            continue
        assert answer.value, f"rank {rank} of {case}: {answer.raised}"
        kind, message, when = answer.value
        assert kind in expected_kinds(case), message
        for words in expected_words(case):
            assert any(word in message for word in words), f"none of {words} in: {message}"
        seconds = max(seconds, when - noted_time(str(folder)))
    allowed = (case.timeout if case.fault == "is stopped" else 0.0) + LITTLE_MORE
    verb = "comes with another shape" if case.fault == "other shape" else case.fault
    tally(f"a rank {verb}: {case.phase}").add(seconds < allowed, seconds=seconds)
    assert seconds < allowed


def agreed(case: Case) -> bool:
    """Return True if the rank reports its error before anything is exchanged."""
    return case.fault == "other shape" or (case.fault == "raises" and case.phase in ("compile", "save"))


def expected_kinds(case: Case) -> tuple[str, ...]:
    if not agreed(case):
        return ("CommunicationError",)
    if case.fault == "other shape":
        # Ranks that save in the meantime do something else altogether.
        return ("RankMismatchError",) if case.phase == "save" else ("InputError",)
    return ("CheckpointError",) if (case.fault, case.phase) == ("raises", "save") else ("RankMismatchError",)


def expected_words(case: Case) -> list[tuple[str, ...]]:
    """One of each of these is in the message."""
    cause = [("the disk is on fire",)] if case.fault == "raises" else []
    if agreed(case):
        return [(f"rank {case.lost}",), *cause]
    where = {
        "forward": ["reduce-scatter of gradient of bucket", "all-reduce of"],
        "backward": ["reduce-scatter of gradient of bucket"],
        "update": ["before step 2"],
        "save": ["saving a checkpoint"],
        "compile": ["before running step 1"],
    }[case.phase]
    return [(f"lost rank {case.lost} while",), tuple(where), *cause]


def multiply() -> str:
    """Multiply tensors of which the ranks have parts of the rows; the second rank is lost before the parts add up."""
    x = zg.global_tensor(torch.ones(2, 3), zg.sbp.split(0))
    torch.relu(x.T @ x)
    if dist.get_rank() == 1:
        program.agree = lambda *args: (agree(*args), ends())  # type: ignore[assignment]
    return told(lambda: torch.relu(x.T @ x))[1]


def test_a_rank_that_is_lost_in_an_operator_on_global_tensors_is_named() -> None:
    answer, _ = run(2, 1, multiply)
    assert "rank 0 of 2 lost rank 1 while in the all-reduce of" in answer.value, answer.raised
