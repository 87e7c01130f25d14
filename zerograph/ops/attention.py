"""Scaled dot product attention of one rank's queries, which begin later than the keys that it has.

The kernels of torch align a causal mask at the first query and the first key. For queries that begin at position
``first`` of the sequence, keys before ``first`` are attended without a mask, and the next ones with a causal one. Each
part is one call of the kernel. Two parts are joined by the log-sum-exps of their scores (Milakov and Gimelshein,
arXiv 1805.02867, section 3.1). Backward needs the result and the log-sum-exp over all keys only, so its parts add up.
No scores and no masks are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zerograph.ops.definition import define

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Kernels of accelerators, and their backward.
ACCELERATED = {
    aten._scaled_dot_product_flash_attention.default: aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default: aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default: aten._scaled_dot_product_cudnn_attention_backward.default,
}

# Dimensions of queries, keys, values and their gradients.
HEADS, POSITIONS = 1, 2


def _parts(query: Tensor, key: Tensor, first: int) -> Iterator[tuple[int, int, bool]]:
    """Yield begin and end of each part of the keys that queries attend to, and whether it has a causal mask."""
    begin = min(first, key.shape[POSITIONS])
    end = min(first + query.shape[POSITIONS], key.shape[POSITIONS])
    if begin > 0:
        yield 0, begin, False
    if end > begin:
        yield begin, end, True


def _forward(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the result [batch, heads, queries, channels] and the log-sum-exp [batch, heads, queries].

    Args:
        query: queries at the positions ``first``, ``first + 1``, ...
        key, value: of the positions from 0 on.
        first: position of the first query.
        scale: factor of the scores; None: the inverse root of the channels.
    """
    out: Tensor | None = None
    lse: Tensor | None = None
    for begin, end, causal in _parts(query, key, first):
        keys, values = (each[:, :, begin:end] for each in (key, value))
        part, part_lse = FORWARD(query, keys, values, 0.0, causal, scale=scale)
        if out is None or lse is None:
            out, lse = part, part_lse
        else:
            out, lse = merged(out, lse, part, part_lse)
    assert out is not None
    assert lse is not None
    return out.to(query.dtype), lse


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp of attention to two parts of the keys, from those of each part.

    A query without any key in a part has zeros, and the log-sum-exp -inf. The result has the dtype of log-sum-exps: to
    narrower ones it is rounded once, after the last part.
    """
    weight = torch.sigmoid(part_lse - lse).masked_fill(part_lse == -torch.inf, 0.0)
    return torch.lerp(out.to(lse.dtype), part.to(lse.dtype), weight.unsqueeze(-1)), torch.logaddexp(lse, part_lse)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    first: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    grad_query = torch.zeros_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for begin, end, causal in _parts(query, key, first):
        keys, values = (each[:, :, begin:end] for each in (key, value))
        parts = BACKWARD(grad_out, query, keys, values, out, logsumexp, 0.0, causal, scale=scale)
        grad_query += parts[0]
        grad_key[:, :, begin:end], grad_value[:, :, begin:end] = parts[1:]
    return grad_query, grad_key, grad_value


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = FORWARD(query, key, value, 0.0, True, scale=scale)
    return out, lse


def _backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


causal_attention = define(
    "scaled_dot_product_causal_attention",
    "(Tensor query, Tensor key, Tensor value, int first, float? scale) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
causal_attention_backward = define(
    "scaled_dot_product_causal_attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, int first, float? scale) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Return ``x`` [batch, heads, positions, channels] with each head so many times, one after the other."""
    return x.repeat_interleave(times, HEADS)


def _sum_heads(x: Tensor, times: int) -> Tensor:
    """Return the gradient of :func:`_repeat_heads`: the sum of each so many heads."""
    total: Tensor = x.unflatten(HEADS, (-1, times)).sum(HEADS + 1)
    return total


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x.new_empty((x.shape[0], heads, *x.shape[2:]))


repeat_heads = define(
    "repeat_heads",
    "(Tensor x, int times) -> Tensor",
    _repeat_heads,
    lambda x, times: _with_heads(x, x.shape[HEADS] * times),
)
sum_heads = define(
    "sum_heads",
    "(Tensor x, int times) -> Tensor",
    _sum_heads,
    lambda x, times: _with_heads(x, x.shape[HEADS] // times),
)
