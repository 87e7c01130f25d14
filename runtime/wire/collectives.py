"""Collectives as exchanges between pairs of ranks: faster than gloo's own, which hand pieces on through threads.

Each operator starts its exchange and returns at once; ``_c10d_functional.wait_tensor`` waits for it, as for torch's own
collectives. The memory that an exchange sends stays alive until then; a gather or a sum sends from its result. Ranks of
one host use its transport (``direct``), if it has one; others send and receive over gloo. Where each host has several
ranks, an exchange has two hops (``across_hosts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.ir.hosts import SMALL_SUM
from zerograph.ops import blocks
from zerograph.ops.blocks import Code, Codec
from zerograph.ops.definition import define, implement
from zerograph.ops.rows import exchange_rows, gather_rows, shift_rows
from zerograph.runtime.wire import across_hosts, direct

if TYPE_CHECKING:
    from zerograph.runtime.peer_memory.exchange import HostGroup

_SMALL = SMALL_SUM
# Time between two checks on the other ranks while this one waits for gloo.
_CHECK_EVERY = timedelta(seconds=1)


def _gather_pieces(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-gather along dimension 0: ``[n, *rest]`` on each rank to ``[ranks * n, *rest]``."""
    whole = _gather_pieces_fake(shard, ranks, group_name)
    # Sent from the result: a shard that was cast for the wire can be freed before the exchange ends.
    whole.chunk(ranks)[_torch.process_group(group_name).rank()].copy_(shard)
    return _gather_into(shard, whole, ranks, group_name)


def _gather_pieces_fake(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _gather_into(shard: Tensor, buffer: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-gather into a gather buffer, ``[ranks * n, *rest]``, of which the shard is this rank's piece."""
    pieces = buffer.chunk(ranks)
    group = _torch.process_group(group_name)
    own = pieces[group.rank()]
    if (hosts := direct.spanning_group(group)) is not None:
        _torch.register_works(buffer, [across_hosts.Gather(hosts, pieces)])
    else:
        _exchange(buffer, [own] * ranks, pieces, group_name)
    return buffer


def _gather_rows(part: Tensor, rows: Sequence[int], total: int, group_name: str) -> Tensor:
    """Start gathering parts of unequal length along dimension 0; ``rows`` has the length of each rank's part."""
    whole = part.new_empty((total, *part.shape[1:]))
    parts = list(whole.split(list(rows)))
    group = _torch.process_group(group_name)
    if group.name() == "gloo":
        rank = group.rank()
        parts[rank].copy_(part)
        _exchange(whole, [parts[rank]] * len(parts), parts, group_name)
    else:
        dist.all_gather(parts, part, group=group)
    return whole


def _exchange_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], shape: Sequence[int], group_name: str
) -> Tensor:
    """Start an all-to-all of pieces of unequal size.

    Args:
        x: the pieces for all ranks one after the other, in contiguous memory.
        sent: number of elements for each rank.
        received: number of rows from each rank, along dimension 0 of the result.
        shape: shape of the result.
    """
    group, result = _torch.process_group(group_name), x.new_empty(shape)
    incoming = [piece.view(-1) for piece in result.split(list(received))]
    if group.name() == "gloo":
        outgoing = x.view(-1).split(list(sent))
        incoming[group.rank()].copy_(outgoing[group.rank()])
        _exchange(result, outgoing, incoming, group_name)
    else:
        counts = [piece.numel() for piece in incoming]
        work = dist.all_to_all_single(result.view(-1), x.view(-1), counts, list(sent), group=group, async_op=True)
        assert work is not None
        _torch.register_works(result, [work])
    return result


def _shift_rows(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start to send a contiguous tensor to the next rank and to receive one of its shape from the rank before."""
    rank = _torch.process_group(group_name).rank()
    sent, received = [0] * ranks, [0] * ranks
    sent[(rank + 1) % ranks], received[(rank - 1) % ranks] = x.numel(), x.shape[0]
    return _exchange_rows(x, sent, received, x.shape, group_name)


def _exchange_pieces(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-to-all of pieces along dimension 0, without the reduction of a reduce-scatter.

    Args:
        whole: ``[ranks * n, *rest]``; piece r goes to rank r.

    Returns:
        The pieces of the other ranks, ``[ranks - 1, n, *rest]``, beginning with the rank before this one.
    """
    rank = _torch.process_group(group_name).rank()
    received = _exchange_pieces_fake(whole, ranks, group_name)
    # Nothing comes from this rank itself: the index -1 that it gets is not used.
    incoming = [received[(rank - sender) % ranks - 1] for sender in range(ranks)]
    _exchange(received, whole.chunk(ranks), incoming, group_name)
    return received


def _exchange_pieces_fake(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    return whole.new_empty((ranks - 1, whole.shape[0] // ranks, *whole.shape[1:]))


def _reduce_pieces(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start a reduce-scatter along dimension 0 over several hosts: ``[ranks * n, *rest]`` to ``[n, *rest]``.

    The ranks of each host sum first, and wait for each other here.
    """
    hosts = direct.spanning_group(_torch.process_group(group_name))
    assert hosts is not None
    total = _reduce_pieces_fake(whole, ranks, group_name)
    _torch.register_works(total, [across_hosts.Reduction(hosts, whole, total)])
    return total


def _reduce_pieces_fake(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    return whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))


def _reduce_coded(
    whole: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype, ranks: int, group_name: str
) -> Tensor:
    """Start a reduce-scatter like :func:`_reduce_pieces` that codes the fp32 sums of each host's ranks."""
    hosts = direct.spanning_group(_torch.process_group(group_name))
    assert hosts is not None
    total = _reduce_coded_fake(whole, code, block, scales, dtype, ranks, group_name)
    codec = Codec(code, block, scales)
    _torch.register_works(total, [across_hosts.Reduction(hosts, whole.float(), total, codec)])
    return total


def _reduce_coded_fake(
    whole: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype, ranks: int, group_name: str
) -> Tensor:
    return whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]), dtype=dtype)


def _sum_ranks(part: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-reduce by sum. All ranks get the same bits."""
    return _sum_ranks_(part.clone(), ranks, group_name)


def _sum_ranks_(total: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-reduce by sum in the memory of the contiguous tensor."""
    group = _torch.process_group(group_name)
    host_group, hosts = direct.host_group(group), direct.spanning_group(group)
    if hosts is not None and total.nbytes > _SMALL:
        work: dist.Work = across_hosts.Sum(hosts, total.view(-1))
    elif host_group is not None and total.nbytes <= host_group.inline:
        work = _SumOfAll(host_group, total)
    elif host_group is not None and total.nbytes > _SMALL:
        work = _SumOfPieces(host_group, total.view(-1))
    else:
        all_reduce = dist.all_reduce(total, group=group, async_op=True)
        assert all_reduce is not None
        work = all_reduce if host_group is None else _CheckedWork(host_group, all_reduce)
    _torch.register_works(total, [work])
    return total


def _exchange(result: Tensor, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group_name: str) -> None:
    """Start to send a tensor to each other rank and to receive one from it; ``wait_tensor(result)`` waits for all.

    Args:
        outgoing: by place in the group the tensor to send there.
        incoming: by place in the group the tensor that its data fill.
    """
    group = _torch.process_group(group_name)
    if (host_group := direct.host_group(group)) is not None:
        _torch.register_works(result, [host_group.exchange(outgoing, incoming)])
        return
    rank, ranks = group.rank(), group.size()
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        # Both ranks know that a tensor is empty.
        if incoming[sender].numel():
            works.append(dist.irecv(incoming[sender], group=group, group_src=sender))
        if outgoing[receiver].numel():
            works.append(dist.isend(outgoing[receiver], group=group, group_dst=receiver))
    _torch.register_works(result, [work for work in works if work is not None])


class _SumOfAll(dist.Work):
    """A sum in which each rank receives every rank's tensor and adds them in rank order: the same bits on each."""

    def __init__(self, host_group: HostGroup, total: Tensor) -> None:
        super().__init__()
        self._rank, self._total = host_group.rank, total
        self._parts = list(total.new_empty((host_group.size, *total.shape)))  # [ranks][*shape]
        self._exchange = host_group.exchange([total] * host_group.size, self._parts)

    def wait(self, timeout: object = None) -> bool:
        """Return when the sum is complete."""
        self._exchange.wait()
        self._parts[self._rank].copy_(self._total)
        self._total.copy_(self._parts[0])
        for part in self._parts[1:]:
            self._total.add_(part)
        return True


class _SumOfPieces(dist.Work):
    """A sum in which each rank sums one piece, then reads the other ranks' sums."""

    def __init__(self, host_group: HostGroup, total: Tensor) -> None:
        super().__init__()
        self._host_group, self._pieces = host_group, total.tensor_split(host_group.size)
        self._own = [self._pieces[host_group.rank]] * host_group.size
        self._reduction = host_group.exchange(self._pieces, self._own, adds=True)

    def wait(self, timeout: object = None) -> bool:
        """Return when the sum is complete and the others have read this rank's piece."""
        return self._reduction.wait() and self._host_group.exchange(self._own, self._pieces).wait()


class _CheckedWork(dist.Work):
    """A collective of gloo's whose wait checks on the others: gloo waits for a failed rank as for a slow one."""

    def __init__(self, host_group: HostGroup, work: dist.Work) -> None:
        super().__init__()
        self._host_group, self._work = host_group, work

    def wait(self, timeout: object = None) -> bool:
        """Return when the collective is complete. ``timeout`` is ignored: the group's own limit holds."""
        while True:
            try:
                return self._work.wait(_CHECK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    # It failed, or it completed a moment later after all.
                    return self._work.wait()
            self._host_group.check_going_on()


def _define(
    name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], takes: str = "Tensor x", returns: str = "Tensor"
) -> OpOverload:
    operator = define(name, f"({takes}, int ranks, str group_name) -> {returns}", None, fake)
    implement(operator, run, "CPU")
    return operator


implement(gather_rows, _gather_rows, "CPU", "CUDA")
implement(exchange_rows, _exchange_rows, "CPU", "CUDA")
implement(shift_rows, _shift_rows, "CPU", "CUDA")
gather_pieces = _define("gather_pieces", _gather_pieces, _gather_pieces_fake)
gather_into = _define(
    "gather_into",
    _gather_into,
    lambda shard, buffer, *_: buffer,
    takes="Tensor shard, Tensor(a!) buffer",
    returns="Tensor(a!)",
)
exchange_pieces = _define("exchange_pieces", _exchange_pieces, _exchange_pieces_fake)
reduce_pieces = _define("reduce_pieces", _reduce_pieces, _reduce_pieces_fake)
reduce_coded = _define(
    "reduce_coded", _reduce_coded, _reduce_coded_fake, takes=f"Tensor x, {blocks.CODEC}, ScalarType dtype"
)
sum_ranks = _define("sum_ranks", _sum_ranks, lambda part, *_: torch.empty_like(part))
sum_ranks_ = _define("sum_ranks_", _sum_ranks_, lambda total, *_: total, takes="Tensor(a!) x", returns="Tensor(a!)")
