"""Collectives as exchanges between pairs of ranks: faster than gloo's own, which pass pieces on through threads.

Both start and return at once; ``_c10d_functional.wait_tensor`` waits for them as for torch's own. What an exchange
sends stays alive until then; a gather sends what is in its result already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch
from zerograph._torch import OpOverload

_library = torch.library.Library("zerograph", "FRAGMENT")


def _gather_pieces(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start gathering: the shards of all ranks of the group, end to end along dimension 0."""
    whole = _gather_pieces_fake(shard, ranks, group_name)
    # It is sent from there, so that what was cast for the wire need not live as long as the flight.
    whole.chunk(ranks)[_torch.process_group(group_name).rank()].copy_(shard)
    return _begin(whole, ranks, group_name)


def _gather_pieces_fake(shard: Tensor, ranks: int, group_name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _gather_into(shard: Tensor, room: Tensor, ranks: int, group_name: str) -> Tensor:
    """The same into memory of which the shard is this rank's piece already."""
    return _begin(room, ranks, group_name)


def _begin(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start sending this rank's piece of what is to be whole, and receiving the others."""
    group = _torch.process_group(group_name)
    rank = group.rank()
    pieces = whole.chunk(ranks)
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        works.append(dist.irecv(pieces[sender], group=group, group_src=sender))
        works.append(dist.isend(pieces[rank], group=group, group_dst=receiver))
    _torch.register_works(whole, [work for work in works if work is not None])
    return whole


def _gather_into_fake(shard: Tensor, room: Tensor, ranks: int, group_name: str) -> Tensor:
    return room


def _exchange_pieces(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start sending each other rank its piece along dimension 0: those that the others send, (ranks - 1, *piece)."""
    group = _torch.process_group(group_name)
    rank = group.rank()
    pieces = whole.chunk(ranks)
    received = _exchange_pieces_fake(whole, ranks, group_name)
    works: list[dist.Work | None] = []
    for step in range(1, ranks):
        sender, receiver = (rank - step) % ranks, (rank + step) % ranks
        works.append(dist.irecv(received[step - 1], group=group, group_src=sender))
        works.append(dist.isend(pieces[receiver], group=group, group_dst=receiver))
    _torch.register_works(received, [work for work in works if work is not None])
    return received


def _exchange_pieces_fake(whole: Tensor, ranks: int, group_name: str) -> Tensor:
    return whole.new_empty((ranks - 1, whole.shape[0] // ranks, *whole.shape[1:]))


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
