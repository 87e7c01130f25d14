"""Ring attention: queries attend to the keys and values of one rank after the other (Liu et al., arXiv 2310.01889).

Keys and values, joined along their channels to a *pair*, travel around the ranks. At step ``s`` rank ``r`` has the pair
of rank ``r - s``. Each step is one call of the kernel, whose result is merged with that of the steps before by the
log-sum-exps. In backward the gradient of a pair travels with it, and ends on the rank that the pair is from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerograph.ir.attention import BACKWARD, FORWARD, HEADS, POSITIONS, merged

_library = torch.library.Library("zerograph", "FRAGMENT")
_PLACE = "int rank, int step, int ranks, int channels, bool causal, float? scale"
_library.define(
    "scaled_dot_product_ring_attention(Tensor query, Tensor pair, Tensor? out, Tensor? logsumexp, Tensor? mask, "
    f"{_PLACE}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "scaled_dot_product_ring_attention_backward(Tensor grad_out, Tensor query, Tensor pair, Tensor out, "
    f"Tensor logsumexp, Tensor? mask, {_PLACE}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "sum_ring_gradients(Tensor grad_query, Tensor last, Tensor own, Tensor arrived, int channels) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ring_attention = torch.ops.zerograph.scaled_dot_product_ring_attention.default
ring_attention_backward = torch.ops.zerograph.scaled_dot_product_ring_attention_backward.default
sum_ring_gradients = torch.ops.zerograph.sum_ring_gradients.default

# Position of the argument ``rank``.
RANK = {ring_attention: 5, ring_attention_backward: 6}


def _forward(
    query: Tensor,
    pair: Tensor,
    out: Tensor | None,
    logsumexp: Tensor | None,
    mask: Tensor | None,
    rank: int,
    step: int,
    ranks: int,
    channels: int,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result [batch, heads, queries, channels] and the log-sum-exp [batch, heads, queries] so far.

    Args:
        query: queries of this rank.
        pair: keys and values [batch, heads, keys, channels of both] that are here at this step.
        out, logsumexp: of the steps before; None at step 0.
        mask: added to the scores; of this rank's queries and all keys.
        rank: this rank.
        step: number of the step.
        ranks: number of ranks.
        channels: of the keys.
        causal: queries attend to no later keys. All ranks have equally many of both.
        scale: factor of the scores; None: the inverse root of the channels.
    """
    source = (rank - step) % ranks
    if causal and source > rank:
        assert out is not None
        assert logsumexp is not None
        result, total = out.clone(), logsumexp.clone()
    else:
        key, value = pair.split([channels, pair.shape[-1] - channels], -1)
        own_mask = _own_mask(mask, source, pair.shape[POSITIONS])
        result, total = FORWARD(query, key, value, 0.0, causal and step == 0, attn_mask=own_mask, scale=scale)
        if own_mask is not None:
            # The kernel yields zeros, and the log-sum-exp 0, for a query without any key.
            total = total.masked_fill((own_mask == -torch.inf).all(-1), -torch.inf)
        if out is not None and logsumexp is not None:
            result, total = merged(out, logsumexp, result, total)
    if step == ranks - 1:
        total.masked_fill_(total == -torch.inf, 0.0)
    return result, total


def _backward(
    grad_out: Tensor,
    query: Tensor,
    pair: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    rank: int,
    step: int,
    ranks: int,
    channels: int,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return this step's part of the gradients of the queries, and that of the pair.

    Args:
        out, logsumexp: of all steps.
        query, pair, mask, rank, step, ranks, channels, causal, scale: as in forward.
    """
    source = (rank - step) % ranks
    if causal and source > rank:
        return _empty(query).zero_(), torch.zeros_like(pair)
    key, value = pair.split([channels, pair.shape[-1] - channels], -1)
    own_mask = _own_mask(mask, source, pair.shape[POSITIONS])
    grad_query, grad_key, grad_value = BACKWARD(
        grad_out, query, key, value, out, logsumexp, 0.0, causal and step == 0, attn_mask=own_mask, scale=scale
    )
    return grad_query, torch.cat([grad_key, grad_value], -1)


def _own_mask(mask: Tensor | None, source: int, keys: int) -> Tensor | None:
    """Return the part of a mask for the keys of rank ``source``."""
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., source * keys : (source + 1) * keys]


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
    return grad_query + last, _empty(key).copy_(key), _empty(value).copy_(value)


def _empty(like: Tensor) -> Tensor:
    """Return an empty tensor in the layout of the kernel's results: positions before heads."""
    order = (0, POSITIONS, HEADS, 3)
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _forward_fake(query: Tensor, pair: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, heads, queries, channels = query.shape
    out = _empty(query.new_empty((batch, heads, queries, pair.shape[-1] - channels)))
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return out, torch.empty((batch, queries, heads), dtype=dtype, device=query.device).transpose(1, 2)


for _name, _run, _fake in (
    ("scaled_dot_product_ring_attention", _forward, _forward_fake),
    (
        "scaled_dot_product_ring_attention_backward",
        _backward,
        lambda grad_out, query, pair, *rest: (_empty(query), pair.new_empty(pair.shape)),
    ),
    (
        "sum_ring_gradients",
        _sum_gradients,
        lambda grad_query, last, own, arrived, channels: (
            torch.empty_like(grad_query),
            _empty(own[..., :channels]),
            _empty(own[..., channels:]),
        ),
    ),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerograph::{_name}", _fake, lib=_library)
