"""Another rank of this host, whose memory this one reads, and which reads this one's.

A rank announces the address of a tensor and goes on; the other rank reads the tensor when it waits, and confirms it.
Tensors of at most ``INLINE`` bytes and notes are written into the mailbox itself. Ranks write only into each other's
mailboxes, which live as long as the process, so a rank that fails leaves the memory of the others whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from zerograph.runtime.wire import cross_memory

# Tensors that a rank may have announced to another and not yet had read.
_SLOTS = 256
# Bytes read at once of what is added: they are still in a core's cache then.
_CACHED = 2**18
# 64-bit words of a mailbox, by slot: the address of an announced tensor, its bytes, its number; and the number of the
# last tensor of this rank's own that the other has read.
_ADDRESS, _BYTES, _NUMBER, _READ = range(0, 4 * _SLOTS, _SLOTS)
_WORD = 8
# A tensor of at most so many bytes is written into the mailbox, one place for each slot.
INLINE = 256
_INLINED = 4 * _SLOTS
# Two notes in turn, each some values and its number; then a word that is 1 once the other rank has hung up.
_VALUES = 3
_NOTES = _INLINED + _SLOTS * INLINE // _WORD
_HUNG_UP = _NOTES + 2 * (_VALUES + 1)
_WORDS = _HUNG_UP + 1

# Back-off: poll `_SPINS` times, then sleep `_NAP` x elapsed, clamped to [50 us, 1 ms].
_SPINS = 200
_NAP, _SHORTEST, _LONGEST = 0.02, 50e-6, 1e-3
# A process that has ended is seen after so many seconds; of one that has failed and lives others must ask the store.
_LOOK_AFTER = 0.02
_ASK_AFTER = 1.0

# Others write into them until they learn that this process is gone.
_mailboxes: list[ctypes.Array[ctypes.c_int64]] = []


class Peer:
    """Another rank of this host.

    Attributes:
        rank: its rank in the job.
        inbox: the mailbox that it writes into: announced tensors, confirmations, notes.
        failed: tells whether it is known to have left this step; the first call only starts to find out.
    """

    def __init__(self, rank: int, timeout: float, failed: Callable[[], bool]) -> None:
        self.rank, self.timeout, self.failed = rank, timeout, failed
        self.inbox = (ctypes.c_int64 * _WORDS)()
        self._hung_up = False
        _mailboxes.append(self.inbox)
        self._announced = 0
        self._kept: dict[int, Tensor] = {}
        self._due: dict[int, tuple[Tensor, bool]] = {}

    def reach(self, pid: int, inbox: int) -> None:
        """Know the other process, and where this rank's mailbox there is.

        Raises:
            OSError: there is no such process.
        """
        self._pid, self._its_inbox = pid, inbox
        self._ended = select.poll()
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)
        self._ended.register(self._handle, select.POLLIN)

    def place_taken_by(self) -> int:
        """The number of the tensor whose place in the mailboxes the next one takes, either way."""
        return self._announced + 1 - _SLOTS

    def announce(self, tensor: Tensor) -> int:
        """Let it read the contiguous tensor, and return the announcement's number, from 1 on.

        A tensor of more than :data:`INLINE` bytes is kept until it has been read, and must not change before.
        """
        self._announced += 1
        number, slot = self._announced, self._announced % _SLOTS
        words = (ctypes.c_int64 * 3)(tensor.data_ptr(), tensor.nbytes, number)
        here = ctypes.addressof(words)
        first = [(_ADDRESS + slot, here, _WORD)]
        if tensor.nbytes > INLINE:
            self._kept[number] = tensor
        elif tensor.nbytes:
            first = [(_INLINED + slot * INLINE // _WORD, tensor.data_ptr(), tensor.nbytes)]
        # The number last: who sees it may read the others.
        self._write([*first, (_BYTES + slot, here + _WORD, _WORD), (_NUMBER + slot, here + 2 * _WORD, _WORD)])
        return number

    def expect(self, number: int, into: Tensor, adds: bool = False) -> None:
        """What it announces under this number is to fill the contiguous tensor, or to be added to the 1-D one."""
        self._due[number] = into, adds

    def read(self, number: int) -> None:
        """Use the tensor of this number as was said, as soon as it is there, if that has not been done.

        Raises:
            RuntimeError: the other rank has ended or failed, does not answer in time, or announced something of another
                size.
        """
        if number not in self._due:
            return
        (into, adds), slot = self._due[number], number % _SLOTS
        self._until(lambda: self.inbox[_NUMBER + slot] == number)
        if self.inbox[_BYTES + slot] != into.nbytes:
            raise RuntimeError(f"rank {self.rank} sends {self.inbox[_BYTES + slot]} bytes, not {into.nbytes}")
        inline = into.nbytes <= INLINE
        if inline:
            self._take(slot, into, adds)
        else:
            (self._add if adds else self.copy)(self.inbox[_ADDRESS + slot], into)
        del self._due[number]
        # A process that sent its last tensor in the mailbox may have ended well since, and needs no confirmation.
        with contextlib.suppress(RuntimeError) if inline else contextlib.nullcontext():
            self._write_word(number, _READ + slot)

    def copy(self, address: int, into: Tensor) -> None:
        """Fill the contiguous tensor with what lies there in the other process.

        Raises:
            RuntimeError: it cannot be read.
        """
        cross_memory.read(self._pid, address, into.data_ptr(), into.nbytes)

    def _take(self, slot: int, into: Tensor, adds: bool) -> None:
        """Use the tensor that was written into the mailbox."""
        read = into.new_empty(into.shape) if adds else into
        if into.nbytes:
            ctypes.memmove(
                read.data_ptr(), ctypes.addressof(self.inbox) + _WORD * _INLINED + slot * INLINE, into.nbytes
            )
        if adds:
            into.add_(read)
        cross_memory.count_read(into.nbytes)

    def _add(self, address: int, into: Tensor) -> None:
        read = into.new_empty(_CACHED // into.itemsize)
        for place, part in enumerate(into.split(len(read))):
            there = read[: len(part)]
            self.copy(address + place * read.nbytes, there)
            part.add_(there)

    def wait_read(self, number: int) -> None:
        """Return when it has read the tensor of this number, which then is kept no longer.

        Raises:
            RuntimeError: the other rank has ended or failed, or does not answer in time.
        """
        if number > 0:
            self._until(lambda: self.inbox[_READ + number % _SLOTS] >= number)
            self._kept.pop(number, None)

    def wait_unused(self, number: int) -> None:
        """Return when the memory of the tensor of this number may change: at once if the mailbox has its copy.

        Raises:
            RuntimeError: the other rank has ended or failed, or does not answer in time.
        """
        if number in self._kept:
            self.wait_read(number)

    def send_note(self, number: int, values: Sequence[int]) -> None:
        """Write so many values under this number; they take the place of the note before the last.

        Raises:
            RuntimeError: the other rank has ended.
        """
        words = (ctypes.c_int64 * (_VALUES + 1))(*values, number)
        here, there = ctypes.addressof(words), _note(number)
        self._write([(there, here, _VALUES * _WORD), (there + _VALUES, here + _VALUES * _WORD, _WORD)])

    def receive_note(self, number: int) -> list[int]:
        """Return the values that it sends under this number, when they are there.

        Raises:
            RuntimeError: the other rank has ended, failed or hung up, or does not answer in time.
        """
        place = _note(number)
        self._until(lambda: self.inbox[place + _VALUES] == number or self._is_cut())
        if self._is_cut():
            whose = "this rank" if self._hung_up else f"rank {self.rank}"
            raise RuntimeError(f"{whose} has hung up")
        return self.inbox[place : place + _VALUES]

    def hang_up(self) -> None:
        """End the waiting for notes, now and later, on both sides."""
        self._hung_up = True
        with contextlib.suppress(RuntimeError):
            self._write_word(1, _HUNG_UP)

    def _is_cut(self) -> bool:
        return self._hung_up or bool(self.inbox[_HUNG_UP])

    def has_ended(self) -> bool:
        """Return whether its process has ended."""
        return bool(self._ended.poll(0))

    def check_going_on(self) -> None:
        """Raise if what it has not done by now it will not do.

        Raises:
            RuntimeError: the other rank has ended or failed.
        """
        self._check_alive()
        if self.failed():
            raise RuntimeError(f"rank {self.rank} has failed")

    def _write_word(self, value: int, word: int) -> None:
        source = ctypes.c_int64(value)
        self._write([(word, ctypes.addressof(source), _WORD)])

    def _write(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Write into its mailbox, in order: for each piece the word there, the address here, and the bytes."""
        self._check_alive()
        cross_memory.write(self._pid, [(self._its_inbox + _WORD * word, here, count) for word, here, count in pieces])

    def _check_alive(self) -> None:
        if self.has_ended():
            raise RuntimeError(f"the process of rank {self.rank} has ended")

    def _until(self, ready: Callable[[], bool]) -> None:
        for _ in range(_SPINS):
            if ready():
                return
            os.sched_yield()
        began = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - looked > _LOOK_AFTER:
                looked = now
                over = self.has_ended() or (now - began > _ASK_AFTER and self.failed())
                # What it wrote before it ended may have come since.
                if over and not ready():
                    self.check_going_on()
                if now - began > self.timeout:
                    raise RuntimeError(f"timed out after {self.timeout:g} seconds, waiting for rank {self.rank}")
            time.sleep(min(max(_NAP * (now - began), _SHORTEST), _LONGEST))


def _note(number: int) -> int:
    """Return the first word of the note of this number."""
    return _NOTES + number % 2 * (_VALUES + 1)
