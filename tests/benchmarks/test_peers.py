"""The benchmark runs from end to end, and what it weighs is what it should be."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.contenders.tasks import TASKS
from benchmarks.measure import pair, worker
from benchmarks.measure.pair import measure
from tests.benchmarks import run_script


class Forked:
    """Process of the worker, as ``subprocess.Popen`` would start it, but forked off one that has imported everything.

    One test below starts real ones.
    """

    def __init__(self, command: list[Any], cwd: Path, env: dict[str, str], stdout: IO[str], stderr: IO[str]) -> None:
        assert command[:3] == [sys.executable, "-m", "benchmarks.measure.worker"]
        assert stdout is stderr
        context = mp.get_context("forkserver")
        self._process = context.Process(target=_work, args=(list(map(str, command[3:])), str(cwd), env, stdout.name))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def kill(self) -> None:
        self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _work(arguments: list[str], folder: str, environment: dict[str, str], log: str) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["worker", *arguments]
    worker.main()


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "subprocess", SimpleNamespace(Popen=Forked))


@pytest.mark.usefixtures("_forked")
def test_front_door_measures_and_reports(tmp_path: Path) -> None:
    asked = ["--sizes", "tiny", "--contenders", "alone-2", "--contenders", "zerograph-2"]
    asked += ["--rounds", "1", "--steps", "2", "--no-memory", "--out", str(tmp_path / "run")]
    assert not run_script.run("peers.py", *asked)
    found = json.loads((tmp_path / "run.json").read_text())["measurements"]
    assert [one["contender"] for one in found] == ["alone-2", "zerograph-2"]
    assert all(len(rank["seconds"]) == 2 for one in found for rank in one["ranks"])
    text = (tmp_path / "run.md").read_text()
    assert "zerograph 2, eager" in text
    assert "All losses agree" in text
    assert (tmp_path / "run-time.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_memory_and_traffic_of_ddp_are_what_it_is_known_to_take(tmp_path: Path) -> None:
    found = measure(CONTENDERS["ddp"], "tiny", "memory", steps=2, cache=tmp_path / "cache", patience=600.0)
    weight = sum(p.nbytes for p in TASKS["tiny"].model().parameters())
    for rank in found["ranks"]:
        # Parameters, the two moments of AdamW, and the reducer's buckets; and a step count for each parameter.
        assert rank["state"] == pytest.approx(4 * weight, rel=0.01)
        # An all-reduce of the gradients over two ranks sends each byte once; and there are headers.
        assert rank["sent"] == pytest.approx(weight, rel=0.02)


@pytest.mark.usefixtures("_forked")
def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    found = measure(CONTENDERS["ddp"], "no such task", "time", steps=1, cache=tmp_path / "cache", patience=600.0)
    assert re.match("rank [01] ended with status 2", found["failed"])
