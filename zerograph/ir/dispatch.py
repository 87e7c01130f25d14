"""Exchange of tokens between ranks that split the experts: each token goes to the ranks of its experts, and back.

``dispatch`` gives every group of experts the tokens, ``combine`` adds what the groups made of them; each is the
gradient of the other. Where tokens are split over ranks and groups too, both are two rounds of an all-to-all. In the
first, a rank sends each other rank equally many rows, its capacity. The second has the rows above the capacity of the
ranks, and is left out if there are none. All ranks know the experts of all tokens, so they agree on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerograph.ir.alias import WAIT
from zerograph.ir.attention import define
from zerograph.ir.rows import exchange_rows


def capacity(tokens: int, choices: int, experts: int, ranks: int, factor: float) -> int:
    """Return the number of rows that a rank sends each rank in the first round.

    Args:
        tokens: number of tokens of a rank.
        choices: number of experts of a token.
        experts: number of experts of all ranks.
        ranks: number of ranks.
        factor: times the tokens that have an expert of one rank if routing is even.
    """
    others = experts - experts // ranks
    share = 1 - math.comb(others, choices) / math.comb(experts, choices)
    return min(tokens, math.ceil(factor * share * tokens))


class _Routes:
    """Which rank gets which tokens.

    Attributes:
        number: place of each token among the tokens that its rank sends to a rank [source, tokens, destination].
        sent: whether the token is sent there [source, tokens, destination].
    """

    def __init__(self, ids: Tensor, experts: int, ranks: int) -> None:
        owners = torch.div(ids, experts // ranks, rounding_mode="floor")  # [all tokens, choices]
        sent = (owners.unsqueeze(-1) == torch.arange(ranks, device=ids.device)).any(1)
        self.sent = sent.view(ranks, -1, ranks)
        self.number = self.sent.cumsum(1) - 1

    def first(self, limit: int) -> Tensor:
        """Return the first ``limit`` tokens that each rank sends to each, and any others if there are fewer.

        Shape [source, destination, limit]; tokens are counted in their rank.
        """
        return self.sent.logical_not().byte().sort(dim=1, stable=True).indices[:, :limit].transpose(1, 2)

    def rest(self, limit: int) -> list[list[int]] | None:
        """Return the number of tokens above the limit from each rank to each; None without any. Wait for ``ids``."""
        counts = (self.sent.sum(1) - limit).clamp(min=0).tolist()
        return counts if any(map(any, counts)) else None


@torch.library.custom_op("zerograph::dispatch", mutates_args=())
def dispatch(x: Tensor, ids: Tensor, groups: int, experts: int) -> Tensor:
    """Give each group of experts its tokens: [groups, tokens, width]. Rows of tokens of other groups are any numbers.

    Args:
        x: tokens [tokens, width].
        ids: number of each expert that a token goes to [tokens, choices].
        groups: number of groups.
        experts: number of experts of all ranks.
    """
    return x.expand(groups, *x.shape).clone()


@torch.library.custom_op("zerograph::combine", mutates_args=())
def combine(rows: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Return the sum over groups [tokens, width] of ``rows`` [groups, tokens, width].

    Rows of tokens without an expert in the group are zero.
    """
    return rows.sum(0)


@torch.library.custom_op("zerograph::gather_ids", mutates_args=())
def gather_ids(ids: Tensor) -> Tensor:
    """Return the experts of all tokens [tokens, choices], in the order in which ``dispatch`` has their rows.

    Ranks gather them inside of it. In a micro-batch these are the tokens that all ranks have in it, which are no slice
    of the batch: no boxing may gather them.
    """
    return ids.clone()


@gather_ids.register_fake
def _(ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape)


@dispatch.register_fake
def _(x: Tensor, ids: Tensor, groups: int, experts: int) -> Tensor:
    return x.new_empty((groups, *x.shape))


@combine.register_fake
def _(rows: Tensor, ids: Tensor, experts: int) -> Tensor:
    return rows.new_empty(rows.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, *_ = inputs
    ctx.groups, ctx.experts = x.shape[0], inputs[-1]
    ctx.save_for_backward(ids)


def _backward_of_dispatch(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return combine(gradient, ids, ctx.experts), None, None, None


def _backward_of_combine(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return dispatch(gradient, ids, ctx.groups, ctx.experts), None, None


dispatch.register_autograd(_backward_of_dispatch, setup_context=_save)
combine.register_autograd(_backward_of_combine, setup_context=_save)


class _Place(NamedTuple):
    """Arguments of each operator of an exchange.

    Attributes:
        rank: this rank.
        ranks: number of ranks.
        experts: number of experts of all ranks.
        limit: the capacity.
        group: name of the process group; empty for operators that send nothing.
    """

    rank: int
    ranks: int
    experts: int
    limit: int
    group: str = ""


def _pack_dispatched(x: Tensor, ids: Tensor, *numbers: Any) -> Tensor:
    """Return the rows that this rank sends in the first round [ranks * capacity, width].

    Args:
        x: tokens of this rank [tokens, width].
        ids: experts of the tokens of all ranks [all tokens, choices].
        numbers: see :class:`_Place`.
    """
    place = _Place(*numbers)
    return x[_Routes(ids, place.experts, place.ranks).first(place.limit)[place.rank].flatten()]


def _unpack_dispatched(received: Tensor, x: Tensor, ids: Tensor, *numbers: Any) -> Tensor:
    """Return a row for each token of all ranks [1, all tokens, width], zero for those of other groups.

    Args:
        received: the rows of the first round.
        x, ids, numbers: as for :func:`_pack_dispatched`.
    """
    place = _Place(*numbers)
    rank, ranks, limit = place.rank, place.ranks, place.limit
    routes = _Routes(ids, place.experts, ranks)
    number, sent = routes.number[..., rank], routes.sent[..., rank]  # [source, tokens]
    places = number.clamp(0, limit - 1) + limit * torch.arange(ranks, device=ids.device).unsqueeze(1)
    result = received[places.flatten()].masked_fill_(~(sent & (number < limit)).view(-1, 1), 0)
    if (counts := routes.rest(limit)) is not None:
        late = routes.sent & (routes.number >= limit)
        own = torch.cat([x[late[rank, :, other]] for other in range(ranks)])
        arrived = _exchanged(own, counts[rank], [row[rank] for row in counts], place.group)
        result.index_copy_(0, late[..., rank].flatten().nonzero().squeeze(1), arrived)
    return result.unsqueeze(0)


def _pack_combined(rows: Tensor, ids: Tensor, *numbers: Any) -> Tensor:
    """Return the rows that this rank sends back in the first round [ranks * capacity, width].

    Args:
        rows: a row for each token of all ranks [1, all tokens, width].
        ids, numbers: as for :func:`_pack_dispatched`.
    """
    place = _Place(*numbers)
    first = _Routes(ids, place.experts, place.ranks).first(place.limit)[:, place.rank]  # [rank of the token, capacity]
    begins = len(ids) // place.ranks * torch.arange(place.ranks, device=ids.device)
    return rows[0, (first + begins.unsqueeze(1)).flatten()]


def _unpack_combined(received: Tensor, rows: Tensor, ids: Tensor, *numbers: Any) -> Tensor:
    """Return the sum of the rows of each of this rank's tokens, in the order of the ranks that they are from.

    Args:
        received: the rows of the first round.
        rows, ids, numbers: as for :func:`_pack_combined`.
    """
    place = _Place(*numbers)
    rank, ranks, limit = place.rank, place.ranks, place.limit
    routes, tokens = _Routes(ids, place.experts, ranks), len(ids) // ranks
    number, late = routes.number[rank], routes.sent & (routes.number >= limit)
    in_time = routes.sent[rank] & (number < limit)  # [tokens, rank that sends]
    rest: Sequence[Tensor] = ()
    if (counts := routes.rest(limit)) is not None:
        own = rows[0][late[..., rank].flatten()]
        rest = _exchanged(own, [row[rank] for row in counts], counts[rank], place.group).split(counts[rank])
    result = received.new_zeros(tokens, received.shape[1])
    for other, part in enumerate(received.view(ranks, limit, -1)):
        row = part[number[:, other].clamp(0, limit - 1)]
        result += row.masked_fill_(~in_time[:, other].unsqueeze(1), 0)
        if rest:
            result.index_add_(0, late[rank, :, other].nonzero().squeeze(1), rest[other])
    return result


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Send rows to each rank, as many as ``sent`` says; return those that arrive."""
    width = rows.shape[1]
    arriving = exchange_rows(rows, [width * count for count in sent], received, [sum(received), width], group)
    arrived: Tensor = WAIT(arriving)
    return arrived


_NUMBERS = "int rank, int ranks, int experts, int limit"


def _packed(rows: Tensor, ids: Tensor, *numbers: Any) -> Tensor:
    place = _Place(*numbers)
    return rows.new_empty((place.ranks * place.limit, rows.shape[-1]))


_pack = "(Tensor rows, Tensor ids, " + _NUMBERS + ") -> Tensor"
_unpack = "(Tensor received, Tensor rows, Tensor ids, " + _NUMBERS + ", str group) -> Tensor"
# The operators in a graph, and those that exchange: pack the rows of the first round, and unpack them.
DISPATCH, COMBINE = torch.ops.zerograph.dispatch.default, torch.ops.zerograph.combine.default
GATHER_IDS = torch.ops.zerograph.gather_ids.default
PACK = {
    DISPATCH: define("pack_dispatched", _pack, _pack_dispatched, _packed),
    COMBINE: define("pack_combined", _pack, _pack_combined, _packed),
}
UNPACK = {
    DISPATCH: define(
        "unpack_dispatched",
        _unpack,
        _unpack_dispatched,
        lambda received, x, ids, *_: x.new_empty((1, len(ids), x.shape[1])),
    ),
    COMBINE: define(
        "unpack_combined",
        _unpack,
        _unpack_combined,
        lambda received, rows, ids, rank, ranks, *_: rows.new_empty((len(ids) // ranks, rows.shape[-1])),
    ),
}
