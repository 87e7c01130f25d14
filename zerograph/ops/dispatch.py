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
from zerograph.ops.definition import define
from zerograph.ops.rows import exchange_rows


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


def _routes(ids: Tensor, ranks: int, experts: int) -> Tensor:
    """Return which rank gets which tokens [source, tokens, destination].

    A number is the place of a token among those that its rank sends to the destination, -1 for one that is not sent.
    It is computed once for both directions of forward and of backward.

    Args:
        ids: experts of the tokens of all ranks [all tokens, choices].
        ranks: number of ranks.
        experts: number of experts of all ranks.
    """
    owners = torch.div(ids, experts // ranks, rounding_mode="floor")
    sent = torch.zeros(len(ids), ranks, dtype=torch.int32, device=ids.device).scatter_(1, owners, 1)
    sent = sent.view(ranks, -1, ranks)
    return (sent.cumsum(1, dtype=torch.int32) * sent).sub_(1)


def _first(routes: Tensor, limit: int) -> Tensor:
    """Return the first ``limit`` tokens that are sent [rows, tokens], and any others if there are fewer."""
    return (routes < 0).byte().sort(dim=1, stable=True).indices[:, :limit]


def _rest(routes: Tensor, limit: int) -> list[list[int]] | None:
    """Return the number of tokens above the limit from each rank to each; None without any. Wait for ``routes``."""
    counts = (routes.amax(1) + 1 - limit).clamp(min=0).tolist()
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
    return x.expand(groups, *x.shape).clone(memory_format=torch.contiguous_format)


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
    return ids.clone(memory_format=torch.contiguous_format)


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
        limit: the capacity.
        group: name of the process group; empty for operators that send nothing.
    """

    rank: int
    limit: int
    group: str = ""


def _pack_dispatched(x: Tensor, routes: Tensor, *numbers: Any) -> Tensor:
    """Return the rows that this rank sends in the first round [ranks * capacity, width].

    Args:
        x: tokens of this rank [tokens, width].
        routes: see :func:`_routes`.
        numbers: see :class:`_Place`.
    """
    place = _Place(*numbers)
    return x[_first(routes[place.rank].t(), place.limit).flatten()]


def _unpack_dispatched(received: Tensor, x: Tensor, routes: Tensor, *numbers: Any) -> Tensor:
    """Return a row for each token of all ranks [1, all tokens, width], zero for those of other groups.

    Args:
        received: the rows of the first round.
        x, routes, numbers: as for :func:`_pack_dispatched`.
    """
    place = _Place(*numbers)
    (rank, limit, _), ranks = place, len(routes)
    number = routes[..., rank]  # [source, tokens]
    places = number.clamp(0, limit - 1) + limit * torch.arange(ranks, device=x.device).unsqueeze(1)
    in_time = (number >= 0) & (number < limit)
    result = received[places.flatten()].masked_fill_(~in_time.view(-1, 1), 0)
    if (counts := _rest(routes, limit)) is not None:
        late = routes >= limit
        own = torch.cat([x[late[rank, :, other]] for other in range(ranks)])
        arrived = _exchanged(own, counts[rank], [row[rank] for row in counts], place.group)
        result.index_copy_(0, late[..., rank].flatten().nonzero().squeeze(1), arrived)
    return result.unsqueeze(0)


def _pack_combined(rows: Tensor, routes: Tensor, *numbers: Any) -> Tensor:
    """Return the rows that this rank sends back in the first round [ranks * capacity, width].

    Args:
        rows: a row for each token of all ranks [1, all tokens, width].
        routes, numbers: as for :func:`_pack_dispatched`.
    """
    place = _Place(*numbers)
    first = _first(routes[..., place.rank], place.limit)  # [rank of the token, capacity]
    begins = routes.shape[1] * torch.arange(len(routes), device=rows.device)
    return rows[0, (first + begins.unsqueeze(1)).flatten()]


def _unpack_combined(received: Tensor, rows: Tensor, routes: Tensor, *numbers: Any) -> Tensor:
    """Return the sum of the rows of each of this rank's tokens, in the order of the ranks that they are from.

    Args:
        received: the rows of the first round.
        rows, routes, numbers: as for :func:`_pack_combined`.
    """
    place = _Place(*numbers)
    (rank, limit, _), ranks = place, len(routes)
    number, late = routes[rank], routes >= limit
    in_time = (number >= 0) & (number < limit)  # [tokens, rank that sends]
    rest: Sequence[Tensor] = ()
    if (counts := _rest(routes, limit)) is not None:
        own = rows[0][late[..., rank].flatten()]
        rest = _exchanged(own, [row[rank] for row in counts], counts[rank], place.group).split(counts[rank])
    result = received.new_zeros(len(number), received.shape[1])
    for other, part in enumerate(received.view(ranks, limit, -1)):
        # Without a name, so that only one rank's rows are in memory.
        result += part[number[:, other].clamp(0, limit - 1)].masked_fill_(~in_time[:, other].unsqueeze(1), 0)
        if rest:
            result.index_add_(0, late[rank, :, other].nonzero().squeeze(1), rest[other])
    return result


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Send rows to each rank, as many as ``sent`` says; return those that arrive."""
    width = rows.shape[1]
    arriving = exchange_rows(rows, [width * count for count in sent], received, [sum(received), width], group)
    arrived: Tensor = WAIT(arriving)
    return arrived


def _packed(rows: Tensor, routes: Tensor, rank: int, limit: int) -> Tensor:
    return rows.new_empty((len(routes) * limit, rows.shape[-1]))


_pack = "(Tensor rows, Tensor routes, int rank, int limit) -> Tensor"
_unpack = "(Tensor received, Tensor rows, Tensor routes, int rank, int limit, str group) -> Tensor"
ROUTES = define(
    "token_routes",
    "(Tensor ids, int ranks, int experts) -> Tensor",
    _routes,
    lambda ids, ranks, experts: ids.new_empty((ranks, len(ids) // ranks, ranks), dtype=torch.int32),
)
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
        lambda received, x, routes, *_: x.new_empty((1, routes.shape[0] * routes.shape[1], x.shape[1])),
    ),
    COMBINE: define(
        "unpack_combined",
        _unpack,
        _unpack_combined,
        lambda received, rows, routes, *_: rows.new_empty((routes.shape[1], rows.shape[-1])),
    ),
}
