"""Worker processes that stay alive for the whole test run, so that a test over several ranks costs no start.

They fork off a server that has imported what they need, all but rank 1: strings hash otherwise in a process started
afresh, so what depends on the order of a set differs between the ranks, and shows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerograph.eager import world
from zerograph.runtime.job import process_group

# What takes the longest to import, and one traced step; nothing of it starts threads, which a fork would lose.
_PUBLIC = (
    "graph",
    "state.checkpoint.export",
    "compat.deepspeed",
    "passes.rules.register_rule",
    "planner.front.plan",
    "state.sharded_init",
)
mp.set_forkserver_preload(
    ["torch._dynamo", *(f"zerograph.{name}" for name in _PUBLIC), "transformers", "tests.models", "tests.preload"]
)

# After how many new threads what was frozen is looked through. A process group of gloo has three.
MORE_THREADS = 16

# After how many new objects the youngest are looked through, and after how many of these times the older ones.
COLLECTIONS = (20_000, 20, 20)

# Ranks that compute for a smaller part of the time wait for each other, and that at most so often.
IDLE, MOST_WAITS = 0.02, 4


class Pool:
    """``run(2, function, *args)`` calls ``function(*args)`` as rank 0 and 1 of a fresh process group over gloo.

    As many workers are started, up to ``size``, as a call needs.

    Args:
        patience: seconds until a rank that does not answer is a failure, unless ranks compute: a machine may be slow.
        hash_apart: rank 1 hashes strings otherwise than the others, which costs a start of its own.
        backend: of the process group; what registers it is imported by the module of the function that runs.
        forks: workers are forked; no process that has looked for a GPU may be.
    """

    def __init__(
        self,
        size: int = 4,
        patience: float = 300.0,
        hash_apart: bool = True,
        backend: str = "gloo",
        forks: bool = True,
    ) -> None:
        self._size, self._patience, self._hash_apart = size, patience, hash_apart
        self._backend, self._forks = backend, forks
        self._forked, self._spawned = mp.get_context("forkserver"), mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._folder, self._numbers = tempfile.TemporaryDirectory(), itertools.count()
        # The store and the number of ranks of the process group that the last call has left; 0: none.
        self._store, self._kept = Path(), 0

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returned, in order; raise ``RanksError`` with the tracebacks of those that raised."""
        return self.call(ranks, function, args, is_kept=False)

    # What is called where one must be new although tests share jobs (see :class:`SharedJobs`).
    run_afresh = run

    def call(self, ranks: int, function: Callable[..., Any], args: tuple[Any, ...], *, is_kept: bool) -> list[Any]:
        """As :meth:`run`; ``is_kept``: in the process group that such a call has left, if it has as many ranks."""
        self._start(ranks)
        if not is_kept or self._kept != ranks:
            # It stays until the end: what still has it open must not find it gone.
            self._store = self._traces() / f"store {next(self._numbers)}"
        self._kept = 0
        for rank in range(ranks):
            self._workers[rank][1].send((rank, ranks, self._backend, str(self._store), is_kept, function, args))
        answers = [self._answer(rank, function) for rank in range(ranks)]
        failed = {rank: text for rank, (ok, text) in enumerate(answers) if not ok}
        if failed:
            raise RanksError("\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items()))
        self._kept = ranks if is_kept else 0
        return [value for _, value in answers]

    def close(self, patience: float = 0.0) -> None:
        """End all workers; idle ones end by themselves within ``patience`` seconds, and so write what they measured."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(patience)
            # A stopped process ignores SIGTERM.
            process.kill()
            process.join()
        self._workers = []

    def _start(self, ranks: int) -> None:
        if ranks > self._size:
            raise ValueError(f"{ranks} ranks in a pool of {self._size}")
        while len(self._workers) < ranks:
            apart = self._hash_apart and len(self._workers) == 1
            context = self._spawned if apart or not self._forks else self._forked
            ours, theirs = context.Pipe()
            trace = self._traces() / f"worker {len(self._workers)}"
            process = context.Process(target=_serve, args=(theirs, str(trace)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int, function: Callable[..., Any]) -> tuple[bool, Any]:
        connection = self._workers[rank][1]
        before, waits = self._seconds(), 1
        while not (answered := connection.poll(self._patience)) and waits < MOST_WAITS:
            now, waits = self._seconds(), waits + 1
            if now - before < IDLE * self._patience:
                break
            before = now
        if not answered:
            where = self._where()
            self.close()
            late = f"rank {rank} did not answer within {waits * self._patience} s in {function.__name__}"
            raise RanksError(f"{late}\n{where}")
        try:
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            self.close()
            raise RanksError(f"rank {rank} died in {function.__name__}") from None
        return answer

    def _where(self) -> str:
        """Return the stack of each worker, as text."""
        for process, _ in self._workers:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._traces().glob("worker *")))

    def _seconds(self) -> float:
        """Return how long all workers have computed."""
        paths = [Path(f"/proc/{process.pid}/stat") for process, _ in self._workers]
        # A name that may have spaces precedes fields 14 and 15. A worker that has ended has no file.
        texts = [path.read_text().rpartition(")")[2].split() for path in paths if path.exists()]
        return sum(int(fields[11]) + int(fields[12]) for fields in texts) / os.sysconf("SC_CLK_TCK")

    def _traces(self) -> Path:
        return Path(self._folder.name)


class SharedJobs:
    """A pool whose calls share a job with the calls before, and so what its ranks have compiled for operators."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.run_afresh = pool, pool.run

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`Pool.run`."""
        return self._pool.call(ranks, function, args, is_kept=True)


class RanksError(AssertionError):
    """Some rank raised, died or hung."""


def _serve(connection: Connection, trace: str) -> None:
    # Says where a worker was that dies of a signal.
    faulthandler.enable()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt), open(trace, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        # Graphs are made of many objects that live long: the usual threshold spends a tenth of a test on collections.
        gc.set_threshold(*COLLECTIONS)
        # What is imported by now stays: the collections after the calls need not look at it. What calls leave behind
        # may be in cycles, with process groups and their threads in them.
        gc.freeze()
        most_threads = _threads() + MORE_THREADS
        left = ""
        while True:
            rank, ranks, backend, store, is_kept, function, args = connection.recv()
            try:
                if left != store:
                    _leave()
                    _join(rank, ranks, backend, store)
                torch.manual_seed(0)
                if world._world is not None:
                    # Rows that an earlier call has cut say nothing of those of this one.
                    world._world.rows_of_ranks = world._world.joins_rows = False
                answer, left = (True, function(*args)), store
            except BaseException:
                answer, is_kept = (False, traceback.format_exc()), False
            if not is_kept:
                # After the exception is gone, whose traceback holds the whole failed test.
                left = ""
                _leave()
            gc.collect()
            if _threads() > most_threads:
                # What was in use when it was frozen may be garbage by now, in cycles that hold process groups.
                gc.unfreeze()
                gc.collect()
                most_threads = _threads() + MORE_THREADS
            # What survives is modules and caches, which grow with every test: the next collections need not look at
            # them.
            gc.freeze()
            connection.send(answer)


def _threads() -> int:
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


def _join(rank: int, ranks: int, backend: str, store: str) -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    # A rank that is done at once would close connections that another has not seen open yet.
    dist.barrier()


def _leave() -> None:
    """Leave the process group. Each that stays would wake its thread a hundred times a second, to the end."""
    if dist.is_initialized():
        dist.destroy_process_group()
    process_group._jobs.clear()
    process_group._meshes.clear()
