"""An elastic job as one of its processes sees it: generations of ranks, which the launcher forms.

The launcher that leads has the store, so that it survives every rank. Launchers number the processes that they start,
*workers*, and the leading one writes one key for each generation. A worker that lost others leaves its process group,
asks for the next generation and waits until the launcher has formed it of all workers that are left. Each worker tells
its launcher through a socket that it lives; one that is silent is killed, so that no collective waits for a stopped
process until its timeout. Nobody can kill the workers of a host that is cut off: the others hang up. If the store is
lost, and another launcher leads, a worker learns through its socket where the store is now.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerograph.errors import CommunicationError
from zerograph.runtime.job.environment import listen_on_loopback
from zerograph.runtime.job.liveness import connected, connections
from zerograph.runtime.job.process_group import ELASTIC, end_exchanges, enter

# Variables of a worker's environment besides the launcher's store: its number, the file descriptor of its socket, and
# the seconds that it waits for another store if that is gone.
WORKER, PIPE, WAITS = "ZEROGRAPH_WORKER", "ZEROGRAPH_PIPE", "ZEROGRAPH_WAITS"
# Seconds between two signs of life, between two looks at the store, and in which a thread leaves the store at exit.
_BEAT, _LOOK, _LEAVES = 0.5, 0.02, 2.0
# Until a store that is connected to must have answered.
_ANSWERS = timedelta(seconds=10)


class JobLostError(CommunicationError):
    """An elastic job cannot go on."""


@dataclass(frozen=True)
class Generation:
    """The ranks that go on together.

    Attributes:
        number: counts generations from 1.
        workers: all that take part in the exchange of snapshots; the first are the ranks, in order.
        ranks: number of ranks. Further workers are spare: they wait for the next generation.
        hosts: of each worker, as the launchers name them.
        after_loss: a worker of the last generation that this process was in is not in it.
    """

    number: int
    workers: tuple[int, ...]
    ranks: int
    hosts: tuple[str, ...] = ()
    after_loss: bool = False


@functools.cache
def worker() -> Worker | None:
    """Return this process's part in an elastic job, connected to the launcher; None in any other job."""
    if ELASTIC not in os.environ:
        return None
    return Worker(int(os.environ[WORKER]))


def _connect() -> Any:
    until = time.monotonic() + float(os.environ[WAITS])
    while True:
        host, _, port = os.environ[ELASTIC].rpartition(":")
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_ANSWERS)  # type: ignore[attr-defined]
        except RuntimeError as error:
            if time.monotonic() >= until:
                at = f"{host}:{port}"
                raise CommunicationError(f"the launcher of this elastic job does not answer at {at}") from error
            continue
        store.set_timeout(dist.default_pg_timeout)
        return store


@dataclass(eq=False)
class Worker:
    """A process of an elastic job.

    Attributes:
        number: this worker's.
        store: the launcher's.
        generation: the last one that this worker was in.
        hang_up: ends exchanges with a generation that is broken, in whatever thread they wait.
        connections: of the generation's groups to the store.
    """

    number: int
    store: Any = None
    generation: Generation = Generation(0, (), 0)
    hang_up: Callable[[], None] = end_exchanges
    connections: Sequence[socket.socket] = ()
    _over: threading.Event = field(default_factory=threading.Event)
    _watching: threading.Thread = field(init=False)
    # Held while the store is connected to.
    _moving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        pipe = int(os.environ[PIPE])
        threading.Thread(target=self._beat, args=(pipe,), name="zerograph sign of life", daemon=True).start()
        with self._moving:
            self._meet_store()
        # See [Note: threads at exit] of liveness.py.
        atexit.register(lambda: self._watching.join(_LEAVES))
        atexit.register(self._over.set)

    def _meet_store(self) -> None:
        self.store = _connect()
        # The connection of the main thread may be in use.
        watching = threading.Thread(target=self._watch, args=(_connect(),), name="zerograph generation", daemon=True)
        watching.start()
        self._watching = watching

    def _beat(self, pipe: int) -> None:
        """Write a byte into the socket again and again; end this process if nobody reads: the launcher is gone."""
        while True:
            try:
                # If it is full the launcher is busy, and has enough to read.
                with contextlib.suppress(BlockingIOError):
                    os.write(pipe, b".")
                with contextlib.suppress(BlockingIOError):
                    if told := os.read(pipe, 4096).decode():
                        self._move(told.split()[-1])
            except (BrokenPipeError, ConnectionResetError):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_BEAT)

    def _move(self, address: str) -> None:
        """Go on with the store at another address: that of before is gone, or cut off."""
        os.environ[ELASTIC] = address
        with self._moving:
            for _, before in connections(self.store):
                with contextlib.suppress(OSError):
                    before.shutdown(socket.SHUT_RDWR)
            self._meet_store()

    def _watch(self, store: Any) -> None:
        """Hang up when a worker of the generation is lost: a host that is cut off ends no exchange."""
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(_BEAT):
                number = self.generation.number
                if store.check([f"broken/{number}"]) and number == self.generation.number and not self._over.is_set():
                    # Ranks that connect wait for addresses there.
                    for connection in self.connections:
                        with contextlib.suppress(OSError):
                            connection.shutdown(socket.SHUT_RDWR)
                    self.hang_up()

    def next_generation(self, most: int | None) -> Generation | None:
        """Ask for the next generation and wait for it; return None if the others have finished meanwhile.

        Args:
            most: the most ranks that the graph runs on; None: any number.

        Raises:
            JobLostError: the launcher is gone, or has given the job up.
        """
        asked = None
        while not self.has("done"):
            if asked is not self.store:
                asked = self.store
                self.tell(f"want/{self.number}", json.dumps([self.generation.number, most]))
            if self.has("job is over"):
                raise JobLostError(self._ask("get", "job is over").decode())
            if self.has("generation"):
                number, workers, ranks, hosts = json.loads(self._ask("get", "generation"))
                if number > self.generation.number and self.number in workers:
                    after_loss = not set(self.generation.workers).issubset(workers)
                    self.generation = Generation(number, tuple(workers), ranks, tuple(hosts), after_loss)
                    return self.generation
            time.sleep(_LOOK)
        return None

    def enter(self, size: int, part: str) -> None:
        """Make the default process group of the first workers of the generation, over gloo.

        Args:
            size: how many.
            part: names the group among those of the generation.

        Raises:
            RuntimeError: a worker of the generation has ended.
        """
        rank, hosts = self.generation.workers.index(self.number), self.generation.hosts
        local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts[:size].count(hosts[rank])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size)}
        listen_on_loopback()
        for connection in self.connections:
            connection.close()
        store, self.connections = connected(self.store, _connect)
        store = dist.PrefixStore(f"generation {self.generation.number} {part}", store)  # type: ignore[attr-defined]
        store.add("arrived", 1)
        while store.add("arrived", 0) < size:
            # Gloo's own wait, in C++, would go on until its timeout.
            if self.is_broken():
                raise RuntimeError("a worker of the generation has ended")
            time.sleep(_LOOK)
        enter(store, rank, size)

    def is_broken(self, wait: float = 0.0) -> bool:
        """Return whether a worker of the generation has ended, or ends within so many seconds.

        Raises:
            JobLostError: the launcher is gone.
        """
        end = time.monotonic() + wait
        while not self.has(f"broken/{self.generation.number}"):
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK)
        return True

    def may_grow(self) -> bool:
        """Return whether workers wait with which the next generation would have more ranks."""
        return self.has(f"grow/{self.generation.number}")

    def has(self, key: str) -> bool:
        """Return whether the launcher's store has the key.

        Raises:
            JobLostError: the launcher is gone.
        """
        return bool(self._ask("check", [key]))

    def tell(self, key: str, message: str = "") -> None:
        """Write a key of the launcher's store.

        Raises:
            JobLostError: the launcher is gone.
        """
        self._ask("set", key, message)

    def _ask(self, operation: str, *args: Any) -> Any:
        while True:
            store = self.store
            try:
                return getattr(store, operation)(*args)
            except RuntimeError as error:
                until = time.monotonic() + float(os.environ[WAITS])
                while self.store is store:
                    if time.monotonic() >= until:
                        raise JobLostError(f"the launcher of this elastic job is gone: {error!s:.200}") from error
                    time.sleep(_LOOK)

    def job_lost(self, message: str) -> JobLostError:
        """Tell the launcher that the job cannot go on, and return the error that says so."""
        self.tell("job is over", message)
        return JobLostError(message)

    def finish(self) -> None:
        """Tell the launcher, and workers that wait, that all ranks have finished."""
        self._over.set()
        self.tell("done")
