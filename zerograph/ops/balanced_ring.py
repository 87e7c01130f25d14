"""A causal ring in which ranks with early queries help those with late ones (Li et al., arXiv 2310.03294).

Queries of rank ``r`` attend to the keys of rank ``r - s`` at step ``s``, and ranks below ``s`` have none of these. Such
a rank attends for rank ``r - s + ranks`` to its own keys: it receives queries in place of keys and values, and sends
back their result. So half of the steps are enough, and all ranks compute equally much. With an even number of ranks two
of them have the same queries and keys at the last step: each takes half of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerograph.ops.attention import BACKWARD, FORWARD, POSITIONS, define, merged
from zerograph.ops.ring_attention import empty_heads


class _Step(NamedTuple):
    """Arguments of each operator of a step.

    Attributes:
        rank: this rank.
        step: number of the step, from 1 on.
        ranks: number of ranks.
        channels: of the keys.
        begin: first query that the helper attends for; a rank attends for its own queries before that one, or for all
            of them if it is 0.
        scale: factor of the scores; None: the inverse root of the channels.
    """

    rank: int
    step: int
    ranks: int
    channels: int
    begin: int
    scale: float | None

    @property
    def helps(self) -> bool:
        """True if this rank attends for another one."""
        return self.rank < self.step

    @property
    def is_helped(self) -> bool:
        """True if another rank attends for this one."""
        return self.rank >= self.ranks - self.step

    def split(self, pair: Tensor) -> list[Tensor]:
        """Return keys and values of a pair."""
        return list(pair.split([self.channels, pair.shape[-1] - self.channels], -1))


def own_rows(queries: int, begin: int) -> int:
    """Return the number of queries that a rank attends for itself."""
    return begin or queries


def _pack(tensors: Sequence[Tensor], logsumexp: Tensor | None, begin: int) -> Tensor:
    """Return the queries from ``begin`` on of all tensors [batch, heads, queries, ...] as [batch, numbers]."""
    rows = [tensor[:, :, begin:].flatten(1) for tensor in tensors]
    if logsumexp is not None:
        rows.append(logsumexp[:, :, begin:].flatten(1).contiguous().view(rows[0].dtype))
    return torch.cat(rows, 1)


def _unpack(buffer: Tensor, like: Sequence[Tensor], logsumexp: Tensor | None, begin: int) -> list[Tensor]:
    """Return what :func:`_pack` has packed, of tensors of these shapes, from the beginning of a buffer."""
    shapes = [(*tensor.shape[:2], tensor.shape[2] - begin, *tensor.shape[3:]) for tensor in like]
    sizes = [math.prod(shape[1:]) for shape in shapes]
    if logsumexp is not None:
        rows = logsumexp[:, :, begin:]
        shapes.append(tuple(rows.shape))
        sizes.append(math.prod(rows.shape[1:]) * logsumexp.itemsize // buffer.itemsize)
    batch = shapes[0][0]
    parts = list(buffer.view(-1)[: batch * sum(sizes)].view(batch, sum(sizes)).split(sizes, 1))
    if logsumexp is not None:
        # A copy, which begins where wider numbers may.
        parts[-1] = parts[-1].clone(memory_format=torch.contiguous_format).view(logsumexp.dtype)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _attend(query: Tensor, pair: Tensor, buffer: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp of attention for this rank's queries, or for those in the buffer.

    Args:
        query: queries of this rank [batch, heads, queries, channels].
        pair: keys and values of this rank [batch, heads, keys, channels of both].
        buffer: what arrived: a pair, or queries.
        numbers: see :class:`_Step`.
    """
    step = _Step(*numbers)
    rows = own_rows(query.shape[POSITIONS], step.begin)
    if step.helps:
        if step.begin == query.shape[POSITIONS]:
            return _attend_fake(query, pair, buffer, *numbers)
        (query,) = _unpack(buffer, [query], None, step.begin)
    else:
        query, pair = query[:, :, :rows], buffer.view(-1)[: pair.numel()].view(pair.shape)
    key, value = step.split(pair)
    out, lse = FORWARD(query, key, value, 0.0, False, scale=step.scale)
    return out, lse


def _merge(
    out: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor, arrived: Tensor, last: bool, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp with those of a step.

    Args:
        out, logsumexp: of the steps before.
        part, part_lse: of this rank's attention, which may be for another rank.
        arrived: of the other rank's attention for this one.
        last: round the result to the dtype of the part.
        numbers: see :class:`_Step`.
    """
    step = _Step(*numbers)
    out, logsumexp = out.clone(), logsumexp.clone()
    if not step.helps:
        rows = slice(own_rows(out.shape[POSITIONS], step.begin))
        out[:, :, rows], logsumexp[:, :, rows] = merged(out[:, :, rows], logsumexp[:, :, rows], part, part_lse)
    if step.is_helped and step.begin < out.shape[POSITIONS]:
        rows = slice(step.begin, None)
        other, other_lse = _unpack(arrived, [out], logsumexp, step.begin)
        out[:, :, rows], logsumexp[:, :, rows] = merged(out[:, :, rows], logsumexp[:, :, rows], other, other_lse)
    return out.to(part.dtype) if last else out, logsumexp


def _backward(
    grad_out: Tensor, query: Tensor, pair: Tensor, out: Tensor, logsumexp: Tensor, buffer: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and of the pair of a step: one of them is another rank's."""
    step = _Step(*numbers)
    queries = query.shape[POSITIONS]
    if step.helps:
        if step.begin == queries:
            return _backward_fake(grad_out, query, pair, out, logsumexp, buffer, *numbers, zeros=True)
        query, grad_out, out, logsumexp = _unpack(buffer, [query, grad_out, out], logsumexp, step.begin)
    else:
        rows = own_rows(queries, step.begin)
        query, grad_out, out, logsumexp = (x[:, :, :rows] for x in (query, grad_out, out, logsumexp))
        pair = buffer.view(-1)[: pair.numel()].view(pair.shape)
    key, value = step.split(pair)
    of_query, of_key, of_value = BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, False, scale=step.scale)
    return of_query, torch.cat([of_key, of_value], -1)


def _add(
    grad_query: Tensor, grad_pair: Tensor, of_query: Tensor, of_pair: Tensor, arrived: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's queries and pair with those of a step.

    Args:
        grad_query, grad_pair: of the steps before.
        of_query, of_pair: what this rank computed; one of them is another rank's.
        arrived: what another rank computed.
        numbers: see :class:`_Step`.
    """
    step = _Step(*numbers)
    grad_query, grad_pair = grad_query.clone(), grad_pair.clone()
    if step.helps:
        grad_pair += of_pair
    else:
        grad_query[:, :, : own_rows(grad_query.shape[POSITIONS], step.begin)] += of_query
    if not step.is_helped:
        grad_pair += arrived.view(-1)[: grad_pair.numel()].view(grad_pair.shape)
    elif step.begin < grad_query.shape[POSITIONS]:
        grad_query[:, :, step.begin :] += _unpack(arrived, [grad_query], None, step.begin)[0]
    return grad_query, grad_pair


def _add_last(
    grad_query: Tensor, grad_pair: Tensor, of_query: Tensor, of_pair: Tensor, arrived: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values with those of the last step; see :func:`_add`."""
    grad_query, grad_pair = _add(grad_query, grad_pair, of_query, of_pair, arrived, *numbers)
    key, value = _Step(*numbers).split(grad_pair)
    return grad_query, empty_heads(key).copy_(key), empty_heads(value).copy_(value)


def _attend_fake(query: Tensor, pair: Tensor, buffer: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    step = _Step(*numbers)
    batch, heads, queries, _ = query.shape
    rows = own_rows(queries, step.begin)
    out = empty_heads(query.new_empty((batch, heads, rows, pair.shape[-1] - step.channels)))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return out, torch.empty((batch, rows, heads), dtype=wide, device=query.device).transpose(1, 2)


def _merge_fake(
    out: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor, arrived: Tensor, last: bool, *numbers: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out, dtype=part.dtype if last else out.dtype), torch.empty_like(logsumexp)


def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    pair: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    buffer: Tensor,
    *numbers: Any,
    zeros: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = own_rows(query.shape[POSITIONS], _Step(*numbers).begin)
    results = empty_heads(query[:, :, :rows]), pair.new_empty(pair.shape)
    return tuple(one.zero_() for one in results) if zeros else results  # type: ignore[return-value]


def _add_last_fake(
    grad_query: Tensor, grad_pair: Tensor, of_query: Tensor, of_pair: Tensor, arrived: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = _Step(*numbers).split(grad_pair)
    return torch.empty_like(grad_query), empty_heads(key), empty_heads(value)


_NUMBERS = "int rank, int step, int ranks, int channels, int begin, float? scale"
pack_queries = define(
    "pack_queries",
    "(Tensor[] tensors, Tensor? logsumexp, int begin) -> Tensor",
    _pack,
    lambda tensors, logsumexp, begin: _pack(tensors, logsumexp, begin),
)
balanced_attention = define(
    "balanced_attention",
    f"(Tensor query, Tensor pair, Tensor buffer, {_NUMBERS}) -> (Tensor, Tensor)",
    _attend,
    _attend_fake,
)
merge_balanced = define(
    "merge_balanced",
    f"(Tensor out, Tensor logsumexp, Tensor part, Tensor part_lse, Tensor arrived, bool last, {_NUMBERS})"
    " -> (Tensor, Tensor)",
    _merge,
    _merge_fake,
)
balanced_backward = define(
    "balanced_attention_backward",
    "(Tensor grad_out, Tensor query, Tensor pair, Tensor out, Tensor logsumexp, Tensor buffer, "
    f"{_NUMBERS}) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_ADD = f"(Tensor grad_query, Tensor grad_pair, Tensor of_query, Tensor of_pair, Tensor arrived, {_NUMBERS})"
add_balanced = define(
    "add_balanced",
    f"{_ADD} -> (Tensor, Tensor)",
    _add,
    lambda grad_query, grad_pair, *_: (torch.empty_like(grad_query), torch.empty_like(grad_pair)),
)
add_last_balanced = define("add_last_balanced", f"{_ADD} -> (Tensor, Tensor, Tensor)", _add_last, _add_last_fake)
# Position of the argument ``rank``.
RANK = {balanced_attention: 3, merge_balanced: 6, balanced_backward: 6, add_balanced: 5, add_last_balanced: 5}
