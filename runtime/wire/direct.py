"""Find the ranks of one host that can read each other's memory: one copy by the kernel, where a socket takes two.

Such an exchange does not overlap computation: on a CPU the copy takes a core's time on either side.
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
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.errors import ConfigError
from zerograph.ir.hosts import HostLayout
from zerograph.runtime.job.process_group import Job, explaining_failures
from zerograph.runtime.wire import cross_memory
from zerograph.runtime.wire.peer import Peer

T = TypeVar("T")

_VARIABLE = "ZEROGRAPH_WIRE"
_log = logging.getLogger("zerograph.collectives")


@dataclass(frozen=True, eq=False)
class HostGroup:
    """A process group whose ranks are all on this host.

    Attributes:
        rank: this rank's place in the group.
        peers: the other ranks by place; None at this rank's own.
    """

    rank: int
    peers: tuple[Peer | None, ...]

    def free_places(self) -> None:
        """Wait until another tensor can be announced to each peer.

        Raises:
            RuntimeError: a peer has ended or failed, or does not answer in time.
        """
        peers = [peer for _, peer in self.others()]
        # All ranks come here at the same exchange and wait for the others to read, so all read first.
        for peer in peers:
            peer.read(peer.place_taken_by())
        for peer in peers:
            peer.wait_read(peer.place_taken_by())

    def others(self) -> Iterator[tuple[int, Peer]]:
        """Yield the other places and peers, beginning before this rank, so that not all read the same rank first."""
        for step in range(1, len(self.peers)):
            place = (self.rank - step) % len(self.peers)
            peer = self.peers[place]
            assert peer is not None
            yield place, peer


@dataclass(frozen=True, eq=False)
class SpanningGroup:
    """A process group whose ranks are on several hosts, equally many on each, host by host.

    Attributes:
        group: the process group.
        host, hosts: this rank's host, and the number of hosts.
        local: the group's ranks on this host.
    """

    group: dist.ProcessGroup
    host: int
    hosts: int
    local: HostGroup

    def place(self, host: int, local: int) -> int:
        """Return the place in the process group of a rank of a host."""
        return host * len(self.local.peers) + local

    def other_hosts(self) -> list[int]:
        """Return the other hosts, beginning after this one, so that not all send to the same host first."""
        return [(self.host + step) % self.hosts for step in range(1, self.hosts)]


class DirectExchange(dist.Work):
    """An exchange in which each rank reads the others' memory.

    Args:
        outgoing, incoming: by place in the group, what is sent there and what is filled.
        adds: add what is received to ``incoming``.
    """

    def __init__(
        self, host_group: HostGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], adds: bool = False
    ) -> None:
        super().__init__()
        host_group.free_places()
        self._announcements = []
        for place, peer in host_group.others():
            # Both ranks announce once per exchange, so under the same number.
            number = peer.announce(outgoing[place])
            peer.expect(number, incoming[place], adds)
            self._announcements.append((peer, number))

    def wait(self, timeout: object = None) -> bool:
        """Read, then return when the others have read this rank's memory, which may then change.

        ``timeout`` is ignored: the peers' own limit holds.
        """
        for peer, number in self._announcements:
            peer.read(number)
        # All reads come first: with three ranks each would else wait for the next.
        for peer, number in self._announcements:
            peer.wait_unused(number)
        return True


@dataclass(frozen=True, eq=False)
class _HostGroups:
    """The host groups of a job.

    Attributes:
        groups: by mesh dimension; None where its ranks are on several hosts or cannot read each other's memory.
        everywhere: no rank has None, except along mesh dimensions of size 1. Equal on all ranks.
        layout: which ranks share a host.
        spanning: on a mesh of one dimension the group of all ranks, if each of several hosts has several of them.
    """

    groups: tuple[HostGroup | None, ...]
    everywhere: bool
    layout: HostLayout
    spanning: SpanningGroup | None = None


_by_job: WeakKeyDictionary[Job, _HostGroups] = WeakKeyDictionary()
# By the group itself: a destroyed world may have had a group of the same name, and its job may still be in memory.
_by_process_group: WeakKeyDictionary[dist.ProcessGroup, HostGroup] = WeakKeyDictionary()
_spanning: WeakKeyDictionary[dist.ProcessGroup, SpanningGroup] = WeakKeyDictionary()


def host_group(process_group: dist.ProcessGroup) -> HostGroup | None:
    """Return the host group of a process group; None if its ranks do not read each other's memory."""
    return _by_process_group.get(process_group)


def spanning_group(process_group: dist.ProcessGroup) -> SpanningGroup | None:
    """Return the spanning group of a process group; None if its ranks are not several on each of several hosts."""
    return _spanning.get(process_group)


def spans(job: Job) -> bool:
    """Return whether the ranks are several on each of several hosts, on a mesh of one dimension.

    Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return _host_groups(job).spanning is not None


def layout(job: Job) -> HostLayout | None:
    """Return which ranks share a host; None before :func:`host_groups`, :func:`everywhere` or :func:`spans`."""
    groups = _by_job.get(job)
    return None if groups is None else groups.layout


def host_groups(job: Job) -> tuple[HostGroup | None, ...]:
    """Return the host group of each mesh dimension, None where its ranks cannot read each other's memory.

    Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return _host_groups(job).groups


def everywhere(job: Job) -> bool:
    """Return whether the ranks of every group, other ranks' groups included, can read each other's memory.

    Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    return _host_groups(job).everywhere


def _host_groups(job: Job) -> _HostGroups:
    if job not in _by_job:
        _check_variable()
        with explaining_failures(job, "finding out which ranks share a host"):
            _by_job[job] = _connect(job)
        for process_group, group in zip(job.groups, _by_job[job].groups, strict=True):
            if group is not None:
                _by_process_group[process_group] = group
        if (spanning := _by_job[job].spanning) is not None:
            _spanning[job.groups[0]] = spanning
    return _by_job[job]


def _check_variable() -> None:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "sockets"):
        raise ConfigError(
            f"{_VARIABLE} is {value!r:.60}: there is only 'sockets'\n"
            "Without the variable, ranks of one host read each other's memory."
        )


def _connect(job: Job) -> _HostGroups:
    """Find the ranks that can read and write each other's memory, and let job notes use their mailboxes."""
    shared = job.channel.share((_host(), platform.node()))
    job.liveness.host_names = [name for _, name in shared]
    ranks_by_host = _ranks_by_host([host for host, _ in shared])
    host_ranks = next(ranks for ranks in ranks_by_host if job.rank in ranks)
    peers = {
        rank: Peer(rank, job.timeout, functools.partial(job.liveness.failed, rank))
        for rank in host_ranks
        if rank != job.rank
    }
    reached = _reach(job, peers)
    job.liveness.ended |= {rank: peers[rank].has_ended for rank in reached[job.rank]}

    def connected(ranks: Sequence[int]) -> bool:
        return all(reached[rank] >= set(ranks) - {rank} for rank in ranks)

    groups = tuple(
        HostGroup(ranks.index(job.rank), tuple(peers.get(rank) for rank in ranks))
        if len(ranks) > 1 and connected(ranks)
        else None
        for ranks in map(dist.get_process_group_ranks, job.groups)
    )
    grid = torch.tensor(job.grid, device="cpu")
    # Of all ranks: a row along each mesh dimension.
    rows = [row for dim in range(grid.dim()) for row in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()]
    spanning = None
    if all(map(connected, ranks_by_host)) and len(set(map(len, ranks_by_host))) == 1:
        place = host_ranks.index(job.rank)
        in_order = [rank for ranks in ranks_by_host for rank in ranks] == list(range(job.size))
        if in_order and grid.dim() == 1 and 1 < len(host_ranks) < job.size:
            local = HostGroup(place, tuple(peers.get(rank) for rank in host_ranks))
            spanning = SpanningGroup(job.groups[0], ranks_by_host.index(host_ranks), len(ranks_by_host), local)
        job.channel.use(peers, host_ranks, sorted(ranks[place] for ranks in ranks_by_host))
    # Where memory cannot be read across processes, the host's name says which ranks share one.
    names = [host or name for host, name in shared]
    layout = HostLayout(tuple(names.index(names[rank]) for rank in grid.flatten().tolist()), once=spanning is not None)
    return _HostGroups(groups, everywhere=all(map(connected, rows)), layout=layout, spanning=spanning)


def _reach(job: Job, peers: Mapping[int, Peer]) -> list[set[int]]:
    """Return for each rank the ranks whose memory it can read and write. Every rank must call it.

    Args:
        peers: the other ranks of this host.
    """
    # A number that another process is unlikely to hold at this address.
    nonce = torch.tensor([int.from_bytes(os.urandom(7))], device="cpu")
    # One word for each other rank to write: permission to read does not imply permission to write.
    probes = torch.zeros(job.size, dtype=torch.int64, device="cpu")
    inboxes = {rank: ctypes.addressof(peer.inbox) for rank, peer in peers.items()}
    addresses = job.channel.share((os.getpid(), nonce.data_ptr(), int(nonce), probes.data_ptr(), inboxes))
    reasons = {rank: _refusal(peer, job.rank, *addresses[rank]) for rank, peer in peers.items()}
    if refused := next(((rank, reason) for rank, reason in reasons.items() if reason is not None), None):
        _log.info("rank %d exchanges tensors over sockets, not through memory: rank %d: %s", job.rank, *refused)
    # Other ranks use ``nonce`` and ``probes`` until all have come here.
    return job.channel.share({rank for rank, reason in reasons.items() if reason is None})


def _ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host; a rank whose host is unknown is alone."""
    ranks: dict[str | int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host or rank, []).append(rank)
    return list(ranks.values())


def _host() -> str:
    """Return a text that is equal for processes that may read each other's memory; empty where that is impossible.

    A mailbox needs its words to be seen in the order in which they were written: x86-64 guarantees that.
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
    """Return why this process cannot read and write the peer's memory, or None. Containers and kernels may forbid it.

    Args:
        peer: the other rank.
        rank: this rank.
        pid: the other process.
        address: where that process holds ``nonce``. If another number is there, nothing is written.
        nonce: the number at ``address``.
        probes: where that process holds an int64 for each rank to write.
        inboxes: by rank the address of that rank's mailbox in the other process.
    """
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        peer.reach(pid, inboxes[rank])
        peer.copy(address, word)
        if int(word) != nonce:
            return f"process {pid} here is another process"
        probe = probes + rank * word.itemsize
        cross_memory.write(pid, [(probe, word.data_ptr(), word.nbytes)])
        peer.copy(probe, word.zero_())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None if int(word) == nonce else f"what was written to process {pid} is not there"
