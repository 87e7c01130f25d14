"""Collectives as exchanges between pairs of ranks: faster than gloo's own, which pass pieces on through threads.

Both start and return at once; ``_c10d_functional.wait_tensor`` waits for them as for torch's own. What an exchange
sends stays alive until then; a gather sends what is in its result already. Ranks of one host read each other's memory
(``direct``), others send and receive over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.runtime import direct
from zerograph.runtime.direct import Line

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
    """Reads what the others have out of their memory, once it is there; they read what this rank has for them."""

    def __init__(self, line: Line, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        super().__init__()
        line.free_places()
        self._parts = []
        for place, peer in line.others():
            # Both announce once in each exchange, so under the same number.
            number = peer.announce(outgoing[place])
            peer.expect(number, incoming[place])
            self._parts.append((peer, number))

    def wait(self, timeout: object = None) -> bool:
        """Read, and return when the others have, too: what they read may then be freed. Their own time limit holds."""
        for peer, number in self._parts:
            peer.read(number)
        # Not before all is read: of three ranks each would wait for the next.
        for peer, number in self._parts:
            peer.wait_read(number)
        return True


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
