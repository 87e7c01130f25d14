"""Exchange tensors and notes with another rank of this host through each other's memory.

A rank announces the address of a tensor and goes on. The other rank reads the tensor when it waits for it, and confirms
that. Tensors of at most ``INLINE`` bytes and notes are written into the mailbox itself. Ranks write only into each
other's mailboxes, which outlive this rank's part in the job, so one that fails leaves the memory of the others intact.
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

from zerograph.runtime.job.channel import MAX_RANKS, MAX_SIZES
from zerograph.runtime.job.process_group import written_by_others
from zerograph.runtime.peer_memory import cross_memory

# Tensors announced to a peer that it has not read yet, at most.
_SLOTS = 256
# Bytes per read of a tensor that is added: they stay in a core's cache until the addition.
_CHUNK = 2**18
# Layout of a mailbox, in 64-bit words. For each slot: address, bytes and number of an announced tensor, and the number
# of the last tensor of the mailbox's owner that the peer has read.
_ADDRESS, _BYTES, _NUMBER, _READ = range(0, 4 * _SLOTS, _SLOTS)
_WORD = 8
# Bytes of the largest tensor that is written into the mailbox; each slot has memory for one.
INLINE = 256
_INLINED = 4 * _SLOTS
# Two notes, used alternately: values, then the note's number. Then a word that is 1 once the peer has hung up.
_VALUES = 3 + MAX_SIZES * MAX_RANKS
_NOTES = _INLINED + _SLOTS * INLINE // _WORD
_HUNG_UP = _NOTES + 2 * (_VALUES + 1)
_WORDS = _HUNG_UP + 1

# Back-off: poll `_SPINS` times, then sleep `_NAP` x elapsed, clamped to [50 us, 1 ms].
_SPINS = 200
_NAP, _SHORTEST, _LONGEST = 0.02, 50e-6, 1e-3
# Seconds between checks whether the peer's process has ended.
_CHECK_EVERY = 0.02
# Seconds of waiting before the store is asked whether a living peer has failed.
_ASK_AFTER = 1.0


class Peer:
    """Another rank of this host.

    Attributes:
        rank: its rank in the job.
        timeout: seconds until a wait for it is an error.
        inbox: the mailbox in this process that it writes announcements, confirmations and notes into.
        failed: returns whether it is known to have broken off this step; the first call only starts the inquiry.
    """

    def __init__(self, rank: int, timeout: float, failed: Callable[[], bool]) -> None:
        self.rank, self.timeout, self.failed = rank, timeout, failed
        self.inbox = (ctypes.c_int64 * _WORDS)()
        self._hung_up = False
        written_by_others.append(self.inbox)
        self._announced = 0
        self._kept: dict[int, Tensor] = {}
        self._expected: dict[int, tuple[Tensor, bool]] = {}

    def reach(self, pid: int, inbox: int) -> None:
        """Open a handle of the peer's process.

        Args:
            pid: the process.
            inbox: the address there of the mailbox that this rank writes into.

        Raises:
            OSError: there is no such process.
        """
        self._pid, self._outbox = pid, inbox
        self._ended = select.poll()
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)
        self._ended.register(self._handle, select.POLLIN)

    def place_taken_by(self) -> int:
        """Return the number of the tensor whose slot the next one takes, in both mailboxes."""
        return self._announced + 1 - _SLOTS

    def announce(self, tensor: Tensor) -> int:
        """Let the peer read a contiguous tensor.

        A tensor of more than :data:`INLINE` bytes is kept alive until it has been read, and must not change before.

        Returns:
            The number of the announcement, counted from 1.
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
        # The number last: a peer that sees it may read the other words.
        self._write([*first, (_BYTES + slot, here + _WORD, _WORD), (_NUMBER + slot, here + 2 * _WORD, _WORD)])
        return number

    def expect(self, number: int, into: Tensor, adds: bool = False) -> None:
        """Register where the peer's tensor of this number goes.

        Args:
            number: the announcement's number.
            into: a contiguous tensor to fill, or a 1-D tensor to add to.
            adds: add instead of filling.
        """
        self._expected[number] = into, adds

    def read(self, number: int) -> None:
        """Wait for the peer's tensor of this number and read it; return at once if that has been done.

        Raises:
            RuntimeError: the peer has ended, failed or hung up, does not answer in time, or announced a tensor of
                another size.
        """
        if number not in self._expected:
            return
        (into, adds), slot = self._expected[number], number % _SLOTS
        self._until(lambda: self.inbox[_NUMBER + slot] == number)
        if self.inbox[_BYTES + slot] != into.nbytes:
            raise RuntimeError(f"rank {self.rank} sends {self.inbox[_BYTES + slot]} bytes, not {into.nbytes}")
        inline = into.nbytes <= INLINE
        if inline:
            self._take(slot, into, adds)
        else:
            (self._add if adds else self.copy)(self.inbox[_ADDRESS + slot], into)
        del self._expected[number]
        # A peer that sent its last tensor inline may have ended normally since, and needs no confirmation.
        with contextlib.suppress(RuntimeError) if inline else contextlib.nullcontext():
            self._write_word(number, _READ + slot)

    def copy(self, address: int, into: Tensor) -> None:
        """Fill a contiguous tensor with the bytes at an address in the peer's process.

        Raises:
            RuntimeError: they cannot be read.
        """
        cross_memory.read(self._pid, address, into.data_ptr(), into.nbytes)

    def _take(self, slot: int, into: Tensor, adds: bool) -> None:
        """Read a tensor from its slot in the mailbox."""
        received = into.new_empty(into.shape) if adds else into
        if into.nbytes:
            ctypes.memmove(
                received.data_ptr(), ctypes.addressof(self.inbox) + _WORD * _INLINED + slot * INLINE, into.nbytes
            )
        if adds:
            into.add_(received)
        cross_memory.count_read(into.nbytes)

    def _add(self, address: int, into: Tensor) -> None:
        """Add the peer's tensor at an address to a 1-D tensor, chunk by chunk."""
        chunk = into.new_empty(_CHUNK // into.itemsize)
        for index, part in enumerate(into.split(len(chunk))):
            received = chunk[: len(part)]
            self.copy(address + index * chunk.nbytes, received)
            part.add_(received)

    def wait_read(self, number: int) -> None:
        """Wait until the peer has read this rank's tensor of this number, then drop the reference to it.

        Raises:
            RuntimeError: the peer has ended, failed or hung up, or does not answer in time.
        """
        if number > 0:
            self._until(lambda: self.inbox[_READ + number % _SLOTS] >= number)
            self._kept.pop(number, None)

    def wait_unused(self, number: int) -> None:
        """Wait until the memory of this rank's tensor may change: not at all if the mailbox has a copy.

        Raises:
            RuntimeError: the peer has ended, failed or hung up, or does not answer in time.
        """
        if number in self._kept:
            self.wait_read(number)

    def send_note(self, number: int, values: Sequence[int]) -> None:
        """Send a note of at most ``_VALUES`` integers; it replaces the note before the last.

        Raises:
            RuntimeError: the peer has ended.
        """
        words, count = (ctypes.c_int64 * (len(values) + 1))(*values, number), len(values)
        here, there = ctypes.addressof(words), _note(number)
        self._write([(there, here, count * _WORD), (there + _VALUES, here + count * _WORD, _WORD)])

    def receive_note(self, number: int, count: int) -> list[int]:
        """Wait for the peer's note of this number and return its first ``count`` values.

        Raises:
            RuntimeError: the peer has ended, failed or hung up, this rank has hung up, or there is no answer in time.
        """
        place = _note(number)
        self._until(lambda: self.inbox[place + _VALUES] == number or self._is_cut())
        self._check_not_cut()
        return self.inbox[place : place + count]

    def hang_up(self) -> None:
        """End all waits for notes and tensors that have not come, now and later, on both sides."""
        self._hung_up = True
        with contextlib.suppress(RuntimeError):
            self._write_word(1, _HUNG_UP)

    def _is_cut(self) -> bool:
        return self._hung_up or bool(self.inbox[_HUNG_UP])

    def _check_not_cut(self) -> None:
        if self._is_cut():
            whose = "this rank" if self._hung_up else f"rank {self.rank}"
            raise RuntimeError(f"{whose} has hung up")

    def has_ended(self) -> bool:
        """Return whether the peer's process has ended."""
        return bool(self._ended.poll(0))

    def check_going_on(self) -> None:
        """Raise if the peer will do nothing more in this step.

        Raises:
            RuntimeError: the peer has ended or failed, or one of both has hung up.
        """
        self._check_alive()
        self._check_not_cut()
        if self.failed():
            raise RuntimeError(f"rank {self.rank} has failed")

    def _write_word(self, value: int, word: int) -> None:
        source = ctypes.c_int64(value)
        self._write([(word, ctypes.addressof(source), _WORD)])

    def _write(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Write pieces into the peer's mailbox, in order: (word there, address here, bytes) of each."""
        self._check_alive()
        cross_memory.write(self._pid, [(self._outbox + _WORD * word, here, count) for word, here, count in pieces])

    def _check_alive(self) -> None:
        if self.has_ended():
            raise RuntimeError(f"the process of rank {self.rank} has ended")

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``; raise as :meth:`read` does."""
        for _ in range(_SPINS):
            if ready():
                return
            os.sched_yield()
        began = checked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - checked > _CHECK_EVERY:
                checked = now
                over = self.has_ended() or self._is_cut() or (now - began > _ASK_AFTER and self.failed())
                # What the peer wrote before it ended may have arrived since.
                if over and not ready():
                    self.check_going_on()
                if now - began > self.timeout:
                    raise RuntimeError(f"timed out after {self.timeout:g} seconds, waiting for rank {self.rank}")
            time.sleep(min(max(_NAP * (now - began), _SHORTEST), _LONGEST))


def _note(number: int) -> int:
    """Return the index of the first word of a note."""
    return _NOTES + number % 2 * (_VALUES + 1)
