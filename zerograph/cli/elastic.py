"""The launcher of an elastic job: it starts processes, notices which are lost, and forms generations of the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

# Seconds between two looks, until a process that has just been started must have shown a sign of life, and in which a
# process that is told to end may do so.
_LOOK, _STARTED, _TERMINATED = 0.02, 600.0, 30.0


@dataclass(eq=False)
class _Process:
    """A worker: a process that may be a rank.

    Attributes:
        pipe: it writes its signs of life there.
        alive_at: when it wrote the last one, by ``time.monotonic()``.
        patience: seconds until a silent one counts as lost.
    """

    process: subprocess.Popen[bytes]
    pipe: int
    alive_at: float
    patience: float


@dataclass(eq=False)
class Supervisor:
    """Run a command on ``least`` to ``most`` ranks of this host; see :mod:`zerograph.runtime.job.elastic`.

    Attributes:
        restarts: number of processes to start in place of lost ones.
        patience: seconds without a sign of life until a process counts as lost.
    """

    command: Sequence[str]
    least: int
    most: int
    restarts: int
    patience: float
    _processes: dict[int, _Process] = field(default_factory=dict)
    _started: int = 0
    # The last generation: its number, workers, and number of ranks.
    _generation: tuple[int, tuple[int, ...], int] = (0, (), 0)
    _failed: bool = False

    def run(self) -> int:
        """Run until all processes have ended; return 0 if the job has finished, and none has failed after that."""
        import torch.distributed as dist

        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            for _ in range(self.most):
                self._start()
            # Those that have not taken part when the job is over need not come so far.
            while self._processes and not (self._is_over() and self._processes.keys().isdisjoint(self._generation[1])):
                self._watch()
                if not self._is_over():
                    self._form()
                time.sleep(_LOOK)
        finally:
            for worker in self._processes.values():
                worker.process.terminate()
            for worker in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_TERMINATED)
                worker.process.kill()
        return 0 if self._is_done() and not self._failed else 1

    def _is_done(self) -> bool:
        return bool(self._store.check(["done"]))

    def _is_over(self) -> bool:
        return self._is_done() or bool(self._store.check(["job is over"]))

    def _start(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        number, self._started = self._started, self._started + 1
        variables = {
            "ZEROGRAPH_ELASTIC": f"127.0.0.1:{self._store.port}",
            "ZEROGRAPH_WORKER": str(number),
            "ZEROGRAPH_PIPE": str(writing),
            "MASTER_ADDR": "127.0.0.1",
            # The store is no rank's.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = self._spawn(variables, writing)
        os.close(writing)
        self._processes[number] = _Process(process, reading, time.monotonic(), _STARTED)

    def _spawn(self, variables: Mapping[str, str], pipe: int) -> subprocess.Popen[bytes]:
        """Start a process that inherits the pipe."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
        return subprocess.Popen(self.command, env=environment, pass_fds=[pipe])

    def _watch(self) -> None:
        """Look for processes that have ended or are silent; start others in their place."""
        now = time.monotonic()
        for number, worker in list(self._processes.items()):
            with contextlib.suppress(BlockingIOError):
                if os.read(worker.pipe, 4096):
                    worker.alive_at, worker.patience = now, self.patience
            code = worker.process.poll()
            if code is None and now - worker.alive_at > worker.patience:
                typer.echo(f"zerograph: worker {number} is silent for {worker.patience:g} seconds: killed", err=True)
                worker.process.send_signal(signal.SIGKILL)
                code = worker.process.wait()
            if code is not None:
                self._lost(number, code)

    def _lost(self, number: int, code: int) -> None:
        os.close(self._processes.pop(number).pipe)
        generation, workers, ranks = self._generation
        if number in workers:
            self._store.set(f"broken/{generation}", "")
        if code == 0 and self._is_done():
            return
        place = f", rank {workers.index(number)} of {ranks} in generation {generation}" if number in workers else ""
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        when = " after the end of training" if self._is_done() else ""
        typer.echo(f"zerograph: worker {number}{place} {how}{when}; {len(self._processes)} left", err=True)
        if self._is_done():
            self._failed = True
        elif self.restarts and not self._is_over():
            self.restarts -= 1
            self._start()

    def _waiting(self) -> dict[int, int | None]:
        """Return the living workers that wait for the next generation, each with the most ranks that it can run on."""
        generation, workers, _ = self._generation
        waiting = {}
        for number in self._processes:
            if self._store.check([f"want/{number}"]):
                after, most = json.loads(self._store.get(f"want/{number}"))
                if number not in workers or after == generation:
                    waiting[number] = most
        return waiting

    def _form(self) -> None:
        """Form the next generation once all that are left of the last one wait, or tell it that it may grow."""
        generation, workers, ranks = self._generation
        waiting = self._waiting()
        starting = [number for number in self._processes if number not in waiting]
        busy = [number for number in starting if number in workers or not workers]
        if busy:
            training = sum(number in workers[:ranks] for number in busy)
            if generation and training == ranks and self._ranks(training + len(waiting), waiting) > ranks:
                self._store.set(f"grow/{generation}", "")
            return
        # Those that hold snapshots first, in the order of their ranks.
        order = [number for number in workers if number in waiting]
        order += [number for number in sorted(waiting) if number not in workers]
        ranks = self._ranks(len(order), waiting)
        if ranks:
            self._generation = generation + 1, tuple(order), ranks
            self._store.set("generation", json.dumps(self._generation))
        elif not starting:
            message = f"{len(order)} process(es) are left, which are too few for {self.least} to {self.most} ranks"
            most = next(iter(waiting.values()), None)
            message += "" if most is None else f" and config.virtual_ranks = {most}"
            self._store.set("job is over", f"the job cannot go on: {message}")
            typer.echo(f"zerograph: {message}", err=True)

    def _ranks(self, available: int, waiting: dict[int, int | None]) -> int:
        """Return the most ranks that as many processes allow, or 0."""
        ranks = min(available, self.most, next(iter(waiting.values()), None) or available)
        return ranks if ranks >= self.least else 0
