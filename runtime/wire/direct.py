"""Which ranks share a host and read each other's memory: one copy by the kernel, where a socket takes two, and its way.

Nothing here overlaps computation: on a CPU the copy takes a core's time on either side.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from zerograph.errors import ConfigError
from zerograph.runtime.job.process_group import Job, explained
from zerograph.runtime.wire import cross_memory
from zerograph.runtime.wire.peer import Peer

T = TypeVar("T")

_VARIABLE = "ZEROGRAPH_WIRE"
_log = logging.getLogger("zerograph.collectives")


@dataclass(frozen=True, eq=False)
class Line:
    """The ranks of one group, all on this host.

    Attributes:
        rank: this one's place among them.
        peers: the others, by their places; at this rank's own it is None.
    """

    rank: int
    peers: tuple[Peer | None, ...]

    def free_places(self) -> None:
        """Return when a further tensor can be announced to each of them.

        Raises:
            RuntimeError: one of them has ended or failed, or does not answer in time.
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


@dataclass(frozen=True, eq=False)
class _Connected:
    """What a job has found out.

    Attributes:
        lines: one for each mesh dimension, None where its ranks are on several hosts or may not read each other's
            memory.
        everywhere: none of any rank's is None, but where a mesh dimension is of one rank; equal on all ranks.
    """

    lines: tuple[Line | None, ...]
    everywhere: bool


_connected: WeakKeyDictionary[Job, _Connected] = WeakKeyDictionary()
_by_group: WeakValueDictionary[str, Line] = WeakValueDictionary()


def line(group_name: str) -> Line | None:
    """The line that runs over this group, if its ranks read each other's memory."""
    return _by_group.get(group_name)


def lines(job: Job) -> tuple[Line | None, ...]:
    """The line of each mesh dimension, if its ranks can read each other's memory. Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return _found(job).lines


def everywhere(job: Job) -> bool:
    """Whether in all lines, those of other ranks too, ranks can read each other's memory. Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return _found(job).everywhere


def _found(job: Job) -> _Connected:
    if job not in _connected:
        _check_asked()
        with explained(job, "finding out which ranks share a host"):
            _connected[job] = found = _connect(job)
        for name, one in zip(job.mesh.groups, found.lines, strict=True):
            # A name may have been that of a group of a world that is gone.
            _by_group.pop(name, None)
            if one is not None:
                _by_group[name] = one
    return _connected[job]


def _check_asked() -> None:
    asked = os.environ.get(_VARIABLE, "")
    if asked not in ("", "sockets"):
        raise ConfigError(f"{_VARIABLE} is {asked!r:.60}: there is only 'sockets'; unset, ranks of a host share memory")


def _connect(job: Job) -> _Connected:
    hosts = _told(job, _host())
    groups = [dist.get_process_group_ranks(group) for group in job.lines]
    near = [len(ranks) > 1 and {hosts[rank] for rank in ranks} == {hosts[job.rank]} != {""} for ranks in groups]
    shared_hosts = _ranks_by_host(hosts)
    here = next(ranks for ranks in shared_hosts if job.rank in ranks)
    peers = {
        rank: Peer(rank, job.timeout, functools.partial(job.signs.failed, rank)) for rank in here if rank != job.rank
    }
    # What a process that is not the one meant would hardly hold.
    nonce = torch.tensor([int.from_bytes(os.urandom(7))], device="cpu")
    # Each of the others writes into a word of its own: who may read need not be allowed to write.
    probes = torch.zeros(job.size, dtype=torch.int64, device="cpu")
    addresses = {rank: ctypes.addressof(peer.inbox) for rank, peer in peers.items()}
    told = _told(job, (os.getpid(), nonce.data_ptr(), int(nonce), probes.data_ptr(), addresses))
    reasons = {rank: _refusal(peer, job.rank, *told[rank]) for rank, peer in peers.items()}
    reached = {rank for rank, reason in reasons.items() if reason is None}
    job.signs.ended |= {rank: peers[rank].has_ended for rank in reached}
    if refused := next(((rank, reason) for rank, reason in reasons.items() if reason is not None), None):
        _log.info("rank %d exchanges tensors over sockets, not through memory: rank %d: %s", job.rank, *refused)
    mine = [shared and reached >= set(ranks) - {job.rank} for ranks, shared in zip(groups, near, strict=True)]
    told_mine = _told(job, (mine, reached == set(peers)))
    everybodys = [lines for lines, _ in told_mine]
    found = tuple(
        Line(ranks.index(job.rank), tuple(peers.get(rank) for rank in ranks))
        if all(everybodys[rank][dim] for rank in ranks)
        else None
        for dim, ranks in enumerate(groups)
    )
    all_near = all(one or size == 1 for told in everybodys for one, size in zip(told, job.mesh.shape, strict=True))
    if all(reached_all for _, reached_all in told_mine) and len(set(map(len, shared_hosts))) == 1:
        place = here.index(job.rank)
        job.notes.use(peers, here, sorted(ranks[place] for ranks in shared_hosts))
    return _Connected(found, all_near)


def _ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host; a rank whose host is unknown is alone."""
    ranks: dict[str | int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host or rank, []).append(rank)
    return list(ranks.values())


def _told(job: Job, mine: T) -> list[T]:
    """What every rank says; nobody is past this while another may still look at what was said before."""
    everybodys: list[Any] = [None] * job.size
    dist.all_gather_object(everybodys, mine, group=job.control)
    return everybodys


def _host() -> str:
    """What processes have in common that may be able to read each other's memory; empty where nobody can.

    The words of a mailbox must be seen in the order in which they were written: x86-64 promises that.
    """
    usable = platform.system() == "Linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
    if not usable or os.environ.get(_VARIABLE) == "sockets":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def _refusal(
    peer: Peer, rank: int, pid: int, address: int, nonce: int, probes: int, inboxes: Mapping[int, int]
) -> str | None:
    """Return why this process cannot read and write the other's memory: containers and kernels may forbid either.

    Args:
        address, nonce: where in the other process this number is. What is found elsewhere is not written to.
        probes: where in the other process there is a word for each rank.
    """
    seen = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        peer.reach(pid, inboxes[rank])
        peer.copy(address, seen)
        if int(seen) != nonce:
            return f"process {pid} here is another process"
        word = probes + rank * seen.itemsize
        cross_memory.write(pid, [(word, seen.data_ptr(), seen.nbytes)])
        peer.copy(word, seen.zero_())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None if int(seen) == nonce else f"what was written to process {pid} is not there"
