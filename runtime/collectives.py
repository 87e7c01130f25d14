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


class _Reading(dist.Work):
    """What this rank reads of others' tensors, once they are there; its own they read when they come to it."""

    def __init__(self, line: Line, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        super().__init__()
        line.free_places()
        self._parts = []
        for (_, peer), source, target in zip(line.others(), sources, targets, strict=True):
            # Both announce once in each exchange, so under the same number.
            number = peer.announce(source)
            peer.expect(number, target)
            self._parts.append((peer, number))

    def wait(self, timeout: object = None) -> bool:
        """Read, and return when the others have, too: what they read may then be freed. Their own time limit holds."""
        for peer, number in self._parts:
            peer.read(number)
        # Not before all is read: of three ranks each would wait for the next.
        for peer, number in self._parts:
            peer.wait_read(number)
        return True


def _gather_pieces(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start gathering: the shards of all ranks of the group, end to end along dimension 0."""
    group = _torch.process_group(group_name)
    rank = group.rank()
    whole = _gather_pieces_fake(shard, ranks, group_name)
    pieces = whole.chunk(ranks)
    # It is sent from there, so that what was cast for the wire need not live as long as the flight.
    pieces[rank].copy_(shard)
    if (line := direct.line(group_name)) is not None:
        others = [place for place, _ in line.others()]
        reading = _Reading(line, [pieces[rank]] * len(others), [pieces[place] for place in others])
        _torch.register_works(whole, [reading])
        return whole
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        works.append(dist.irecv(pieces[sender], group=group, group_src=sender))
        works.append(dist.isend(pieces[rank], group=group, group_dst=receiver))
    _torch.register_works(whole, [work for work in works if work is not None])
    return whole


def _gather_pieces_fake(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _exchange_pieces(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start sending each other rank its piece along dimension 0: those that the others send, (ranks - 1, *piece)."""
    group = _torch.process_group(group_name)
    rank = group.rank()
    pieces = whole.chunk(ranks)
    received = _exchange_pieces_fake(whole, ranks, group_name)
    if (line := direct.line(group_name)) is not None:
        others = [place for place, _ in line.others()]
        reading = _Reading(line, [pieces[place] for place in others], received.unbind())
        _torch.register_works(received, [reading])
        return received
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        works.append(dist.irecv(received[step - 1], group=group, group_src=sender))
        works.append(dist.isend(pieces[receiver], group=group, group_dst=receiver))
    _torch.register_works(received, [work for work in works if work is not None])
    return received


def _exchange_pieces_fake(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    return whole.new_empty((ranks - 1, whole.shape[0] // ranks, *whole.shape[1:]))


def _defined(name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> OpOverload:
    _library.define(f"{name}(Tensor x, int ranks, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"zerograph::{name}", fake, lib=_library)
    found: OpOverload = getattr(torch.ops.zerograph, name).default
    return found


gather_pieces = _defined("gather_pieces", _gather_pieces, _gather_pieces_fake)
exchange_pieces = _defined("exchange_pieces", _exchange_pieces, _exchange_pieces_fake)
