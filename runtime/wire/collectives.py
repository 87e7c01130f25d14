"""Collectives as exchanges between pairs of ranks: faster than gloo's own, which pass pieces on through threads.

All start and return at once; ``_c10d_functional.wait_tensor`` waits for them as for torch's own. What an exchange
sends stays alive until then; a gather or a sum sends what is in its result already. Ranks of one host read each other's
memory (``direct``), others send and receive over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.runtime.wire import direct
from zerograph.runtime.wire.direct import Line
from zerograph.runtime.wire.peer import INLINE

# Up to so many bytes gloo's own sum is about as fast.
_SMALL = 2**18
# Number of times per wait that a rank waiting for gloo checks on the others.
_LOOK_EVERY = timedelta(seconds=1)

_library = torch.library.Library("zerograph", "FRAGMENT")


def _gather_pieces(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start gathering: the shards of all ranks of the group, end to end along dimension 0."""
    whole = _gather_pieces_fake(shard, ranks, group_name)
    # It is sent from there, so that what was cast for the wire need not live as long as the flight.
    whole.chunk(ranks)[_torch.process_group(group_name).rank()].copy_(shard)
    return _gather_into(shard, whole, ranks, group_name)


def _gather_pieces_fake(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _gather_into(shard: Tensor, room: Tensor, ranks: int, group_name: str) -> Tensor:
    """The same into memory of which the shard is this rank's piece already."""
    rank = _torch.process_group(group_name).rank()
    pieces = room.chunk(ranks)
    _begin(room, [pieces[rank]] * ranks, pieces, group_name)
    return room


def _gather_into_fake(shard: Tensor, room: Tensor, ranks: int, group_name: str) -> Tensor:
    return room


def _exchange_pieces(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start sending each other rank its piece along dimension 0: those that the others send, (ranks - 1, *piece)."""
    rank = _torch.process_group(group_name).rank()
    received = _exchange_pieces_fake(whole, ranks, group_name)
    # The one behind this rank in the circle comes first; nothing comes from this rank itself.
    incoming = [received[(rank - sender) % ranks - 1] for sender in range(ranks)]
    _begin(received, whole.chunk(ranks), incoming, group_name)
    return received


def _exchange_pieces_fake(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    return whole.new_empty((ranks - 1, whole.shape[0] // ranks, *whole.shape[1:]))


def _sum_ranks(part: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start summing what the ranks have, of the same bits on each."""
    return _sum_ranks_(part.clone(), ranks, group_name)


def _sum_ranks_fake(part: Tensor, ranks: int, group_name: str) -> Tensor:
    return torch.empty_like(part)


def _sum_ranks_(total: Tensor, ranks: int, group_name: str) -> Tensor:
    """The same in the contiguous tensor's own memory."""
    line = direct.line(group_name)
    if line is not None and total.nbytes <= INLINE:
        work: dist.Work = _SumOfAll(line, total)
    elif line is not None and total.nbytes > _SMALL:
        work = _SumOfPieces(line, total.view(-1))
    else:
        started = dist.all_reduce(total, group=_torch.process_group(group_name), async_op=True)
        assert started is not None
        work = started if line is None else _Watched(line, started)
    _torch.register_works(total, [work])
    return total


def _sum_ranks_in_place_fake(total: Tensor, ranks: int, group_name: str) -> Tensor:
    return total


def _begin(result: Tensor, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group_name: str) -> None:
    """Start sending each other rank what there is for it and receiving what it has, both by its place in the group."""
    if (line := direct.line(group_name)) is not None:
        _torch.register_works(result, [_Reading(line, outgoing, incoming)])
        return
    group = _torch.process_group(group_name)
    rank, ranks = group.rank(), group.size()
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        works.append(dist.irecv(incoming[sender], group=group, group_src=sender))
        works.append(dist.isend(outgoing[receiver], group=group, group_dst=receiver))
    _torch.register_works(result, [work for work in works if work is not None])


class _Reading(dist.Work):
    """Reads what the others have out of their memory, once it is there; they read what this rank has for them.

    Both by place in the group. What comes in fills what there is for it, or adds to it.
    """

    def __init__(self, line: Line, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], adds: bool = False) -> None:
        super().__init__()
        line.free_places()
        self._parts = []
        for place, peer in line.others():
            # Both announce once in each exchange, so under the same number.
            number = peer.announce(outgoing[place])
            peer.expect(number, incoming[place], adds)
            self._parts.append((peer, number))

    def wait(self, timeout: object = None) -> bool:
        """Read, and return when the others have, too: what they read may then be freed. Their own time limit holds."""
        for peer, number in self._parts:
            peer.read(number)
        # Not before all is read: of three ranks each would wait for the next.
        for peer, number in self._parts:
            peer.wait_unused(number)
        return True


class _SumOfAll(dist.Work):
    """Each rank gets all that the others have, and sums it in the order of the ranks: the same bits on each."""

    def __init__(self, line: Line, total: Tensor) -> None:
        super().__init__()
        self._rank, self._total = line.rank, total
        self._parts = list(total.new_empty((len(line.peers), *total.shape)))  # [ranks][*shape]
        self._reading = _Reading(line, [total] * len(line.peers), self._parts)

    def wait(self, timeout: object = None) -> bool:
        """Return when the sum is complete."""
        self._reading.wait()
        self._parts[self._rank].copy_(self._total)
        self._total.copy_(self._parts[0])
        for part in self._parts[1:]:
            self._total.add_(part)
        return True


class _SumOfPieces(dist.Work):
    """Each rank sums its piece, then reads the others' sums."""

    def __init__(self, line: Line, total: Tensor) -> None:
        super().__init__()
        self._line, self._pieces = line, total.tensor_split(len(line.peers))
        self._own = [self._pieces[line.rank]] * len(line.peers)
        self._adding = _Reading(line, self._pieces, self._own, adds=True)

    def wait(self, timeout: object = None) -> bool:
        """Return when the others have read, too."""
        return self._adding.wait() and _Reading(self._line, self._own, self._pieces).wait()


class _Watched(dist.Work):
    """A collective of gloo's, which would wait for a rank that has failed and lives as long as for one that is slow."""

    def __init__(self, line: Line, work: dist.Work) -> None:
        super().__init__()
        self._line, self._work = line, work

    def wait(self, timeout: object = None) -> bool:
        """Return when it is done. Its own time limit holds."""
        while True:
            try:
                return self._work.wait(_LOOK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    # Failed; or done a moment after all.
                    return self._work.wait()
            for _, peer in self._line.others():
                peer.check_going_on()


def _defined(
    name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], takes: str = "Tensor x", gives: str = "Tensor"
) -> OpOverload:
    _library.define(f"{name}({takes}, int ranks, str group_name) -> {gives}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"zerograph::{name}", fake, lib=_library)
    found: OpOverload = getattr(torch.ops.zerograph, name).default
    return found


gather_pieces = _defined("gather_pieces", _gather_pieces, _gather_pieces_fake)
gather_into = _defined(
    "gather_into", _gather_into, _gather_into_fake, takes="Tensor shard, Tensor(a!) room", gives="Tensor(a!)"
)
exchange_pieces = _defined("exchange_pieces", _exchange_pieces, _exchange_pieces_fake)
sum_ranks = _defined("sum_ranks", _sum_ranks, _sum_ranks_fake)
sum_ranks_ = _defined("sum_ranks_", _sum_ranks_, _sum_ranks_in_place_fake, takes="Tensor(a!) x", gives="Tensor(a!)")
