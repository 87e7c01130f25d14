"""Ranks on one host read each other's memory: one copy by the kernel, where a socket takes two and the way between.

Linux's cross memory attach (process_vm_readv(2)), as MPI libraries use it. A rank says where a tensor lies that others
shall read, keeps it until they have, and goes on; they read it when they wait. What ranks write into each other is only
that: three numbers in a mailbox, which lives as long as the process. So whoever fails leaves the others' memory whole.

Nothing here overlaps computation: on a CPU the copy takes a core's time, whoever makes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import select
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.runtime.process_group import Job, explained

T = TypeVar("T")

# Tensors that a rank may have announced to another and not yet had read.
_SLOTS = 256
# 64-bit words of a mailbox, by slot: what was announced lies where, how long it is, under which number; and the number
# of the last one of this rank's own that the other has read.
_ADDRESS, _BYTES, _NUMBER, _READ = range(0, 4 * _SLOTS, _SLOTS)
_WORD = 8

# One call moves less than two GiB.
_PIECE = 2**30

# Who waits looks so often, then sleeps so many seconds between looks; a process that has ended it sees after so many.
_SPINS = 200
_NAP = 50e-6
_LOOK_AFTER = 0.02

# Others write into them until they learn that this process is gone.
_mailboxes: list[ctypes.Array[ctypes.c_int64]] = []


# Whether what is announced may be written over as soon as its exchange has been waited for.
_reused = False


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Inside, an exchange is waited for until all have read: who runs the graph decides what lies where.

    A backend of the user's may plan memory as if a collective that was waited for were over. The two of our own let go
    of a tensor and never write over it.
    """
    global _reused
    before, _reused = _reused, True
    try:
        yield
    finally:
        _reused = before


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Peer:
    """Another rank of this host.

    Attributes:
        rank: of the job.
        inbox: what it writes: where its tensors lie, and which of this rank's it has read.
        bytes_read: out of its tensors, so far.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.inbox = (ctypes.c_int64 * (4 * _SLOTS))()
        _mailboxes.append(self.inbox)
        self.bytes_read = 0
        self._announced = 0
        self._kept: dict[int, Tensor] = {}
        self._due: dict[int, Tensor] = {}
        self._passed: list[int] = []

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

    def expect(self, number: int, into: Tensor) -> None:
        """What it announces under this number is to fill the contiguous tensor."""
        self._due[number] = into

    def read(self, number: int) -> None:
        """Fill what was given for the tensor of this number, as soon as that is there, if it has not been done.

        Raises:
            RuntimeError: the other process has ended, does not answer in time, or announced something of another size.
        """
        if number not in self._due:
            return
        into, slot = self._due[number], number % _SLOTS
        self._until(lambda: self.inbox[_NUMBER + slot] == number)
        if self.inbox[_BYTES + slot] != into.nbytes:
            raise RuntimeError(f"rank {self.rank} sends {self.inbox[_BYTES + slot]} bytes, not {into.nbytes}")
        self.copy(self.inbox[_ADDRESS + slot], into)
        del self._due[number]
        self._write(number, _READ + slot)
        self.bytes_read += into.nbytes

    def copy(self, address: int, into: Tensor) -> None:
        """Fill the contiguous tensor with what lies there in the other process.

        Raises:
            RuntimeError: it cannot be read.
        """
        for begin in range(0, into.nbytes, _PIECE):
            count = min(_PIECE, into.nbytes - begin)
            _move(_calls()[0], self._pid, into.data_ptr() + begin, address + begin, count)

    def passed(self, number: int) -> None:
        """This rank waits for nothing more of the exchange in which it announced that: those before are over.

        A bound on what is kept, and on how far one rank runs ahead of another. Nobody waits for himself: the other gets
        to where it reads what was announced before without anything that this rank has yet to do. (This one it reads
        while this rank computes on.)
        """
        for before in self._passed:
            self.wait_read(before)
        if _reused:
            self.wait_read(number)
        self._passed = [] if self._has_read(number) else [number]
        self.forget_read()

    def forget_read(self) -> None:
        """Let go of what it has read."""
        for number in [number for number in self._kept if self._has_read(number)]:
            del self._kept[number]

    def wait_read(self, number: int | None = None) -> None:
        """Return when it has read the tensor of this number, or all of them.

        Raises:
            RuntimeError: the other process has ended, or does not answer in time.
        """
        for one in [number] if number is not None else list(self._kept):
            if one in self._kept:
                self._until(functools.partial(self._has_read, one))
                del self._kept[one]

    def _has_read(self, number: int) -> bool:
        return self.inbox[_READ + number % _SLOTS] >= number

    def _write(self, value: int, word: int) -> None:
        self._check_alive()
        source = ctypes.c_int64(value)
        _move(_calls()[1], self._pid, ctypes.addressof(source), self._its_inbox + _WORD * word, _WORD)

    def _check_alive(self) -> None:
        if self._ended.poll(0):
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
                # What it wrote before it ended may have come since.
                if self._ended.poll(0) and not ready():
                    self._check_alive()
                if now - began > self.timeout:
                    raise RuntimeError(f"timed out after {self.timeout:g} seconds, waiting for rank {self.rank}")
            time.sleep(_NAP)


@dataclass(frozen=True, eq=False)
class Line:
    """The ranks of one group, all on this host.

    Attributes:
        rank: this one's place among them.
        peers: the others, by their places; at this rank's own it is None.
    """

    rank: int
    peers: tuple[Peer | None, ...]

    def make_room(self) -> None:
        """Return when a further tensor can be announced to each of them.

        Raises:
            RuntimeError: one of them has ended, or does not answer in time.
        """
        peers = [peer for _, peer in self.others()]
        # All come here at the same exchange, and each waits for the others to read: so all read first.
        for peer in peers:
            peer.read(peer.place_taken_by())
        for peer in peers:
            peer.wait_read(peer.place_taken_by())

    def others(self) -> Iterator[tuple[int, Peer]]:
        """The others with their places, beginning behind this rank: not all read the same one first."""
        for step in range(1, len(self.peers)):
            place = (self.rank - step) % len(self.peers)
            peer = self.peers[place]
            assert peer is not None
            yield place, peer


# By job one for each mesh dimension, None where its ranks are on several hosts or may not read each other's memory.
_connected: WeakKeyDictionary[Job, tuple[Line | None, ...]] = WeakKeyDictionary()
_by_group: WeakValueDictionary[str, Line] = WeakValueDictionary()


def line(group_name: str) -> Line | None:
    """The line that runs over this group, if its ranks read each other's memory."""
    return _by_group.get(group_name)


def lines(job: Job) -> tuple[Line | None, ...]:
    """The line of each mesh dimension, if its ranks can read each other's memory. Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    if job not in _connected:
        with explained(job, "finding out which ranks share a host"):
            _connected[job] = found = _connect(job)
        for name, one in zip(job.mesh.groups, found, strict=True):
            # A name may have been that of a group of a world that is gone.
            _by_group.pop(name, None)
            if one is not None:
                _by_group[name] = one
    return _connected[job]


def settle(job: Job) -> None:
    """Return when the others have read all that this rank announced in a step.

    Raises:
        RuntimeError: one of them has ended, or does not answer in time.
    """
    for one in _connected.get(job, ()):
        for _, peer in () if one is None else one.others():
            peer.wait_read()


def bytes_read(job: Job) -> int:
    """What this rank has read so far out of the others' memory."""
    found = (one for one in _connected.get(job, ()) if one is not None)
    return sum(peer.bytes_read for one in found for _, peer in one.others())


def _connect(job: Job) -> tuple[Line | None, ...]:
    hosts = _told(job, _host())
    groups = [dist.get_process_group_ranks(group) for group in job.lines]
    near = [len(ranks) > 1 and len({hosts[rank] for rank in ranks}) == 1 and bool(_host()) for ranks in groups]
    peers = {
        rank: Peer(rank, job.timeout)
        for ranks, shared in zip(groups, near, strict=True)
        for rank in ranks
        if shared and rank != job.rank
    }
    # What a process that is not the one meant would hardly hold.
    nonce = torch.randint(2**62, (1,))
    addresses = {rank: ctypes.addressof(peer.inbox) for rank, peer in peers.items()}
    told = _told(job, (os.getpid(), nonce.data_ptr(), int(nonce), addresses))
    reached = {rank for rank, peer in peers.items() if _reaches(peer, job.rank, *told[rank])}
    mine = [shared and reached >= set(ranks) - {job.rank} for ranks, shared in zip(groups, near, strict=True)]
    everybodys = _told(job, mine)
    return tuple(
        Line(ranks.index(job.rank), tuple(peers.get(rank) for rank in ranks))
        if all(everybodys[rank][dim] for rank in ranks)
        else None
        for dim, ranks in enumerate(groups)
    )


def _told(job: Job, mine: T) -> list[T]:
    """What every rank says; nobody is past this while another may still look at what was said before."""
    everybodys: list[Any] = [None] * job.size
    dist.all_gather_object(everybodys, mine, group=job.control)
    return everybodys


def _host() -> str:
    """What processes have in common that may be able to read each other's memory; empty where nobody can.

    A mailbox' words are seen in the order in which they were written: x86-64 promises it. Threads of one process, by
    which tests run several ranks, have no memory of their own to read.
    """
    usable = platform.system() == "Linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
    if not usable or os.environ.get("ZEROGRAPH_WIRE") == "sockets":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def _reaches(peer: Peer, rank: int, pid: int, address: int, nonce: int, inboxes: Mapping[int, int]) -> bool:
    """Whether it is there, and this process may read its memory: containers and kernels may forbid it."""
    seen = torch.zeros(1, dtype=torch.int64)
    try:
        peer.reach(pid, inboxes[rank])
        peer.copy(address, seen)
    except (OSError, RuntimeError):
        return False
    return int(seen) == nonce


def _move(call: Callable[..., int], pid: int, here: int, there: int, count: int) -> None:
    near, far = _Extent(here, count), _Extent(there, count)
    moved = call(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
    if moved != count:
        reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {count} bytes"
        raise RuntimeError(f"memory of process {pid} cannot be reached: {reason}")


@functools.cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]]:
    """The C library's process_vm_readv and process_vm_writev."""
    library = ctypes.CDLL(None, use_errno=True)
    number, extent = ctypes.c_ulong, ctypes.POINTER(_Extent)
    for call in (library.process_vm_readv, library.process_vm_writev):
        call.argtypes = (ctypes.c_int, extent, number, extent, number, number)
        call.restype = ctypes.c_ssize_t
    return library.process_vm_readv, library.process_vm_writev
