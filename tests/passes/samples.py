"""Sample arguments for every operator that has a rule: sizes that ranks divide, and some that they do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerograph.ir.pause import GRADIENT_OF
from zerograph.ops.random import uniform

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]

_generator = torch.Generator().manual_seed(0)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def bools(*shape: int) -> Tensor:
    return torch.randint(2, shape, generator=_generator).bool()


@dataclass(frozen=True)
class Zeros:
    """A tensor that the graph itself makes of zeros: rules may know it."""

    shape: tuple[int, ...]


def zeros(*shape: int) -> Zeros:
    return Zeros(shape)


def s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _norm(*shape: int, normalized: int) -> tuple[Tensor, list[int], Tensor, Tensor, Tensor, Tensor]:
    value, size = x(*shape), list(shape[-normalized:])
    weight, bias = x(*size), x(*size)
    _, mean, rstd = aten.native_layer_norm(value, size, weight, bias, 1e-5)
    return value, size, weight, bias, mean, rstd


def _layer_norm_backward() -> list[Sample]:
    value, size, weight, bias, mean, rstd = _norm(4, 8, 6, normalized=1)
    grad = x(4, 8, 6)
    return [
        s(grad, value, size, mean, rstd, weight, bias, [True, True, True]),
        s(grad, value, size, mean, rstd, weight, None, [True, True, False]),
        s(grad, value, size, mean, rstd, None, None, [True, False, False]),
    ]


def _group_norm_backward() -> list[Sample]:
    value, weight = x(4, 6, 5, 5), x(6)
    _, mean, rstd = aten.native_group_norm(value, weight, None, 4, 6, 25, 3, 1e-5)
    return [s(x(4, 6, 5, 5), value, mean, rstd, weight, 4, 6, 25, 3, [True, True, True])]


def _attention() -> tuple[Tensor, Tensor, Tensor]:
    return x(4, 2, 6, 8), x(4, 2, 6, 8), x(4, 2, 6, 8)


def _attention_backward() -> list[Sample]:
    q, k, v = _attention()
    found = []
    for mask, causal in ((None, True), (x(6, 6), False), (x(4, 2, 6, 6), False)):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        found.append(s(x(*out.shape), q, k, v, out, lse, 0.0, causal, attn_mask=mask))
    return found


def _max_pool_backward(dims: int) -> list[Sample]:
    value = x(4, 2, *[6] * dims)
    pool = aten.max_pool2d_with_indices if dims == 2 else aten.max_pool3d_with_indices
    out, indices = pool(value, [2] * dims, [2] * dims)
    rest = ([2] * dims, [2] * dims, [0] * dims, [1] * dims, False)
    return [s(x(*out.shape), value, *rest, indices)]


def _avg_pool_backward(dims: int) -> list[Sample]:
    return [s(x(4, 2, *[3] * dims), x(4, 2, *[6] * dims), [2] * dims, [2] * dims, [0] * dims, False, True, None)]


def _puts() -> list[Sample]:
    rows = torch.tensor([3, 0, 5, 1])
    return [
        s(x(6, 4), [rows], x(4, 4)),
        s(x(4, 6), [None, rows], x(4, 1)),
        s(zeros(6, 4), [rows], x(4)),
        s(x(6, 4), [ints(6, 8)], x(8, 4), True),
        s(zeros(6, 4), [ints(6, 8)], x(8, 4), True),
        s(zeros(4, 6, 8), [ints(4, 8, 1), None, ints(8, 4)], x(8, 4, 6), True),
        s(zeros(4, 6), [None, ints(6, 8)], x(8), True),
    ]


_conv = ([1, 1], [1, 1], [1, 1], False, [0, 0])

SAMPLES: dict[Any, list[Sample]] = {
    # Products
    aten.mm.default: [s(x(8, 4), x(4, 6)), s(x(7, 3), x(3, 5))],
    aten.bmm.default: [s(x(4, 6, 2), x(4, 2, 8))],
    aten.mv.default: [s(x(8, 4), x(4))],
    aten.addmm.default: [s(x(6), x(8, 4), x(4, 6)), s(x(8, 6), x(8, 4), x(4, 6)), s(x(1, 6), x(8, 4), x(4, 6), beta=2)],
    aten.baddbmm.default: [s(x(4, 6, 8), x(4, 6, 2), x(4, 2, 8)), s(x(1, 1, 8), x(4, 6, 2), x(4, 2, 8))],
    aten.convolution.default: [
        s(x(4, 2, 6, 6), x(4, 2, 3, 3), x(4), *_conv, 1),
        s(x(4, 4, 6, 6), x(4, 2, 3, 3), None, *_conv, 2),
        s(x(4, 2, 9), x(2, 3, 3), None, [2], [1], [1], True, [1], 1),
    ],
    aten.convolution_backward.default: [
        s(x(4, 4, 6, 6), x(4, 2, 6, 6), x(4, 2, 3, 3), [4], *_conv, 1, [True, True, True]),
        s(x(4, 4, 6, 6), x(4, 2, 6, 6), x(4, 2, 3, 3), None, *_conv, 1, [False, True, False]),
    ],
    # Lookup
    aten.embedding.default: [s(x(8, 4), ints(8, 4, 6)), s(x(9, 4), ints(9, 8))],
    aten.embedding_dense_backward.default: [
        s(x(4, 6, 8), ints(10, 4, 6), 10, -1, False),
        s(x(8, 4), ints(10, 8), 10, 2, False),
        s(x(8, 4), ints(10, 8), 10, -1, True),
    ],
    aten.gather.default: [
        s(x(4, 6), 1, ints(6, 4, 1)),
        s(x(4, 6), 0, ints(4, 2, 6)),
        s(x(8, 4, 6), 2, ints(6, 8, 4, 2)),
        s(x(), 0, ints(1)),
    ],
    aten.scatter.value: [s(x(4, 6), 1, ints(6, 4, 1), 2.5), s(x(), 0, ints(1, 1), 2.5)],
    aten.scatter.src: [
        s(x(4, 6), 1, torch.arange(4).view(4, 1), x(4, 1)),
        s(zeros(4, 6), 1, torch.arange(4).view(4, 1), x(4, 1)),
    ],
    aten.scatter_add.default: [
        s(x(4, 6), 1, ints(6, 4, 8), x(4, 8)),
        s(x(6, 4), 0, ints(6, 8, 4), x(8, 4)),
        s(x(), 0, ints(1, 1), x(1)),
    ],
    aten.index_add.default: [
        s(x(6, 4), 0, ints(6, 8), x(8, 4)),
        s(x(4, 6), 1, ints(6, 8), x(4, 8)),
        s(zeros(6, 4), 0, ints(6, 8), x(8, 4)),
    ],
    aten.index.Tensor: [
        s(x(6, 4), [ints(6, 8)]),
        s(x(4, 6, 8), [None, ints(6, 4, 2)]),
        s(x(4, 6, 8), [ints(4, 8, 1), None, ints(8, 4)]),
        s(x(4, 6, 8), [ints(4, 8, 1), ints(6, 4)]),
        s(x(4, 6), [torch.tensor(2), ints(6, 8)]),
    ],
    aten._unsafe_index.Tensor: [s(x(4, 4, 6, 6), [None, None, ints(6, 8, 1), ints(6, 4)])],
    aten.index_put.default: [*_puts(), s(x(4, 6), [bools(4, 6)], torch.tensor(2.0).double())],
    aten._unsafe_index_put.default: _puts(),
    aten.index_select.default: [s(x(8, 4), 0, ints(8, 6)), s(x(4, 8), 1, ints(8, 4)), s(x(), 0, ints(1, 1))],
    # Normalisation, attention, pooling
    aten.native_layer_norm.default: [
        s(x(4, 8, 6), [6], x(6), x(6), 1e-5),
        s(x(4, 8, 6), [8, 6], x(8, 6), None, 1e-5),
        s(x(4, 6), [6], None, None, 1e-5),
    ],
    aten.native_layer_norm_backward.default: _layer_norm_backward(),
    aten.native_group_norm.default: [s(x(4, 6, 5, 5), x(6), x(6), 4, 6, 25, 3, 1e-5)],
    aten.native_group_norm_backward.default: _group_norm_backward(),
    aten._scaled_dot_product_flash_attention_for_cpu.default: [
        s(*_attention(), 0.0, True),
        s(*_attention(), 0.0, False, attn_mask=x(6, 6)),
        s(*_attention(), 0.0, False, attn_mask=x(4, 1, 6, 6)),
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward(),
    aten.max_pool2d_with_indices.default: [s(x(4, 2, 6, 6), [2, 2], [2, 2])],
    aten.max_pool3d_with_indices.default: [s(x(4, 2, 6, 6, 6), [2, 2, 2], [2, 2, 2])],
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.avg_pool2d.default: [s(x(4, 2, 6, 6), [2, 2], [2, 2])],
    aten.avg_pool3d.default: [s(x(4, 2, 6, 6, 6), [2, 2, 2], [2, 2, 2])],
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: [s(x(4, 2, 6, 6), [3, 2])],
    aten._adaptive_avg_pool2d_backward.default: [s(x(4, 2, 3, 2), x(4, 2, 6, 6))],
    aten.upsample_nearest2d.default: [s(x(4, 2, 3, 3), [6, 6])],
    aten.upsample_nearest2d_backward.default: [s(x(4, 2, 6, 6), [6, 6], [4, 2, 3, 3])],
    aten.upsample_bilinear2d.default: [s(x(4, 2, 3, 3), [6, 6], False)],
    aten.upsample_bilinear2d_backward.default: [s(x(4, 2, 6, 6), [6, 6], [4, 2, 3, 3], False)],
    # Pointwise
    aten.add.Tensor: [
        s(x(4, 6), x(4, 6)),
        s(x(4, 6), x(6), alpha=2),
        s(x(4, 1, 6), x(8, 1)),
        s(x(4, 6), 1.5),
        s(x(4, 6), 0),
        s(zeros(4, 6), x(4, 6)),
    ],
    aten.sub.Tensor: [s(x(4, 6), x(4, 6)), s(x(4, 6), x(1, 6)), s(zeros(4, 6), x(4, 6))],
    aten.where.self: [
        s(bools(4, 6), x(4, 6), x(4, 6)),
        s(bools(4, 1), x(4, 6), x(6)),
        s(bools(4, 1), x(4, 6), zeros()),
        s(bools(4, 6), zeros(6), x(4, 6)),
    ],
    aten.masked_fill.Scalar: [s(x(4, 6), bools(4, 1), 0), s(x(4, 6), bools(4, 6), 2.0)],
    aten.masked_fill.Tensor: [s(x(4, 6), bools(4, 1), zeros()), s(x(4, 6), bools(4, 6), x())],
    aten.lerp.Scalar: [s(x(4, 6), x(4, 6), 0.3)],
    aten.mul.Tensor: [s(x(4, 6), x(4, 6)), s(x(4, 6), x(4, 1)), s(x(4, 6), 1.5)],
    aten.mul.Scalar: [s(x(4, 6), 1.5)],
    aten.div.Tensor: [s(x(4, 6), x(4, 6)), s(x(4, 6), 3)],
    aten.div.Scalar: [s(x(4, 6), 1.5)],
    aten.neg.default: [s(x(4, 6))],
    aten.gelu_backward.default: [s(x(4, 6), x(4, 6))],
    aten.silu_backward.default: [s(x(4, 6), x(4, 6))],
    aten.sigmoid_backward.default: [s(x(4, 6), x(4, 6))],
    aten.tanh_backward.default: [s(x(4, 6), x(4, 6))],
    aten.threshold_backward.default: [s(x(4, 6), x(4, 6), 0)],
    aten.clone.default: [s(x(4, 6))],
    aten.detach.default: [s(x(4, 6))],
    aten.alias.default: [s(x(4, 6))],
    aten.lift_fresh_copy.default: [s(x(4, 6))],
    aten.zeros_like.default: [s(x(4, 6))],
    aten.ones_like.default: [s(x(4, 6))],
    GRADIENT_OF: [s(x(4, 6), 0)],
    aten.full_like.default: [s(x(4, 6), 2.5)],
    aten.fill.Scalar: [s(x(4, 6), 2.5)],
    aten.fill.Tensor: [s(x(4, 6), x())],
    aten.copy.default: [s(x(4, 6), x(6)), s(ints(9, 4, 6), x(6))],
    aten.copy_.default: [s(x(4, 6), x(4, 6))],
    aten._to_copy.default: [
        s(x(4, 6), dtype=torch.float32),
        s(x(4, 6), dtype=torch.int64),
        s(ints(9, 4, 6), dtype=torch.float64),
    ],
    # Reductions
    aten.sum.default: [s(x(4, 6)), s(x(8)), s(x(4, 6), dtype=torch.int64)],
    aten.sum.dim_IntList: [s(x(4, 6), [0]), s(x(4, 6), [-1], True), s(x(4, 6, 8), [0, 2]), s(x(4, 6), None)],
    aten.amax.default: [s(x(4, 6), [1]), s(x(4, 6), [0], True)],
    aten.amin.default: [s(x(4, 6), [1])],
    aten.argmax.default: [s(x(4, 6), 1), s(x(4, 6))],
    aten.argmin.default: [s(x(4, 6), 1)],
    aten.max.default: [s(x(4, 6))],
    aten.min.default: [s(x(4, 6))],
    aten.max.dim: [s(x(4, 6), 1)],
    aten.min.dim: [s(x(4, 6), 0, True)],
    aten.any.default: [s(bools(4, 6))],
    aten.any.dim: [s(bools(4, 6), 1)],
    aten.all.default: [s(bools(4, 6))],
    aten.all.dim: [s(bools(4, 6), 1)],
    aten._is_all_true.default: [s(bools(4, 6))],
    aten._is_any_true.default: [s(bools(4, 6))],
    aten.prod.default: [s(x(4, 6))],
    aten.prod.dim_int: [s(x(4, 6), 1)],
    aten.logsumexp.default: [s(x(4, 6), [1])],
    aten._softmax.default: [s(x(4, 6), 1, False), s(x(4, 6, 8), 1, False)],
    aten._safe_softmax.default: [s(x(4, 6), 1)],
    aten._log_softmax.default: [s(x(4, 6), -1, False)],
    aten._softmax_backward_data.default: [s(x(4, 6), x(4, 6).softmax(1), 1, torch.float64)],
    aten._log_softmax_backward_data.default: [s(x(4, 6), x(4, 6).log_softmax(1), 1, torch.float64)],
    aten.histc.default: [s(ints(5, 4, 8).double(), 4, 0, 4), s(x(8), 5)],
    aten.cumsum.default: [s(x(4, 6), 1)],
    aten.flip.default: [s(x(4, 6), [1])],
    aten.sort.default: [s(x(4, 6), 1)],
    aten.topk.default: [s(x(4, 6), 3)],
    # Moving elements
    aten.t.default: [s(x(4, 6)), s(x(8))],
    aten.transpose.int: [s(x(4, 6, 8), 0, -1)],
    aten.permute.default: [s(x(4, 6, 8), [2, 0, 1])],
    aten.unsqueeze.default: [s(x(4, 6), 1), s(x(4, 6), -1)],
    aten.squeeze.default: [s(x(4, 1, 6))],
    aten.squeeze.dim: [s(x(4, 1, 6), 1), s(x(4, 1, 6), 0)],
    aten.squeeze.dims: [s(x(4, 1, 6, 1), [1, 3])],
    aten.view.default: [
        s(x(4, 6, 8), [24, 8]),
        s(x(24, 8), [4, 6, 8]),
        s(x(4, 6, 8), [4, 6, 2, 4]),
        s(x(24), [4, -1]),
        s(x(6, 4), [4, 6]),
        s(x(4, 1, 6), [4, 6]),
    ],
    aten._unsafe_view.default: [s(x(4, 6, 8), [24, 8])],
    aten.reshape.default: [s(x(4, 6, 8), [-1])],
    aten.as_strided.default: [s(x(4, 6), [3, 2], [6, 1], 1)],
    aten.expand.default: [s(x(4, 1, 6), [4, 8, 6]), s(x(6), [4, 6]), s(x(4, 1), [-1, 6])],
    aten.select.int: [s(x(4, 6), 1, 2), s(x(4, 6), 0, -1)],
    aten.slice.Tensor: [s(x(4, 6), 1, 1, 5), s(x(4, 6), 0, 0, 4), s(x(8, 6), 0, 2, 6), s(x(8, 4), 0, 0, 8, 2)],
    aten.split.Tensor: [s(x(4, 6), 2, 1)],
    aten.split_with_sizes.default: [s(x(4, 6), [2, 4], 1)],
    aten.unbind.int: [s(x(4, 6), 1)],
    aten.chunk.default: [s(x(4, 6), 3, 1)],
    aten.narrow.default: [s(x(4, 6), 1, 1, 3)],
    aten.slice_scatter.default: [
        s(x(4, 6), x(4, 4), 1, 1, 5),
        s(x(8, 4), x(2, 4), 0, 1, 8, 4),
        s(zeros(4, 6), x(4, 4), 1, 2, 2**63 - 1),
        s(x(4, 6), zeros(4, 4), 1, 1, 5),
    ],
    aten.select_scatter.default: [s(x(4, 6), x(4), 1, 2), s(zeros(4, 6), x(6), 0, -1)],
    aten.cat.default: [s([x(4, 6), x(4, 2)], 1), s([x(4, 6), x(4, 6)])],
    aten.stack.default: [s([x(4, 6), x(4, 6)]), s([x(4, 6), x(4, 6)], 1)],
    aten.constant_pad_nd.default: [s(x(4, 6), [0, 2], 0.0), s(x(4, 6), [1, 1, 0, 0], 0.0), s(x(4, 6), [0, 2], 1.5)],
    aten.tril.default: [s(x(4, 6, 6))],
    aten.triu.default: [s(x(4, 6, 6), 1)],
    # Factories
    aten.full.default: [s([4, 6], 2.5)],
    aten.zeros.default: [s([4, 6])],
    aten.ones.default: [s([4, 6])],
    aten.scalar_tensor.default: [s(2.5)],
    aten.arange.default: [s(8)],
    aten.arange.start: [s(2, 10)],
    aten.arange.start_step: [s(2, 10, 2)],
    aten.eye.default: [s(4)],
    aten.eye.m: [s(4, 6)],
    aten.linspace.default: [s(0.0, 1.0, 8)],
    # Random numbers, of their place in the global tensor
    uniform: [
        s(torch.tensor(3), 1, [4, 6], [0, 0], [4, 6], torch.float32, torch.device("cpu")),
        s(torch.tensor(3), 1, [2, 8, 4], [0, 0, 0], [2, 8, 4], torch.float64, torch.device("cpu")),
    ],
    # Of the pointwise family, by tag: a few that stand for all.
    aten.exp.default: [s(x(4, 6)), s(x(7, 5))],
    aten.maximum.default: [s(x(4, 6), x(6))],
    aten.addcmul.default: [s(x(4, 6), x(4, 6), x(4, 6), value=0.5)],
    aten.eq.Tensor: [s(ints(3, 4, 6), ints(3, 4, 6))],
}
