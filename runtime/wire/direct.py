"""Find out which ranks share a host, and which of them exchange tensors by a transport of their own.

The transport is ``runtime.peer_memory``, if it is there. Its exchanges do not overlap computation: on a CPU the copy
takes a core's time on either side.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zerograph.ir.hosts import HostLayout
from zerograph.runtime.job.process_group import Job, explaining_failures

if TYPE_CHECKING:
    from zerograph.runtime.peer_memory.exchange import HostGroup


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
        return host * self.local.size + local

    def other_hosts(self) -> list[int]:
        """Return the other hosts, beginning after this one, so that not all send to the same host first."""
        return [(self.host + step) % self.hosts for step in range(1, self.hosts)]


@dataclass(frozen=True, eq=False)
class Hosts:
    """The hosts of a job.

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


_by_job: WeakKeyDictionary[Job, Hosts] = WeakKeyDictionary()
# By the group itself: a destroyed world may have had a group of the same name, and its job may still be in memory.
_by_process_group: WeakKeyDictionary[dist.ProcessGroup, HostGroup] = WeakKeyDictionary()
_spanning: WeakKeyDictionary[dist.ProcessGroup, SpanningGroup] = WeakKeyDictionary()


def host_group(process_group: dist.ProcessGroup) -> HostGroup | None:
    """Return the host group of a process group; None if its ranks do not read each other's memory."""
    return _by_process_group.get(process_group)


def spanning_group(process_group: dist.ProcessGroup) -> SpanningGroup | None:
    """Return the spanning group of a process group; None if its ranks are not several on each of several hosts."""
    return _spanning.get(process_group)


def layout(job: Job) -> HostLayout | None:
    """Return which ranks share a host; None before :func:`hosts`."""
    return None if job not in _by_job else _by_job[job].layout


def hosts(job: Job) -> Hosts:
    """Return the hosts of a job. Every rank must call it.

    Raises:
        CommunicationError: a rank did not answer.
    """
    if job not in _by_job:
        with explaining_failures(job, "finding out which ranks share a host"):
            _by_job[job] = _connect(job)
        for process_group, group in zip(job.groups, _by_job[job].groups, strict=True):
            if group is not None:
                _by_process_group[process_group] = group
        if (spanning := _by_job[job].spanning) is not None:
            _spanning[job.groups[0]] = spanning
    return _by_job[job]


def _connect(job: Job) -> Hosts:
    """Find the ranks that a transport joins, and let the job's channel use their mailboxes."""
    transport = _transport()
    shared = job.channel.share((None if transport is None else str(transport.host()), platform.node()))
    job.liveness.host_names = [name for _, name in shared]
    ranks_by_host = _ranks_by_host([host or "" for host, _ in shared])
    host_ranks = next(ranks for ranks in ranks_by_host if job.rank in ranks)
    # All ranks connect, or none does.
    connections = None if transport is None or (None in dict(shared)) else transport.connect(job, host_ranks)

    def joined(ranks: Sequence[int]) -> bool:
        return len(ranks) == 1 or (connections is not None and connections.joins(ranks))

    groups = tuple(
        connections.group(ranks) if connections is not None and len(ranks) > 1 and joined(ranks) else None
        for ranks in map(dist.get_process_group_ranks, job.groups)
    )
    grid = torch.tensor(job.grid, device="cpu")
    # Of all ranks: a row along each mesh dimension.
    rows = [row for dim in range(grid.dim()) for row in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()]
    spanning = None
    if connections is not None and all(map(joined, ranks_by_host)) and len(set(map(len, ranks_by_host))) == 1:
        place = host_ranks.index(job.rank)
        in_order = [rank for ranks in ranks_by_host for rank in ranks] == list(range(job.size))
        if in_order and grid.dim() == 1 and 1 < len(host_ranks) < job.size:
            local = connections.group(host_ranks)
            spanning = SpanningGroup(job.groups[0], ranks_by_host.index(host_ranks), len(ranks_by_host), local)
        job.channel.use(connections.peers, host_ranks, sorted(ranks[place] for ranks in ranks_by_host))
    # Where a host has no transport, its name says which ranks share it.
    names = [host or name for host, name in shared]
    layout = HostLayout(tuple(names.index(names[rank]) for rank in grid.flatten().tolist()), once=spanning is not None)
    return Hosts(groups, everywhere=all(map(joined, rows)), layout=layout, spanning=spanning)


def _transport() -> ModuleType | None:
    """Return the transport between ranks of a host; None where its folder has been removed."""
    if find_spec("zerograph.runtime.peer_memory") is None:
        return None
    from zerograph.runtime import peer_memory

    return peer_memory


def _ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host; a rank whose host is unknown is alone."""
    ranks: dict[str | int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host or rank, []).append(rank)
    return list(ranks.values())
