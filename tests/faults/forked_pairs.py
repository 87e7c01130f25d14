"""Pairs of fresh ranks that cost no start: forked from a process of the server of ``tests.pool``."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerograph import ZeroGraphError

# Called by a rank with something picklable: ``tell(("loaded", 3))``.
Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Told:
    """A rank that has ended.

    Attributes:
        said: what it said, in order, with the time of each.
        code: as ``Process.exitcode``: of one that was killed -9.
        ended: when; times are those of ``time.monotonic()``.
    """

    said: list[tuple[float, Any]]
    code: int
    ended: float

    def words(self, kind: str) -> list[Any]:
        """Return the messages of a kind, each a tuple that begins with it."""
        return [word for _, word in self.said if word[0] == kind]


class WarmPair:
    """``run(function, *args)`` calls ``function(tell, *args)`` as both ranks of a new job, in processes of their own.

    A rank that says ``("kill me in", seconds)`` is killed then, by SIGKILL. The last word of one that ends with an
    error of zerograph's is ``("told", message)``, of one that ends with another ``("broken", traceback)``.
    """

    def __init__(self, patience: float = 240.0) -> None:
        self._patience = patience
        context = mp.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, store: Path, function: Callable[..., None], *args: Any) -> list[Told]:
        """Return the messages of both ranks, which meet at the new file ``store``."""
        self._connection.send((str(store), function, args, self._patience))
        assert self._connection.poll(self._patience + 60), "the process that forks ranks does not answer"
        answer: list[Told] = self._connection.recv()
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            connection.send(_run(*connection.recv()))


def _run(store: str, function: Callable[..., None], args: tuple[Any, ...], patience: float) -> list[Told]:
    ranks = []
    for rank in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _be(rank, store, function, args, write)
        os.close(write)
        ranks.append((pid, read))
    return _listen(ranks, time.monotonic() + patience)


def _listen(ranks: list[tuple[int, int]], until: float) -> list[Told]:
    said: dict[int, list[tuple[float, Any]]] = {pid: [] for pid, _ in ranks}
    ends: dict[int, tuple[int, float]] = {}
    files = {os.fdopen(read, "rb"): pid for pid, read in ranks}
    kills: dict[int, float] = {}
    while files:
        now = time.monotonic()
        for pid, at in list(kills.items()):
            if at <= now:
                del kills[pid]
                os.kill(pid, signal.SIGKILL)
        if now > until:
            for pid in files.values():
                os.kill(pid, signal.SIGKILL)
        wait = min([*kills.values(), until]) - now
        for file in select.select(list(files), [], [], max(0.0, min(wait, 1.0)))[0]:
            pid = files[file]
            try:
                word = pickle.load(file)
            except EOFError:
                file.close()
                del files[file]
                kills.pop(pid, None)
                ends[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic()
                continue
            said[pid].append((time.monotonic(), word))
            if isinstance(word, tuple) and word[0] == "kill me in":
                kills[pid] = time.monotonic() + word[1]
    return [Told(said[pid], *ends[pid]) for pid, _ in ranks]


def _be(rank: int, store: str, function: Callable[..., None], args: tuple[Any, ...], write: int) -> None:
    """This process as a rank, and its end."""

    def tell(word: Any) -> None:
        os.write(write, pickle.dumps(word))

    code = 1
    try:
        # The first to set them makes torch's pool of threads anew; two threads of a backward that are first abort.
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        function(tell, *args)
        code = 0
    except ZeroGraphError as error:
        tell(("told", str(error)))
    except BaseException:
        tell(("broken", traceback.format_exc()))
    # At once: what the template has registered for its own end is not this process's.
    os._exit(code)
