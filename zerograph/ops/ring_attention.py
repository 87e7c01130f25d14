"""Ring attention: queries attend to the keys and values of one rank after the other (Liu et al., arXiv 2310.01889).

Keys and values, joined along their channels to a *pair*, travel around the ranks. At step ``s`` rank ``r`` has the pair
of rank ``r - s``. Each step is one call of the kernel, whose result is merged with that of the steps before by the
log-sum-exps. In backward the gradient of a pair travels with it, and ends on the rank that the pair is from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerograph.ops.attention import BACKWARD, FORWARD, HEADS, POSITIONS, merged
from zerograph.ops.definition import define


class _Place(NamedTuple):
    """Which step of which ring it is.

    Attributes:
        rank: this rank.
        step: number of the step.
        ranks: number of ranks.
        channels: of the keys.
        causal: queries attend to no later keys. All ranks have equally many of both.
        scale: factor of the scores; None: the inverse root of the channels.
    """

    rank: int
    step: int
    ranks: int
    channels: int
    causal: bool
    scale: float | None

    @property
    def source(self) -> int:
        """The rank that the pair is from."""
        return (self.rank - self.step) % self.ranks

    @property
    def is_masked(self) -> bool:
        """All keys of the pair come after all queries."""
        return self.causal and self.source > self.rank

    def split(self, pair: Tensor) -> list[Tensor]:
        """Return keys and values of a pair."""
        return list(pair.split([self.channels, pair.shape[-1] - self.channels], -1))

    def own_mask(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """Return the part of a mask for these keys."""
        return mask if mask is None or mask.shape[-1] == 1 else mask[..., self.source * keys : (self.source + 1) * keys]


def _forward(
    query: Tensor, pair: Tensor, out: Tensor | None, logsumexp: Tensor | None, mask: Tensor | None, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """Return the result [batch, heads, queries, channels] and the log-sum-exp [batch, heads, queries] so far.

    Before the last step the result has the dtype of the log-sum-exp.

    Args:
        query: queries of this rank.
        pair: keys and values [batch, heads, keys, channels of both] that are here at this step.
        out, logsumexp: of the steps before; None at step 0.
        mask: added to the scores; of this rank's queries and all keys.
        numbers: see :class:`_Place`.
    """
    place = _Place(*numbers)
    if place.is_masked:
        assert out is not None
        assert logsumexp is not None
        result, total = out.clone(), logsumexp.clone()
    else:
        key, value = place.split(pair)
        mask = place.own_mask(mask, pair.shape[POSITIONS])
        causal = place.causal and place.step == 0
        result, total = FORWARD(query, key, value, 0.0, causal, attn_mask=mask, scale=place.scale)
        if mask is not None:
            # The kernel yields zeros, and the log-sum-exp 0, for a query without any key.
            total = total.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        if out is not None and logsumexp is not None:
            result, total = merged(out, logsumexp, result, total)
    if place.step == place.ranks - 1:
        return result.to(query.dtype), total.masked_fill_(total == -torch.inf, 0.0)
    return result.to(total.dtype), total


def _backward(
    grad_out: Tensor,
    query: Tensor,
    pair: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    """Return this step's part of the gradients of the queries, and that of the pair.

    Args:
        out, logsumexp: of all steps.
        query, pair, mask, numbers: as in forward.
    """
    place = _Place(*numbers)
    if place.is_masked:
        return empty_heads(query).zero_(), torch.zeros_like(pair)
    key, value = place.split(pair)
    causal, mask = place.causal and place.step == 0, place.own_mask(mask, pair.shape[POSITIONS])
    grad_query, grad_key, grad_value = BACKWARD(
        grad_out, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=place.scale
    )
    return grad_query, torch.cat([grad_key, grad_value], -1)


def _sum_gradients(
    grad_query: Tensor, last: Tensor, own: Tensor, arrived: Tensor, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        grad_query, last: the sum of the queries' gradients of all steps but the last, and that of the last.
        own, arrived: gradient of this rank's pair from its own queries, and the sum of those from the other ranks.
        channels: of the keys.
    """
    key, value = (own + arrived).split([channels, own.shape[-1] - channels], -1)
    return grad_query + last, empty_heads(key).copy_(key), empty_heads(value).copy_(value)


def empty_heads(like: Tensor) -> Tensor:
    """Return an empty tensor in the layout of the kernel's results: positions before heads."""
    order = (0, POSITIONS, HEADS, 3)
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _forward_fake(
    query: Tensor, pair: Tensor, out: Tensor | None, logsumexp: Tensor | None, mask: Tensor | None, *numbers: Any
) -> tuple[Tensor, Tensor]:
    place = _Place(*numbers)
    batch, heads, queries, _ = query.shape
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    dtype = query.dtype if place.step == place.ranks - 1 else wide
    result = empty_heads(query.new_empty((batch, heads, queries, pair.shape[-1] - place.channels), dtype=dtype))
    return result, torch.empty((batch, queries, heads), dtype=wide, device=query.device).transpose(1, 2)


_NUMBERS = "int rank, int step, int ranks, int channels, bool causal, float? scale"
ring_attention = define(
    "scaled_dot_product_ring_attention",
    f"(Tensor query, Tensor pair, Tensor? out, Tensor? logsumexp, Tensor? mask, {_NUMBERS}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
ring_attention_backward = define(
    "scaled_dot_product_ring_attention_backward",
    "(Tensor grad_out, Tensor query, Tensor pair, Tensor out, Tensor logsumexp, Tensor? mask, "
    f"{_NUMBERS}) -> (Tensor, Tensor)",
    _backward,
    lambda grad_out, query, pair, *rest: (empty_heads(query), pair.new_empty(pair.shape)),
)
sum_ring_gradients = define(
    "sum_ring_gradients",
    "(Tensor grad_query, Tensor last, Tensor own, Tensor arrived, int channels) -> (Tensor, Tensor, Tensor)",
    _sum_gradients,
    lambda grad_query, last, own, arrived, channels: (
        torch.empty_like(grad_query),
        empty_heads(own[..., :channels]),
        empty_heads(own[..., channels:]),
    ),
)

# Position of the argument ``rank``.
RANK = {ring_attention: 5, ring_attention_backward: 6}
