"""Exchanges over several hosts that have several ranks each: over the wire once per host, inside a host by memory.

If each rank sent a piece to each rank of another host, the pieces of one host would go over the wire as often as the
other has ranks. Here the ranks of equal position on all hosts exchange over gloo. A gather sends this rank's piece, and
then hands on inside of the host what has come. A reduction sums inside of the host first; its ranks wait for each other
when it starts, since an exchange through memory does not overlap computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from zerograph.ops import blocks
from zerograph.ops.blocks import Codec
from zerograph.runtime.wire.direct import SpanningGroup


class Gather(dist.Work):
    """An all-gather.

    Args:
        pieces: by place in the group; this rank's own is filled already.
    """

    def __init__(self, hosts: SpanningGroup, pieces: Sequence[Tensor]) -> None:
        super().__init__()
        self._hosts, self._pieces = hosts, pieces
        own, local = self._of(hosts.host), hosts.local
        mine = own[local.rank]
        self._works = swap(
            hosts,
            dict.fromkeys(hosts.other_hosts(), mine),
            {host: self._of(host)[local.rank] for host in hosts.other_hosts()},
        )
        self._inside = local.exchange([mine] * len(own), own)

    def _of(self, host: int) -> list[Tensor]:
        """Return the pieces of a host's ranks."""
        return [self._pieces[self._hosts.place(host, local)] for local in range(self._hosts.local.size)]

    def wait(self, timeout: object = None) -> bool:
        """Return when all pieces are here. ``timeout`` is ignored: the limits of group and peers hold."""
        self._inside.wait()
        _wait(self._works)
        exchanges = []
        for host in sorted(self._hosts.other_hosts()):
            pieces = self._of(host)
            mine = pieces[self._hosts.local.rank]
            exchanges.append(self._hosts.local.exchange([mine] * len(pieces), pieces))
        for exchange in exchanges:
            exchange.wait()
        return True


class Reduction(dist.Work):
    """A reduce-scatter.

    Args:
        whole: ``[ranks * n, *rest]``; the piece r is summed at place r.
        total: memory of this rank's sum, ``[n, *rest]``.
        codec: how the sums of the ranks of each host are sent; None: as they are.
    """

    def __init__(self, hosts: SpanningGroup, whole: Tensor, total: Tensor, codec: Codec | None = None) -> None:
        super().__init__()
        self._total, self._codec, local = total.view(-1), codec, hosts.local
        pieces = whole.view(-1).chunk(hosts.hosts * local.size)
        others = hosts.other_hosts()
        # This host's part of the sums of other hosts' ranks, and theirs of this rank's sum.
        self._outgoing = dict(zip(others, whole.new_empty((len(others), len(self._total))), strict=True))
        self._incoming = dict(zip(others, whole.new_empty((len(others), len(self._total))), strict=True))
        # The sum begins with host 0's part, as in :class:`Sum`, so this host's own is kept apart on others.
        in_place = hosts.host == 0 and codec is None
        self._incoming[hosts.host] = self._total if in_place else whole.new_empty(len(self._total))
        sums = self._outgoing | {hosts.host: self._incoming[hosts.host]}
        exchanges = []
        for host in range(hosts.hosts):
            sent = [pieces[hosts.place(host, place)] for place in range(local.size)]
            sums[host].copy_(sent[local.rank])
            exchanges.append(local.exchange(sent, [sums[host]] * len(sent), adds=True))
        for exchange in exchanges:
            exchange.wait()
        if codec is not None:
            self._outgoing = {host: blocks.encode(part, *codec.arguments) for host, part in sums.items()}
            own = self._outgoing[hosts.host]
            self._codes = own.new_empty((hosts.hosts, len(own)))
            self._codes[hosts.host].copy_(own)
            self._incoming = dict(enumerate(self._codes))
        self._works = swap(hosts, self._outgoing, self._incoming)

    def wait(self, timeout: object = None) -> bool:
        """Return when the sum is complete. ``timeout`` is ignored: the group's own limit holds."""
        _wait(self._works)
        if self._codec is None:
            _add_in_order(self._total, self._incoming)
        else:
            self._total.copy_(blocks.sum_decoded(self._codes, *self._codec.arguments, self._total.dtype))
        return True


class Sum(dist.Work):
    """An all-reduce in the memory of a 1-D tensor: each rank of a host sums one piece over all ranks.

    All ranks get the same bits: the sum of each piece is computed once on each host, in the order of the hosts.
    """

    def __init__(self, hosts: SpanningGroup, total: Tensor) -> None:
        super().__init__()
        self._hosts, local = hosts, hosts.local
        self._pieces = total.tensor_split(local.size)
        self._own = self._pieces[local.rank]
        inside = local.exchange(self._pieces, [self._own] * len(self._pieces), adds=True)
        inside.wait()
        others = hosts.other_hosts()
        self._parts = {host: self._own.new_empty(self._own.shape) for host in others}
        # Sent from a copy: the sum is written where the part was.
        self._parts[hosts.host] = self._own.clone()
        self._works = swap(hosts, dict.fromkeys(others, self._parts[hosts.host]), self._parts)

    def wait(self, timeout: object = None) -> bool:
        """Return when the sum is complete. ``timeout`` is ignored: the limits of group and peers hold."""
        _wait(self._works)
        _add_in_order(self._own, self._parts)
        return self._hosts.local.exchange([self._own] * len(self._pieces), self._pieces).wait()


def swap(hosts: SpanningGroup, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[dist.Work]:
    """Start to exchange tensors with the ranks of this rank's position on other hosts, by host."""
    works: list[dist.Work | None] = []
    for host in hosts.other_hosts():
        place = hosts.place(host, hosts.local.rank)
        if outgoing[host].numel():
            works.append(dist.irecv(incoming[host], group=hosts.group, group_src=place))
            works.append(dist.isend(outgoing[host], group=hosts.group, group_dst=place))
    return [work for work in works if work is not None]


def _add_in_order(total: Tensor, parts: Mapping[int, Tensor]) -> None:
    """Write the sum of all hosts' parts, in the order of the hosts: the same bits on each host and in each exchange."""
    if parts[0] is not total:
        total.copy_(parts[0])
    for host in range(1, len(parts)):
        total.add_(parts[host])


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
