"""Which ranks share a host, and how many bytes of a collective leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing

# Bytes of a sum up to which it is not exchanged host by host: gloo's all-reduce is about as fast.
SMALL_SUM = 2**18


@dataclass(frozen=True)
class HostLayout:
    """The hosts of a job.

    Attributes:
        hosts: the number of the host of each rank of the mesh, in row-major order.
        once: gathers and reductions cross the wire once per host; see ``zerograph.runtime.wire.across_hosts``. Then the
            mesh has one dimension, and each host has equally many ranks that follow each other.
    """

    hosts: tuple[int, ...]
    once: bool = False


def hosts_of_equal_size(ranks: int, per_host: int) -> HostLayout:
    """Return the layout of ranks that are numbered host by host."""
    return HostLayout(tuple(rank // per_host for rank in range(ranks)), once=1 < per_host < ranks)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a collective: to ranks of its host, and to those of other hosts."""

    inside: float
    between: float


def traffic(boxing: Boxing, mesh: Mesh, layout: HostLayout | None) -> Traffic:
    """Return the bytes that this rank of the mesh sends in a collective.

    With H hosts of L ranks, ``once``, an all-gather or a reduce-scatter of M bytes sends M (H-1) / (H L) bytes to other
    hosts, and M (L-1) / L inside of the host. An all-reduce sends M (H-1) / L and 2 M (L-1) / L. Otherwise, and where
    error feedback codes each rank's part, a rank sends equally many bytes to each other rank, or all to the next one.
    """
    if layout is None or boxing.kind == "slice":
        return Traffic(boxing.sent, 0.0)
    if layout.once and boxing.kind == "all-reduce" and boxing.bytes > SMALL_SUM:
        hosts = len(set(layout.hosts))
        local = boxing.ranks // hosts
        return Traffic(2 * boxing.bytes * (local - 1) / local, boxing.bytes * (hosts - 1) / local)
    own_parts = boxing.reduced is not None and boxing.reduced.feedback
    if layout.once and boxing.kind in ("all-gather", "reduce-scatter") and not own_parts:
        hosts = len(set(layout.hosts))
        coded = boxing.bytes if (code := boxing.reduced or boxing.gathered) is None else code.bytes
        # Inside of a host sums are exact; gathers pass codes on.
        local_bytes = coded if boxing.reduced is None else boxing.bytes
        local = boxing.ranks // hosts
        return Traffic(local_bytes * (local - 1) / local, coded * (hosts - 1) / boxing.ranks)
    stride, own = math.prod(mesh.shape[boxing.dim + 1 :]), mesh.position[boxing.dim]
    first = mesh.rank - own * stride
    group = [layout.hosts[first + place * stride] for place in range(boxing.ranks)]
    if boxing.shifted:
        leaves = group[(own + 1) % boxing.ranks] != group[own]
        return Traffic(0.0, boxing.sent) if leaves else Traffic(boxing.sent, 0.0)
    between = boxing.sent * sum(host != group[own] for host in group) / max(boxing.ranks - 1, 1)
    return Traffic(boxing.sent - between, between)
