"""Contenders in processes of their own: many compile at a time, then each measures alone, within a limit of time.

In rounds. Of the contenders that wait, most telling first, as many are admitted to the device as its memory holds.
When all of them are ready, or their time is over, they measure in turn. Those that are not ready by then are ended:
they would disturb the others. All processes import at the beginning, while the first round compiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.simulated.worker import Turns

ROOT = Path(__file__).resolve().parents[2]
# Seconds on a GPU with 16 cores: imports, the longest compilation of a round, the longest measurement, the shortest.
LOADING, COMPILING, MEASURING, SHORTEST = 60.0, 100.0, 45.0, 6.0
# Of the device's memory, contexts of CUDA take this much for each process.
CONTEXT = 0.7e9


@dataclass
class Run:
    """A contender's process.

    Attributes:
        name: size/contender/ranks.
        reserved: bytes that it takes from the device.
    """

    name: str
    reserved: float
    process: subprocess.Popen[bytes] | None = None
    again: bool = False


@dataclass
class Schedule:
    """Measure contenders within a limit of time.

    Args:
        memory: bytes of the device; infinite on a CPU.
        end: when all must be over, as ``time.monotonic()`` counts.
        out: a folder for ``results.jsonl``, ``log.txt`` and traces.
        traced: names whose traces are kept.
        say: called with each measurement that was added.
    """

    device: str
    steps: int
    memory: float
    end: float
    out: Path
    traced: Sequence[str] = ()
    say: Callable[[Mapping[str, Any]], object] = print
    _folder: Path = field(init=False)
    _shown: int = field(init=False, default=0)

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def left(self) -> float:
        return self.end - time.monotonic()

    def _limit(self, seconds: float) -> float:
        """Return how long to wait for what takes so long on a GPU: no longer than there is time."""
        return max(0.0, min(seconds * (1 if self.device == "cuda" else 10), self.left()))

    def measure(self, runs: Sequence[Run], beside: Beside | None = None) -> None:
        """Measure these, in their order; ``beside`` runs while the first round compiles, and takes its memory."""
        waiting, self._shown = list(runs), len(rows_of(self.results))
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            try:
                self._rounds(waiting, beside)
            finally:
                for run in runs:
                    self._stop(run)
                self._log(runs)

    def _rounds(self, waiting: list[Run], beside: Beside | None) -> None:
        while waiting and self.left() > SHORTEST:
            taken = beside.reserved if beside is not None else 0.0
            admitted = self._fitting(waiting, self.memory - taken)
            for run in admitted:
                self._start(run)
                waiting.remove(run)
            self._until("loaded", admitted, self._limit(LOADING))
            for run in admitted:
                self._turns(run).say("admitted")
            for run in waiting:
                self._start(run)
            limit = max(SHORTEST, min(self._limit(COMPILING), self.left() - SHORTEST * len(admitted)))
            began = time.monotonic()
            self._until("ready", admitted, limit)
            if beside is not None:
                beside.wait()
                beside = None
                self._until("ready", admitted, began + limit - time.monotonic())
            for run in admitted:
                self._end_late(run, "ready", f"not ready after {limit:.0f} seconds")
            for run in admitted:
                if self._turns(run).has("ready"):
                    self._turns(run).say("go")
                    self._until("done", [run], self._limit(MEASURING))
                    self._end_late(run, "done", "no end of its measurement")
                    self._show()
            self._show()
            waiting[:0] = [self._alone(run) for run in admitted if self._was_too_large(run)]
        for run in waiting:
            self._add(run, "no time was left")
        self._show()

    def _until(self, turn: str, runs: Sequence[Run], limit: float) -> None:
        """Wait until each run has come so far or has ended, for no longer than the limit."""
        end = time.monotonic() + limit
        while time.monotonic() < end and not all(self._turns(run).has(turn) or _ended(run) for run in runs):
            time.sleep(0.05)

    def _end_late(self, run: Run, turn: str, reason: str) -> None:
        """End a run that has not come so far, and add a row that says why."""
        turns = self._turns(run)
        if turns.has("done") or turns.has(turn):
            return
        status = run.process.returncode if run.process is not None and _ended(run) else None
        self._stop(run)
        self._add(run, reason if status is None else f"ended with status {status}")

    def _fitting(self, waiting: Sequence[Run], room: float) -> list[Run]:
        admitted: list[Run] = []
        for run in waiting:
            if run.reserved + CONTEXT <= room or not admitted:
                admitted.append(run)
                room -= run.reserved + CONTEXT
            if run.again:
                break
        return admitted

    def _was_too_large(self, run: Run) -> bool:
        """True where the device's memory did not suffice beside others."""
        rows = [row for row in rows_of(self.results) if name_of(row) == run.name]
        return not run.again and bool(rows) and "OutOfMemory" in rows[-1].get("failed", "")

    def _alone(self, run: Run) -> Run:
        """Have a contender measure once more, with the device for itself."""
        for turn in ("loaded", "admitted", "ready", "go", "done"):
            (self._folder / f"{turn}-{run.name.replace('/', '-')}").unlink(missing_ok=True)
        run.process, run.reserved, run.again = None, self.memory, True
        return run

    def _start(self, run: Run) -> None:
        if run.process is not None:
            return
        command = [sys.executable, "-m", "benchmarks.simulated.worker", run.name]
        command += ["--folder", str(self._folder), "--out", str(self.results)]
        command += ["--device", self.device, "--steps", str(self.steps)]
        if run.name in self.traced:
            command += ["--trace", str(self.out / f"trace-{run.name.replace('/', '-')}.json.gz")]
        run.process = start(command, self._folder / f"log-{run.name.replace('/', '-')}")

    def _stop(self, run: Run) -> None:
        if run.process is not None:
            stop(run.process)

    def _turns(self, run: Run) -> Turns:
        return Turns(self._folder, run.name)

    def _add(self, run: Run, reason: str) -> None:
        size, contender, ranks = run.name.split("/") if "/" in run.name else (run.name, "", "1")
        row = {"kind": "step", "size": size, "contender": contender, "ranks": int(ranks), "failed": reason}
        add(self.results, row)

    def _show(self) -> None:
        """Say what has been added."""
        rows = rows_of(self.results)
        for row in rows[self._shown :]:
            if row["kind"] in ("step", "ceilings"):
                self.say(row)
        self._shown = len(rows)

    def _log(self, runs: Sequence[Run]) -> None:
        with (self.out / "log.txt").open("a") as log:
            for file in sorted(self._folder.glob("log-*")):
                log.write(f"===== {file.name}\n{file.read_text(errors='replace')[-20000:]}\n")


@dataclass
class Beside:
    """A process that runs while the first round compiles.

    Attributes:
        reserved: bytes of the device's memory that it takes.
        end: when it is ended, as ``time.monotonic()`` counts.
    """

    process: subprocess.Popen[bytes]
    reserved: float
    end: float

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, self.end - time.monotonic()))
        stop(self.process)


def _ended(run: Run) -> bool:
    return run.process is not None and run.process.poll() is not None


def start(command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process whose caches are those of the others; it leads a group, so that it ends with its children."""
    cache = Path(tempfile.gettempdir()) / f"benchmarks-gpu-{os.getpid()}"
    environment = {
        "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "ZEROGRAPH_CACHE_STEPS": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def add(file: Path, row: Mapping[str, Any]) -> None:
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's run: size/contender/ranks, or an empty text."""
    return f"{row['size']}/{row['contender']}/{row['ranks']}" if row["kind"] == "step" else ""
