"""Another rank of this host, whose memory this one reads, and which reads this one's.

A rank says where a tensor lies that the other shall read, and goes on; the other reads it when it waits, and says so.
What they write into each other is only that: numbers in a mailbox, which lives as long as the process. So a rank that
fails leaves the memory of the others whole.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections.abc import Callable

from torch import Tensor

from zerograph.runtime.wire import cross_memory

# Tensors that a rank may have announced to another and not yet had read.
_SLOTS = 256
# Bytes read at once of what is added: they are still in a core's cache then.
_CACHED = 2**18
# 64-bit words of a mailbox, by slot: what was announced lies where, how long it is, under which number; and the number
# of the last one of this rank's own that the other has read.
_ADDRESS, _BYTES, _NUMBER, _READ = range(0, 4 * _SLOTS, _SLOTS)
_WORD = 8

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
        rank: of the job.
        inbox: what it writes: where its tensors lie, and which of this rank's it has read.
        failed: whether it is known not to go on with this step; asking makes it known, if it is so, within a second.
    """

    def __init__(self, rank: int, timeout: float, failed: Callable[[], bool]) -> None:
        self.rank, self.timeout, self.failed = rank, timeout, failed
        self.inbox = (ctypes.c_int64 * (4 * _SLOTS))()
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
        """Let it read the contiguous tensor, which is kept until then and must not change; its number, from 1 on."""
        self._announced += 1
        number, slot = self._announced, self._announced % _SLOTS
        self._kept[number] = tensor
        # The number last: who sees it may read the others.
        self._write(tensor.data_ptr(), _ADDRESS + slot)
        self._write(tensor.nbytes, _BYTES + slot)
        self._write(number, _NUMBER + slot)
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
        (self._add if adds else self.copy)(self.inbox[_ADDRESS + slot], into)
        del self._due[number]
        self._write(number, _READ + slot)

    def copy(self, address: int, into: Tensor) -> None:
        """Fill the contiguous tensor with what lies there in the other process.

        Raises:
            RuntimeError: it cannot be read.
        """
        cross_memory.read(self._pid, address, into.data_ptr(), into.nbytes)

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
        if number in self._kept:
            self._until(lambda: self.inbox[_READ + number % _SLOTS] >= number)
            del self._kept[number]

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

    def _write(self, value: int, word: int) -> None:
        self._check_alive()
        source = ctypes.c_int64(value)
        cross_memory.write(self._pid, self._its_inbox + _WORD * word, ctypes.addressof(source), _WORD)

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
