"""Liveness: ranks report what they do, so that the error of a failed collective can name the rank at fault.

A failed collective knows an address at best. So each process has a thread that checks twice a second, with many ranks
less often, whether a rank has sent an inquiry; nothing else happens without failures. A rank whose collective fails
inquires: living ranks answer with what they are doing, failed ranks have left a report, and a silent rank is dead or
stopped. All messages go through the store of the rendezvous, over a connection of its own. Every wait for the store is
limited: it may be gone with the rank that hosts it.

[Note: threads at exit] A thread that comes back from the store while Python ends aborts the process: torch released the
interpreter's lock for the call, and Python ends a thread that takes it again then, in the middle of torch's C++. So no
thread is left in the store at exit: its connection is shut down, which ends every call, and the threads are joined.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from zerograph.errors import CommunicationError, ZeroGraphError
from zerograph.runtime.job.reports import ENDED, Answers, Report, decode, encode, name_ranks

# Seconds between two checks of few ranks. More check less often: one store answers all, in one operation for each if
# nothing has happened.
_INTERVAL = 0.5
_MAX_OPERATIONS = 960  # per second, of all ranks
# Seconds after the two checks in which a rank answers until it counts as silent: a loaded machine is not a dead one.
_PATIENCE = 4 * _INTERVAL

# Attribute of an interrupt that has been reported to the other ranks.
_REPORTED = "_zerograph_reported"

# Inquiries between two checks that are answered.
_MAX_INQUIRIES = 32

# Seconds in which a thread leaves the store at exit by itself, and once its connection is shut down.
_LEAVES, _IS_CUT_OFF = 0.2, 2.0

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Busy:
    """A block of :meth:`Liveness.busy`. No generator, which takes longer to enter and leave."""

    liveness: Liveness
    doing: str
    _thread: int = 0
    _before: str | None = None

    def __enter__(self) -> None:
        thread = self._thread = threading.get_ident()
        self._before = self.liveness._doing.get(thread)
        self.liveness._doing[thread] = self.doing

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.liveness._doing[self._thread] = self._before
        else:
            self.liveness._doing.pop(self._thread, None)
            self.liveness._idle = f"outside of the graph, after {self.doing}"


@dataclass(eq=False)
class Liveness:
    """Reports and inquiries of this rank; see the module.

    Attributes:
        rank, size: this rank, and the number of ranks.
        store: the store of the rendezvous; None for a single or simulated ranks, and after the store is gone.
        store_rank: the rank whose process hosts the store; None if no rank's does.
        agreed: the number of agreements of all ranks so far.
        broke_off: where this rank broke off a step, so that some of its exchanges may be unfinished; empty if it did
            not.
        ended: by rank of this host, a function that returns whether its process has ended.
        host_names: by rank the name of its host; empty if they are not known.
        hang_up: closes this rank's connections, which ends all waiting exchanges on both sides.
        connections: those of ``store`` alone.
    """

    rank: int
    size: int
    store: Any = None
    store_rank: int | None = None
    agreed: int = 0
    broke_off: str = ""
    ended: dict[int, Callable[[], bool]] = field(default_factory=dict)
    host_names: Sequence[str] = ()
    hang_up: Callable[[], None] = lambda: None
    connections: Sequence[socket.socket] = ()
    _doing: dict[int, str] = field(default_factory=dict)
    _idle: str = "outside of the graph, which has done nothing yet"
    _failure: Report | None = None
    _store_is_gone: bool = False
    # Ranks to look up at the next check, and by rank the agreement after which it broke off.
    _suspects: set[int] = field(default_factory=set)
    _broken_off: dict[int, int] = field(default_factory=dict)
    _answered: int = 0
    _answered_at: float = -math.inf
    _store_host_report: Report | None = None
    _blocked_at: int | None = None
    # The number of events that this rank has looked at, and the agreement after which another rank was interrupted.
    _events: int = 0
    _interrupted: int | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _process: int = field(default_factory=os.getpid)
    _threads: list[threading.Thread] = field(default_factory=list)

    def name(self, ranks: Iterable[int]) -> str:
        """Return the ranks as text, with their hosts if the job has several: ``ranks 2, 3 on host1``."""
        if len(set(self.host_names)) < 2:
            return name_ranks(ranks)
        by_host: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.host_names[rank], []).append(rank)
        return ", ".join(f"{name_ranks(members)} on {host}" for host, members in by_host.items())

    def busy(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Return a block inside which inquiries are answered with ``doing`` for this thread."""
        return _Busy(self, doing)

    def report_failure(self, error: BaseException, lost: Sequence[int] = ()) -> None:
        """Publish the error of this rank, for ranks that miss it.

        The error that made this rank break off stays published: the loss of others may follow from it.

        Args:
            error: the error.
            lost: the ranks that this one lost, if that is the error.
        """
        first_line = (str(error).strip().splitlines() or [""])[0]
        if self.own_failure() is None or not isinstance(error, CommunicationError):
            self._failure = Report(self._now(), f"{type(error).__name__}: {first_line}".removesuffix(": "), tuple(lost))
            self._post(self._failure)
        if self.broke_off:
            self._in_time(lambda: self.store.set(f"broke off/{self.rank}", str(self.agreed)), self._interval * 2)
            if not isinstance(error, Exception):
                self._in_time(self._announce_interrupt, self._interval * 2)
        if self.store_rank == self.rank:
            # The store may end with this process in a moment: make all ranks check, and find the report.
            self._in_time(self._inquire, self._interval)
            time.sleep(2 * self._interval)

    def report_interrupt(self, interrupt: BaseException, doing: str) -> None:
        """Report, once, that an interrupt ended what this rank was doing.

        The other ranks notice at once if this process ends. If it catches the interrupt they would wait until the
        timeout.
        """
        if not vars(interrupt).get(_REPORTED):
            mark_reported(interrupt)
            self.mark_break(f"{doing}, interrupted by {type(interrupt).__name__}")
            self.report_failure(interrupt)

    def mark_break(self, place: str) -> None:
        """Note where this rank broke off. The first place counts until ranks :meth:`resume`."""
        self.broke_off = self.broke_off or place

    def resume(self) -> None:
        """Go on after a step that broke off at the same place on all ranks, which have agreed on that."""
        self._in_time(lambda: self.store.delete_key("interrupted"), self._interval * 2)
        self._interrupted = None
        self.broke_off = ""
        self.forget()

    def own_failure(self) -> Report | None:
        """Return the error that made this rank break off; None if there is none, or if it lost other ranks."""
        return self._failure if self.broke_off and self._failure is not None and not self._failure.lost else None

    def forget(self) -> None:
        """Withdraw the report of an earlier error. If this rank broke off, it stays until all ranks have agreed."""
        if self._failure is not None and not self.broke_off:
            self._failure = None
            self._in_time(lambda: self.store.delete_key(f"last/{self.rank}"), self._interval * 2)

    def failed(self, rank: int) -> bool:
        """Return whether the rank is known to have broken off after the last agreement.

        The first call only starts a lookup; its result is known after at most two checks.
        """
        self._suspects.add(rank)
        return self._broken_off.get(rank) == self.agreed

    def ask(self) -> Answers:
        """Inquire what the other ranks are doing. Takes a few seconds at most."""
        doing = self._now()
        if self.store is None:
            return Answers(self.rank, doing, {}, reached=False)
        answers = self._in_time(lambda: self._ask(doing), 5 * self._interval + _PATIENCE)
        if answers is not None:
            return answers
        host = self.store_rank
        if host is None or host == self.rank:
            return Answers(self.rank, doing, {}, reached=False)
        last_report = {} if self._store_host_report is None else {host: self._store_host_report}
        return Answers(self.rank, doing, last_report, reached=False, store_rank=host)

    def leave(self) -> None:
        """Report that this process ends, and with which error. The store's host waits until the others have read it."""
        if self._over.is_set() or self.store is None or os.getpid() != self._process:
            return
        self._over.set()
        error = getattr(sys, "last_value", None)
        if error is not None and self._failure is None:
            self.report_failure(error)
        if self._failure is None:
            self._post(Report(self._now(), ENDED))
            self._in_time(self._say_goodbye, 3 * self._interval)
        # A store in a file is removed when the last process closes it.
        self.store = None

    def end_threads(self) -> None:
        """End every thread that uses the store; see [Note: threads at exit]."""
        self._over.set()
        # The connection of a forked process is its parent's too, and the threads are only the parent's.
        if os.getpid() != self._process:
            return
        for thread in self._threads:
            thread.join(_LEAVES)
        if any(thread.is_alive() for thread in self._threads):
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in self._threads:
                thread.join(_IS_CUT_OFF)

    def start(self, target: Callable[..., object], *args: object, name: str) -> threading.Thread:
        """Start a thread that uses the store, to be ended by :meth:`end_threads`."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return thread

    def _end(self) -> None:
        self._over.set()
        self.store = None

    @property
    def _interval(self) -> float:
        return max(_INTERVAL, self.size / _MAX_OPERATIONS)

    def _now(self) -> str:
        """Return what this rank is doing."""
        doing = list(self._doing.values())
        return " and ".join(doing) if doing else self._idle

    def _in_time(self, work: Callable[[], T], seconds: float) -> T | None:
        """Run ``work``, which uses the store, and return its result; None if it fails or takes too many seconds."""
        results: list[T] = []

        def attempt() -> None:
            with contextlib.suppress(RuntimeError):
                results.append(work())
                # It was only late.
                self._store_is_gone = False

        if self.store is None or self._store_is_gone:
            return None
        # Out of memory no thread can start. That must not hide the out-of-memory error.
        with contextlib.suppress(RuntimeError):
            self.start(attempt, name="zerograph liveness, inquiry").join(seconds)
            # No further attempts until it answers: each would wait, or be logged by torch with its whole stack.
            self._store_is_gone = not results
        return results[0] if results else None

    def _post(self, report: Report) -> None:
        self._in_time(lambda: self.store.set(f"last/{self.rank}", encode(report)), self._interval * 2)

    def _ask(self, doing: str) -> Answers:
        store, others = self.store, [rank for rank in range(self.size) if rank != self.rank]
        # If another rank has inquired just now, the answers to it suffice.
        number = int(store.get("asked")) if store.check(["asked"]) else 0
        if number <= self._answered and time.monotonic() - self._answered_at > self._interval * 2:
            number = self._inquire()
        answers = {rank: f"answer/{number}/{rank}" for rank in others}
        failures = {rank: f"last/{rank}" for rank in others}
        began = time.monotonic()
        while True:
            # A process that ends closes its connections first.
            gone = {rank for rank, ended in self.ended.items() if ended()}
            answered = _ranks_with_key(store, answers, others)
            silent = [rank for rank in others if rank not in answered]
            # A rank that failed and ended has left a report.
            failed = _ranks_with_key(store, failures, silent)
            silent = [rank for rank in silent if rank not in failed]
            # If the cause is known, wait for the others only as long as a living rank takes.
            limit = 2 * self._interval + (0 if gone else _PATIENCE)
            if gone.issuperset(silent) or time.monotonic() - began > limit:
                break
            time.sleep(self._interval / 10)
        keys = {rank: answers[rank] for rank in answered} | {rank: failures[rank] for rank in failed}
        reports = dict(zip(keys, map(decode, _values(store, list(keys.values()))), strict=True))
        ended = tuple(rank for rank in silent if rank in gone)
        # With an early end of the wait, the others may only have had too little time to answer.
        quiet = () if ended else tuple(silent)
        return Answers(self.rank, doing, dict(sorted(reports.items())), quiet, ended=ended)

    def _inquire(self) -> int:
        """Ask all ranks what they are doing; return the number of the inquiry."""
        number: int = self.store.add("asked", 1)
        self.store.add("events", 1)
        return number

    def _announce_interrupt(self) -> None:
        self.store.set("interrupted", str(self.agreed))
        self.store.add("events", 1)

    def _say_goodbye(self) -> None:
        """Announce a normal end. The store's host waits until the other ranks have stopped using the store."""
        if self.store_rank != self.rank:
            self.store.add("left", 1)
            return
        self.store.set("over", "")
        self.store.add("events", 1)
        end = time.monotonic() + 2 * self._interval
        while time.monotonic() < end and self.store.add("left", 0) < self.size - 1:
            time.sleep(self._interval / 50)

    def _watch(self, world: Callable[[], object]) -> None:
        """Answer inquiries of other ranks until the process group is destroyed or this process leaves."""
        while not self._over.wait(self._interval):
            if not dist.is_initialized() or dist.group.WORLD is not world():
                self.store = None
                return
            try:
                self._check(self.store)
            except RuntimeError:
                # The store is gone, and with it the rank that hosted it: the next collective fails.
                self._store_is_gone = True
                return

    def _check(self, store: Any) -> None:
        for rank in tuple(self._suspects):
            self._suspects.discard(rank)
            if store.check([f"broke off/{rank}"]):
                self._broken_off[rank] = int(store.get(f"broke off/{rank}"))
        # One operation; a file, which few ranks use, would grow by it.
        events = store.add("events", 0) if store.has_extended_api() else int(store.get("events"))
        if events != self._events:
            self._read_events(store)
            self._events = events
        self._hang_up_if_interrupted()

    def _read_events(self, store: Any) -> None:
        """Look for inquiries, an interrupt of another rank, and the end of the store."""
        self._interrupted = int(store.get("interrupted")) if store.check(["interrupted"]) else None
        if store.check(["asked"]):
            number = int(store.get("asked"))
            # Ranks that inquired at the same moment wait for an answer each.
            for inquiry in range(max(self._answered, number - _MAX_INQUIRIES) + 1, number + 1):
                store.set(f"answer/{inquiry}/{self.rank}", encode(self._failure or Report(self._now())))
                self._answered, self._answered_at = number, time.monotonic()
            if self.store_rank not in (None, self.rank) and store.check([f"last/{self.store_rank}"]):
                self._store_host_report = decode(store.get(f"last/{self.store_rank}"))
        if self.store_rank not in (None, self.rank) and store.check(["over"]):
            self._store_host_report = Report("the end of its process", ENDED)
            self._over.set()
            store.add("left", 1)

    def _hang_up_if_interrupted(self) -> None:
        """Hang up if this rank still waits in, or before, a step in which another rank was interrupted."""
        number, waiting = self.agreed, bool(self._doing) and not self.broke_off
        if waiting and self._interrupted in (number, number - 1):
            # At the second check: exchanges without that rank may still complete.
            if self._blocked_at == number:
                self.hang_up()
            self._blocked_at = number
        else:
            self._blocked_at = None


@contextlib.contextmanager
def on_interrupt(note: Callable[[BaseException], object]) -> Iterator[None]:
    """Call a function with an interrupt (a ``BaseException`` that is not an ``Exception``) that is raised inside."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        note(error)
        raise


def mark_reported(interrupt: BaseException) -> None:
    """Mark an interrupt as reported to the other ranks."""
    vars(interrupt)[_REPORTED] = True


_current: list[Liveness] = []
# Also those of destroyed process groups, of which a thread may be in the store yet.
_all: weakref.WeakSet[Liveness] = weakref.WeakSet()


def start_liveness(world: dist.ProcessGroup) -> Liveness:
    """Start this rank's thread that answers inquiries in the job of a process group, and return its state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1 or dist.get_backend(world).startswith("fake"):
        return Liveness(rank, size)
    store: Any = world.get_group_store()
    clone, own = connected(store, store.clone)
    own_keys = dist.PrefixStore("zerograph liveness", clone)  # type: ignore[attr-defined]
    own_keys.add("events", 0)
    liveness = Liveness(rank, size, own_keys, _store_rank(store), connections=own)
    _all.add(liveness)
    weakref.finalize(liveness, _close, own)
    # A weak reference: the thread ends with the group. The store is dropped at once: it may be a file in a folder that
    # is about to be removed, and torch aborts if the file disappears between its check and its sign-off in it.
    reference = weakref.ref(world, lambda _: liveness._end())
    liveness.start(liveness._watch, reference, name="zerograph liveness")
    if not _current:
        atexit.register(_leave)
    _current[:] = [liveness]
    return liveness


def _leave() -> None:
    _write_error_file()
    for liveness in _current:
        if dist.is_initialized():
            liveness.leave()
    for liveness in tuple(_all):
        liveness.end_threads()


def _write_error_file() -> None:
    """Write the error that ends this process where torchrun looks for causes, if nothing else has done it."""
    file, error = os.environ.get("TORCHELASTIC_ERROR_FILE"), getattr(sys, "last_value", None)
    if not file or not isinstance(error, ZeroGraphError) or os.path.exists(file):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # It is only a report: a full disk must not hide the error itself.
    with contextlib.suppress(OSError):
        try:
            # torch writes the traceback of the error that is being handled.
            raise error
        except ZeroGraphError:
            get_error_handler().record_exception(error)


def _without_prefix(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the file descriptors of this process's sockets over IP, where the system lists descriptors.

    Each comes with a copy of the socket, which is closed when the next one is asked for.
    """
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        # Some have been closed since.
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(name), copy


def connections(store: Any) -> Iterator[tuple[int, socket.socket]]:
    """Yield those of :func:`sockets` that are connected to the port of a store."""
    store = _without_prefix(store)
    for number, copy in sockets() if isinstance(store, dist.TCPStore) else ():  # type: ignore[attr-defined]
        # Others listen.
        with contextlib.suppress(OSError):
            if copy.getpeername()[1] == store.port:
                yield number, copy


def connected(store: Any, connect: Callable[[], T]) -> tuple[T, list[socket.socket]]:
    """Return what a function that connects to a store returns, and copies of the connections that it has made."""
    before = {number for number, _ in connections(store)}
    result = connect()
    return result, [copy.dup() for number, copy in connections(store) if number not in before]


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _store_rank(store: Any) -> int | None:
    """Return the rank whose process hosts the store; None if the launcher's does, or it is a file."""
    store = _without_prefix(store)
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not is_launchers else None  # type: ignore[attr-defined]


def _ranks_with_key(store: Any, keys: Mapping[int, str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose key exists in the store, by bisection: one ``check`` covers many keys."""
    if not ranks or store.check([keys[rank] for rank in ranks]):
        return list(ranks)
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return _ranks_with_key(store, keys, ranks[:half]) + _ranks_with_key(store, keys, ranks[half:])


def _values(store: Any, keys: list[str]) -> list[bytes]:
    if not keys:
        return []
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]
