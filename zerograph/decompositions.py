"""Operators rewritten during capture because their global meaning hides in a local kernel.

A mean over a split dimension is not a mean of means, and a batch norm's statistics are those of the whole
batch. Written as sums and divisions, such operators need no rule of their own: the sums become partial, and
the numbers divide by the global count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import decompositions

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions for capture: torch's own where they exist, ours for what they would leave whole."""
    return {
        **decompositions(_FROM_TORCH),
        aten.mean.default: lambda x, dtype=None: _mean(x, None, False, dtype),
        aten.mean.dim: lambda x, dim=None, keepdim=False, dtype=None: _mean(x, dim, keepdim, dtype),
        aten.var.correction: lambda x, dim=None, *, correction=None, keepdim=False: _var_mean(
            x, dim, correction, keepdim
        )[0],
        aten.std.correction: lambda x, dim=None, *, correction=None, keepdim=False: _var_mean(
            x, dim, correction, keepdim
        )[0].sqrt(),
        aten.var_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: _var_mean(
            x, dim, correction, keepdim
        ),
        aten.ones_like.default: _filled_like(1),
        aten.zeros_like.default: _filled_like(0),
        aten.full_like.default: lambda x, fill, **options: _filled_like(fill)(x, **options),
        aten.new_zeros.default: _new_filled(0),
        aten.new_ones.default: _new_filled(1),
        # Memory that a copy is about to fill: full of something, it needs no rule of its own.
        aten.new_empty_strided.default: lambda x, size, stride, **options: _new_filled(0)(x, size, **options),
        aten.repeat.default: _repeat,
        aten.new_full.default: lambda x, size, fill, **options: _new_filled(fill)(x, size, **options),
    }


_FROM_TORCH = [
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten._batch_norm_with_update,
    aten.batch_norm_backward,
    aten.linalg_vector_norm,
    aten.addmv,
    aten.dot,
    aten.select_backward,
    aten.slice_backward,
    aten._safe_softmax,
    aten.native_dropout_backward,
    aten.rrelu_with_noise_backward,
]


def _mean(x: Tensor, dim: Sequence[int] | int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / count


def _var_mean(x: Tensor, dim: Sequence[int] | int | None, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Two passes (mean first): the mean of squares minus the squared mean cancels in fp32."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = _mean(x, dims, True, None)
    squares = aten.sum.dim_IntList((x - mean).square(), dims, keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.squeeze(dims)


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _filled_like(fill: float) -> Callable[..., Tensor]:
    def filled(x: Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return torch.full(x.shape, fill, dtype=dtype or x.dtype, device=device or x.device)

    return filled


def _new_filled(fill: float) -> Callable[..., Tensor]:
    def filled(x: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return torch.full(size, fill, dtype=dtype or x.dtype, device=device or x.device)

    return filled


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """As an expansion, whose dimensions have names."""
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    sizes = list(zip(repeats, shape, strict=True))
    once = x.reshape([part for _, size in sizes for part in (1, size)])
    return once.expand([part for pair in sizes for part in pair]).reshape([times * size for times, size in sizes])
