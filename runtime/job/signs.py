"""Signs of life: what each rank is doing, so that when a collective fails the message can say whose fault it is.

A failed collective knows an address at best. So every process has one thread that looks twice a second whether some
rank has asked who is there; nothing else happens while all is well. A rank whose collective fails asks: the living
answer with what they are doing, those that failed have left a note, and who says nothing is dead or stopped. All of it
goes through the store in which the ranks met, over a connection of its own; no wait for it is without an end: the store
may be gone with the rank that kept it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from zerograph.errors import CommunicationError

# Seconds between two looks, for up to a thousand ranks: one store answers them all.
_INTERVAL = 0.5
# Looks that a rank may miss until it counts as silent: a loaded machine is not a dead one.
_LOOKS = 6

# Of what the others say a message has so many lines.
_LINES = 8

# Marks an interrupt of which the others have been told.
_TOLD = "_zerograph_told"

_ENDED = "its process has ended, without an error"

# So many that ask within one look are answered.
_AT_ONCE = 32

T = TypeVar("T")


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself.

    Attributes:
        doing: what it is doing, or was when it failed.
        failed: what it failed with, in a line; None: it has not.
        lost: the ranks that it says it has lost, if that is why.
    """

    doing: str
    failed: str | None = None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answers:
    """What ``rank``, which is ``doing`` something, heard from the others.

    Attributes:
        signs: what they said, by rank.
        silent: those that said nothing.
        ended: those that left no word and whose process is known to have ended.
        reached: the store answered.
        keeper: where it did not: the rank in whose process it is, or was.
    """

    rank: int
    doing: str
    signs: Mapping[int, Sign]
    silent: tuple[int, ...] = ()
    reached: bool = True
    keeper: int | None = None
    ended: tuple[int, ...] = ()

    def lost(self) -> tuple[int, ...]:
        """Whose fault it is, as far as can be known.

        Those that failed by themselves or give no sign of life; else those that others have lost; else the one that
        took the store along; else those that do something else.
        """
        failed = {rank for rank, sign in self.signs.items() if sign.failed is not None and not sign.lost}
        others = {rank for sign in self.signs.values() for rank in sign.lost} - {self.rank}
        gone = set() if self.keeper is None or self.keeper in self.signs else {self.keeper}
        elsewhere = {r for r, sign in self.signs.items() if sign.failed is None and sign.doing != self.doing}
        return tuple(sorted(failed | set(self.silent) | set(self.ended) or others or gone or elsewhere))

    def told(self) -> list[str]:
        """What they said, in lines: the silent ones first, those with the same words together."""
        lines = []
        if self.ended:
            lines.append(f"{ranks_named(self.ended)}: its process has ended and left no word: killed, or out of memory")
        if self.silent:
            lines.append(
                f"{ranks_named(self.silent)}: no sign of life: died, is stopped, is held up in native code, or the "
                "network to it is cut"
            )
        if not self.reached:
            keeper = "the launcher keeps" if self.keeper is None else f"rank {self.keeper} keeps"
            lines.append(
                f"the store in which the ranks met, which {keeper}, does not answer: its process has ended, or the "
                "network to it is cut"
            )
        same: dict[str, list[int]] = {}
        for rank, sign in self.signs.items():
            text = f"alive, {sign.doing}" if sign.failed is None else f"failed, {sign.doing}: {sign.failed}"
            same.setdefault(text, []).append(rank)
        lines += [f"{ranks_named(ranks)}: {text}" for text, ranks in same.items()]
        return lines if len(lines) <= _LINES else [*lines[:_LINES], f"... and {len(lines) - _LINES} more"]


@dataclass(eq=False)
class Signs:
    """One rank's part in this; see the module. Of a job of one, or of simulated ranks, nobody asks (``store`` None).

    Attributes:
        keeper: the rank in whose process the store is; None: it is in none of theirs.
        agreed: how often all ranks have agreed on what to do next.
        broke_off: where in a step this rank went no further, after which some of its exchanges may be left unfinished;
            empty: all that it began it has ended.
        ended: by rank, tells whether the process of that rank has ended; of ranks on other hosts nothing tells.
        hang_up: closes this rank's connections, which ends every exchange that waits on either side.
    """

    rank: int
    size: int
    store: Any = None
    keeper: int | None = None
    agreed: int = 0
    broke_off: str = ""
    ended: dict[int, Callable[[], bool]] = field(default_factory=dict)
    hang_up: Callable[[], None] = lambda: None
    _doing: dict[int, str] = field(default_factory=dict)
    _behind: str = "outside of the graph, which has done nothing yet"
    _noted: Sign | None = None
    _gone: bool = False
    _asked_after: set[int] = field(default_factory=set)
    _broken_off: dict[int, int] = field(default_factory=dict)
    _asked: int = 0
    _answered_at: float = -math.inf
    _keepers: Sign | None = None
    _waits_in_vain: int | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _process: int = field(default_factory=os.getpid)

    @contextlib.contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Inside, this thread is ``doing`` something, if anybody asks."""
        thread = threading.get_ident()
        before = self._doing.get(thread)
        self._doing[thread] = doing
        try:
            yield
        finally:
            if before is not None:
                self._doing[thread] = before
            else:
                self._doing.pop(thread, None)
                self._behind = f"outside of the graph, behind {doing}"

    def note(self, error: BaseException, lost: Sequence[int] = ()) -> None:
        """Leave word of what this rank failed with: the others may only see that it is no longer there.

        What made this rank break off stays its word: the loss of others may follow from it.
        """
        first = (str(error).strip().splitlines() or [""])[0]
        if self.own_failure() is None or not isinstance(error, CommunicationError):
            self._noted = Sign(self._now(), f"{type(error).__name__}: {first}".removesuffix(": "), tuple(lost))
            self._post(self._noted)
        if self.broke_off:
            self._in_time(lambda: self.store.set(f"broke off/{self.rank}", str(self.agreed)), self._interval * 2)
            if not isinstance(error, Exception):
                self._in_time(lambda: self.store.set("interrupted", str(self.agreed)), self._interval * 2)
        if self.keeper == self.rank:
            # The store may go with this process in a moment: let all look, and find the note.
            self._in_time(lambda: self.store.add("asked", 1), self._interval)
            time.sleep(2 * self._interval)

    @contextlib.contextmanager
    def interruptible(self, doing: str) -> Iterator[None]:
        """Tell the others of an interrupt (a ``BaseException`` that is no error) that leaves this rank's part undone.

        A rank that ends is missed at once. One that catches it and lives on would be waited for until the timeout.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.tell_interrupt(error, doing)
            raise

    def tell_interrupt(self, interrupt: BaseException, doing: str) -> None:
        """Tell the others, once, that this rank goes no further with what it was ``doing``."""
        if not vars(interrupt).get(_TOLD):
            mark_told(interrupt)
            self.broke_off = self.broke_off or f"{doing}, interrupted by {type(interrupt).__name__}"
            self.note(interrupt)

    def resume(self) -> None:
        """Go on after a step that broke off at the same place on all ranks, which have agreed to."""
        self._in_time(lambda: self.store.delete_key("interrupted"), self._interval * 2)
        self.broke_off = ""
        self.forget()

    def own_failure(self) -> Sign | None:
        """Return what this rank, and no other, made break off; None: nothing, or it has lost others."""
        return self._noted if self.broke_off and self._noted is not None and not self._noted.lost else None

    def forget(self) -> None:
        """Forget what was noted before this rank went on. What it broke off with stays until all have agreed."""
        if self._noted is not None and not self.broke_off:
            self._noted = None
            self._in_time(lambda: self.store.delete_key(f"last/{self.rank}"), self._interval * 2)

    def failed(self, rank: int) -> bool:
        """Whether that rank is known to have broken off in the step that all last agreed to make.

        Who goes on asking learns of it within two looks.
        """
        self._asked_after.add(rank)
        return self._broken_off.get(rank) == self.agreed

    def ask(self) -> Answers:
        """What the others are doing; takes as long as a living one may need to answer, some seconds, and no longer."""
        doing = self._now()
        if self.store is None:
            return Answers(self.rank, doing, {}, reached=False)
        found = self._in_time(lambda: self._ask(doing), (_LOOKS + 3) * self._interval)
        if found is not None:
            return found
        if self.keeper in (None, self.rank):
            return Answers(self.rank, doing, {}, reached=False)
        last = {self.keeper: self._keepers} if self._keepers is not None and self.keeper is not None else {}
        return Answers(self.rank, doing, last, reached=False, keeper=self.keeper)

    def leave(self) -> None:
        """This process ends: the others learn with what, and the rank that hosts the store keeps it until they have."""
        if self._over.is_set() or self.store is None or os.getpid() != self._process:
            return
        self._over.set()
        error = getattr(sys, "last_value", None)
        if error is not None and self._noted is None:
            self.note(error)
        if self._noted is None:
            self._post(Sign(self._now(), _ENDED))
            self._in_time(self._leave, 3 * self._interval)
        # A file that others meet in as well goes with the last who has it open.
        self.store = None

    def _end(self) -> None:
        self._over.set()
        self.store = None

    @property
    def _interval(self) -> float:
        return _INTERVAL * max(1.0, self.size / 1000)

    def _now(self) -> str:
        doing = list(self._doing.values())
        return " and ".join(doing) if doing else self._behind

    def _in_time(self, work: Callable[[], T], seconds: float) -> T | None:
        """What ``work`` returns, which talks to the store; None: it could not, or not within so many seconds."""
        found: list[T] = []

        def attempt() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(work())

        if self.store is None or self._gone:
            return None
        thread = threading.Thread(target=attempt, name="zerograph signs, asking", daemon=True)
        # Where memory is at its end there is no thread to be had; that is not to hide the error which says so.
        with contextlib.suppress(RuntimeError):
            thread.start()
            thread.join(seconds)
        # Once is enough: each further attempt would wait, or be logged by torch with its whole stack.
        self._gone = not found
        return found[0] if found else None

    def _post(self, sign: Sign) -> None:
        self._in_time(lambda: self.store.set(f"last/{self.rank}", _written(sign)), self._interval * 2)

    def _ask(self, doing: str) -> Answers:
        store, others = self.store, [rank for rank in range(self.size) if rank != self.rank]
        # Where another rank has asked just now, its answers will do.
        number = int(store.get("asked")) if store.check(["asked"]) else 0
        if number <= self._asked and time.monotonic() - self._answered_at > self._interval * 2:
            number = store.add("asked", 1)
        answers = {rank: f"answer/{number}/{rank}" for rank in others}
        notes = {rank: f"last/{rank}" for rank in others}
        began = time.monotonic()
        while True:
            # A process that ends closes its connections first.
            gone = {rank for rank, ended in self.ended.items() if ended()}
            there = _there(store, answers, others)
            silent = [rank for rank in others if rank not in there]
            # Who failed and is gone has left word.
            left = _there(store, notes, silent)
            silent = [rank for rank in silent if rank not in left]
            # Where the cause is known, the others need not be waited for longer than a living one takes.
            limit = (2 if gone else _LOOKS) * self._interval
            if gone.issuperset(silent) or time.monotonic() - began > limit:
                break
            time.sleep(self._interval / 10)
        keys = {rank: answers[rank] for rank in there} | {rank: notes[rank] for rank in left}
        signs = dict(zip(keys, map(_read, _values(store, list(keys.values()))), strict=True))
        ended = tuple(rank for rank in silent if rank in gone)
        # Of those that have not had time to answer nothing is known.
        quiet = () if ended else tuple(silent)
        return Answers(self.rank, doing, dict(sorted(signs.items())), quiet, ended=ended)

    def _leave(self) -> None:
        """All is well: nobody shall look for a store that goes with the process of this rank."""
        if self.keeper != self.rank:
            self.store.add("left", 1)
            return
        self.store.set("over", "")
        end = time.monotonic() + 2 * self._interval
        while time.monotonic() < end and self.store.add("left", 0) < self.size - 1:
            time.sleep(self._interval / 50)

    def _watch(self, world: Callable[[], object]) -> None:
        """Answer questions of other ranks until the process group is gone or this process leaves."""
        while not self._over.wait(self._interval):
            if not dist.is_initialized() or dist.group.WORLD is not world():
                self.store = None
                return
            try:
                self._look(self.store)
            except RuntimeError:
                # The store is gone, and with it the rank that hosted it: the next collective will tell.
                self._gone = True
                return

    def _look(self, store: Any) -> None:
        for rank in tuple(self._asked_after):
            self._asked_after.discard(rank)
            if store.check([f"broke off/{rank}"]):
                self._broken_off[rank] = int(store.get(f"broke off/{rank}"))
        self._look_for_interrupt(store)
        if store.check(["asked"]):
            number = int(store.get("asked"))
            # Ranks that asked at the same moment wait for an answer each.
            for one in range(max(self._asked, number - _AT_ONCE) + 1, number + 1):
                store.set(f"answer/{one}/{self.rank}", _written(self._noted or Sign(self._now())))
                self._asked, self._answered_at = number, time.monotonic()
            if self.keeper not in (None, self.rank) and store.check([f"last/{self.keeper}"]):
                self._keepers = _read(store.get(f"last/{self.keeper}"))
        if self.keeper not in (None, self.rank) and store.check(["over"]):
            self._keepers = Sign("the end of its process", _ENDED)
            self._over.set()
            store.add("left", 1)

    def _look_for_interrupt(self, store: Any) -> None:
        """Hang up if this rank is in a step, or before one, in which another was interrupted, and stays there."""
        number, waiting = self.agreed, bool(self._doing) and not self.broke_off
        if waiting and store.check(["interrupted"]) and int(store.get("interrupted")) in (number, number - 1):
            # At the second look: what needs no answer of that rank may still come to its end.
            if self._waits_in_vain == number:
                self.hang_up()
            self._waits_in_vain = number
        else:
            self._waits_in_vain = None


def mark_told(interrupt: BaseException) -> None:
    """Mark an interrupt of which the other ranks know: they are told once."""
    vars(interrupt)[_TOLD] = True


_living: list[Signs] = []


def signs_of(world: dist.ProcessGroup) -> Signs:
    """This rank's signs of life in the job of this process group; with them begins the thread that gives them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1 or dist.get_backend(world).startswith("fake"):
        return Signs(rank, size)
    store: Any = world.get_group_store()
    found = Signs(rank, size, dist.PrefixStore("zerograph signs", store.clone()), _keeper(store))  # type: ignore[attr-defined]
    # Weakly: a group that is over shall take its threads along. And at once its store, a file perhaps whose folder is
    # about to go: torch looks whether it is there before it signs off in it, and aborts where it went in between.
    here = weakref.ref(world, lambda _: found._end())
    threading.Thread(target=found._watch, args=(here,), name="zerograph signs", daemon=True).start()
    if not _living:
        atexit.register(_leave)
    _living[:] = [found]
    return found


def _leave() -> None:
    for one in _living:
        if dist.is_initialized():
            one.leave()


def _keeper(store: Any) -> int | None:
    """The rank in whose process the store lives; None: that of the launcher, or on a disk."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not launchers else None  # type: ignore[attr-defined]


def _there(store: Any, keys: Mapping[int, str], ranks: Sequence[int]) -> list[int]:
    """Those whose key is there, found by halves: most are, and one question may be of many."""
    if not ranks or store.check([keys[rank] for rank in ranks]):
        return list(ranks)
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return _there(store, keys, ranks[:half]) + _there(store, keys, ranks[half:])


def _values(store: Any, keys: list[str]) -> list[bytes]:
    if not keys:
        return []
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]


def _written(sign: Sign) -> str:
    return json.dumps([sign.doing, sign.failed, sign.lost])


def _read(text: bytes) -> Sign:
    doing, failed, lost = json.loads(text)
    return Sign(doing, failed, tuple(lost))


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 1, 2, 5``."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))
