"""More sample arguments: operators that plain PyTorch's layers and losses reach, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.passes.samples import Sample, ints, s, x
from zerograph.ops.attention import repeat_heads, sum_heads
from zerograph.ops.ctc_loss import CTC_LOSS, CTC_LOSS_BACKWARD
from zerograph.ops.dispatch import COMBINE, DISPATCH, GATHER_IDS
from zerograph.ops.experts import EXPERT_MM, EXPERT_MM_SUMMED, EXPERT_WEIGHT_GRADIENT
from zerograph.ops.flex_attention import flex_attention, flex_attention_backward
from zerograph.ops.rows import shift_offsets

aten = torch.ops.aten


def _backwards(operators: tuple[Any, ...], *rest: Any) -> dict[Any, list[Sample]]:
    """For pointwise operators that take a gradient, a value and numbers."""
    return {operator: [s(x(4, 6), x(4, 6), *rest), s(x(8, 3), x(8, 3), *rest)] for operator in operators}


def _flex() -> tuple[Any, ...]:
    """Attention within documents, with a number for each row and a slope for each head; two heads share keys."""
    score = (
        "def mod(score, b, h, q, k, t0, t1, t2): slope = ops.aten.index.Tensor(t1, [h]); "
        "shift = ops.aten.index.Tensor(t2, [b, h]); scaled = ops.aten.mul.Tensor(score, slope); "
        "shifted = ops.aten.mul.Tensor(shift, k); total = ops.aten.add.Tensor(scaled, shifted); return total"
    )
    mask = (
        "def mod(b, h, q, k, t0, t1, t2): i = ops.aten.index.Tensor(t0, [b, q]); "
        "j = ops.aten.index.Tensor(t0, [b, k]); same = ops.aten.eq.Tensor(i, j); return same"
    )
    captured = [ints(3, 4, 6), x(8), x(4, 8)]
    return x(4, 8, 6, 4), x(4, 4, 6, 4), x(4, 4, 6, 2), captured, ["b-", "h", "bh"], score, mask, 0.5


def _log_sigmoid_backward() -> list[Sample]:
    value = x(4, 6)
    return [s(x(4, 6), value, aten.log_sigmoid_forward(value)[1])]


def _pooled(operator: Any, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    value = x(4, 2, *[6] * dims)
    return value, *operator(value, [3] * dims)


def _unpool(dims: int) -> list[Sample]:
    _, out, indices = _pooled(getattr(aten, f"max_pool{dims}d_with_indices"), dims)
    size = list(x(*[6] * dims).shape)
    rest = () if dims == 2 else ([2] * dims, [0] * dims)
    return [s(out, indices, size, *rest)]


def _adaptive_backward(dims: int) -> list[Sample]:
    value, out, indices = _pooled(getattr(aten, f"adaptive_max_pool{dims}d"), dims)
    return [s(x(*out.shape), value, indices)]


def _padding(dims: int, name: str) -> dict[Any, list[Sample]]:
    forward = getattr(aten, f"{name}_pad{dims}d").default
    backward = getattr(aten, f"{name}_pad{dims}d_backward").default
    pad, size = [1, 2] * dims, [5] * dims
    batch, single = x(4, 2, *size), x(4, *size)
    return {
        forward: [s(batch, pad), s(single, pad)],
        backward: [s(x(*forward(one, pad).shape), one, pad) for one in (batch, single)],
    }


def _resampling(name: str, dims: int, *, corners: bool) -> dict[Any, list[Sample]]:
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    small, large = [3] * dims, [6] * dims
    rest = [False] if corners else []
    return {
        forward: [s(x(4, 2, *small), large, *rest)],
        backward: [s(x(4, 2, *large), large, [4, 2, *small], *rest), s(x(6, 4, *large), large, [6, 4, *small], *rest)],
    }


def _grid_sampler(dims: int) -> dict[Any, list[Sample]]:
    image, grid = x(4, 2, *[5] * dims), x(4, *[4] * dims, dims).tanh()
    gradient = x(4, 2, *[4] * dims)
    forward = getattr(aten, f"grid_sampler_{dims}d").default
    backward = getattr(aten, f"grid_sampler_{dims}d_backward").default
    return {
        forward: [s(image, grid, 0, 0, False), s(image, grid, 0, 1, True)],
        backward: [s(gradient, image, grid, 0, 0, False, [True, True])],
    }


def _cdist_backward() -> list[Sample]:
    found = []
    for p in (1.0, 2.0, 3.0):
        first, second = x(4, 6, 3), x(4, 8, 3)
        found.append(s(x(4, 6, 8), first, second, p, aten._cdist_forward(first, second, p, None)))
    return found


def _symmetric(*shape: int) -> Tensor:
    matrix = x(*shape)
    return matrix @ matrix.transpose(-1, -2) + torch.eye(shape[-1], dtype=matrix.dtype)


def _lu() -> tuple[Tensor, Tensor]:
    factors, pivots, _ = aten.linalg_lu_factor_ex(_symmetric(4, 3, 3))
    return factors, pivots


def _margin(reduction: int) -> list[Sample]:
    weight = x(6).exp()
    return [s(x(8, 6), ints(6, 8), 1, 1.0, one, reduction) for one in (None, weight)]


def _labels() -> Tensor:
    """Targets of the multilabel margin loss: the classes of a sample, ended by -1."""
    return torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0], [-1, 0, 0, 0], [0, 1, 2, 3]])


def _multilabel_backward(reduction: int) -> list[Sample]:
    value = x(4, 4)
    out, is_target = aten.multilabel_margin_loss_forward(value, _labels(), reduction)
    return [s(x(*out.shape), value, _labels(), reduction, is_target)]


def _spoken() -> tuple[Tensor, ...]:
    lengths = torch.tensor([7, 6, 7, 5]), torch.tensor([3, 2, 1, 2])
    return x(7, 4, 5).log_softmax(2), 1 + ints(4, 4, 3), *lengths


def _end_to_end() -> tuple[Tensor, ...]:
    log_probs, targets, inputs, lengths = _spoken()
    return log_probs, torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)]), inputs, lengths


_complex = torch.view_as_complex(x(4, 6, 2))

SAMPLES: dict[Any, list[Sample]] = {
    # Pointwise
    **_backwards((aten.hardshrink_backward.default, aten.softshrink_backward.default), 0.5),
    **_backwards((aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.mish_backward.default)),
    **_backwards((aten.hardtanh_backward.default,), -1.0, 1.0),
    **_backwards((aten.leaky_relu_backward.default,), 0.1, False),
    **_backwards((aten.softplus_backward.default,), 1.0, 20.0),
    aten.elu_backward.default: [s(x(4, 6), 1.5, 1.0, 1.0, False, x(4, 6))],
    aten.logit_backward.default: [s(x(4, 6), x(4, 6).sigmoid(), 1e-6)],
    aten.rrelu_with_noise_backward.default: [s(x(4, 6), x(4, 6), x(4, 6), 0.1, 0.3, True, False)],
    aten.hardswish.default: [s(x(4, 6))],
    aten.leaky_relu.default: [s(x(4, 6), 0.1)],
    aten._prelu_kernel.default: [s(x(4, 6), x(1, 6)), s(x(4, 2, 6), x(2, 1))],
    aten._prelu_kernel_backward.default: [s(x(4, 6), x(4, 6), x(1, 6)), s(x(4, 6), x(4, 6), x(4, 6))],
    aten.log_sigmoid_forward.default: [s(x(4, 6)), s(x(8))],
    aten.log_sigmoid_backward.default: _log_sigmoid_backward(),
    aten.lerp.Tensor: [s(x(4, 6), x(4, 6), x(4, 6)), s(x(4, 6), x(4, 6), x(6))],
    aten.addcmul.default: [s(x(4, 6), x(4, 6), x(4, 6), value=0.5), s(x(4, 6), x(4, 1), x(6))],
    aten.addcdiv.default: [s(x(4, 6), x(4, 6), x(4, 6), value=0.5)],
    aten.bucketize.Tensor: [s(x(4, 6), torch.arange(4.0, dtype=torch.float64))],
    aten._conj.default: [s(_complex)],
    aten._conj_physical.default: [s(_complex)],
    aten._neg_view.default: [s(_complex)],
    aten.view_as_real.default: [s(_complex)],
    aten.view_as_complex.default: [s(x(4, 6, 2))],
    aten.complex.default: [s(x(4, 6), x(4, 6))],
    aten.polar.default: [s(x(4, 6), x(4, 6))],
    # Products
    aten.addbmm.default: [s(x(6, 8), x(4, 6, 2), x(4, 2, 8)), s(x(8), x(4, 6, 2), x(4, 2, 8), beta=2, alpha=3)],
    aten.addr.default: [s(x(4, 6), x(4), x(6)), s(x(6), x(4), x(6), beta=2)],
    aten._trilinear.default: [
        s(x(4, 6), x(8, 6, 2), x(4, 2), [1, 3], [0], [1, 2], [2, 3]),
        s(x(4, 6), x(4, 8), x(6, 8), [2], [1], [0], [1]),
    ],
    aten._cdist_forward.default: [s(x(4, 6, 3), x(4, 8, 3), p, None) for p in (1.0, 2.0)]
    + [s(x(6, 3), x(8, 3), 2.0, 1)],
    aten._cdist_backward.default: _cdist_backward(),
    # Many matrices
    aten._linalg_det.default: [s(x(4, 3, 3))],
    aten._linalg_eigh.default: [s(_symmetric(4, 3, 3))],
    aten._linalg_slogdet.default: [s(x(4, 3, 3)), s(x(2, 4, 3, 3))],
    aten._linalg_solve_ex.default: [
        s(_symmetric(4, 3, 3), x(4, 3, 2)),
        s(_symmetric(4, 3, 3), x(4, 3)),
        s(_symmetric(2, 4, 3, 3), x(4, 3, 2)),
        s(_symmetric(2, 3, 3), x(4, 2, 3, 2)),
    ],
    aten._linalg_svd.default: [s(x(4, 3, 2), False)],
    aten.cholesky_inverse.default: [s(torch.linalg.cholesky(_symmetric(4, 3, 3)))],
    aten.linalg_cholesky_ex.default: [s(_symmetric(4, 3, 3))],
    aten.linalg_inv_ex.default: [s(_symmetric(4, 3, 3))],
    aten.linalg_lu_factor_ex.default: [s(_symmetric(4, 3, 3))],
    aten.linalg_lu_solve.default: [s(*_lu(), x(4, 3, 2)), s(*_lu(), x(4, 4, 3, 2)), s(*_lu(), x(3, 2))],
    aten.linalg_matrix_exp.default: [s(x(4, 3, 3))],
    aten.linalg_qr.default: [s(x(4, 3, 3))],
    aten.linalg_solve_triangular.default: [
        s(_symmetric(4, 3, 3).triu(), x(4, 3, 2), upper=True),
        s(_symmetric(2, 4, 3, 3).triu(), x(4, 3, 2), upper=True),
    ],
    # Along a dimension
    aten.aminmax.default: [s(x(4, 6), dim=1), s(x(4, 6), dim=0, keepdim=True)],
    aten.kthvalue.default: [s(x(4, 6), 2, 1), s(x(4, 6), 2, 0, True)],
    aten.median.default: [s(x(4, 6))],
    aten.median.dim: [s(x(4, 6), 1)],
    aten.nanmedian.dim: [s(x(4, 6), 0, True)],
    aten.mode.default: [s(ints(3, 4, 6), 1)],
    aten.cummax.default: [s(x(4, 6), 1), s(x(4, 6), 0)],
    aten.cummin.default: [s(x(4, 6), 1)],
    aten.cumprod.default: [s(x(4, 6), 1)],
    aten.logcumsumexp.default: [s(x(4, 6), 1)],
    aten.sort.stable: [s(x(4, 6), stable=True, dim=1)],
    aten.argsort.default: [s(x(4, 6), 1)],
    aten.argsort.stable: [s(x(4, 6), stable=True, dim=0)],
    aten.renorm.default: [s(x(4, 6), 2, 0, 1.0), s(x(4, 6, 2), 1, 1, 0.5)],
    aten.linalg_cross.default: [s(x(4, 3), x(4, 3)), s(x(3, 8), x(3, 8), dim=0)],
    # Lookup
    aten.scatter_reduce.two: [s(x(4, 6), 1, ints(6, 4, 8), x(4, 8), how) for how in ("sum", "mean", "amax", "prod")]
    + [s(x(6, 4), 0, ints(6, 8, 4), x(8, 4), "amin", include_self=False)],
    aten.index_add.default: [
        s(x(4, 6), 0, ints(4, 8), x(8, 6)),
        s(x(4, 6), 1, ints(6, 4), x(4, 4), alpha=2),
        s(x(6), 0, ints(6, 8), x(8)),
    ],
    shift_offsets: [s(torch.tensor([0, 2, 0, 1]), [2, 2], [4, 3]), s(torch.tensor([0, 2, 5]), [2, 1], [4, 3])],
    aten.index_copy.default: [s(x(4, 6), 1, torch.tensor([0, 2]), x(4, 2))],
    aten.index_fill.int_Scalar: [s(x(4, 6), 1, torch.tensor([0, 2]), v) for v in (0, 1.5)],
    aten.index_fill.int_Tensor: [s(x(4, 6), 0, torch.tensor([0, 2]), x())],
    # Moving elements
    aten.unsafe_split.Tensor: [s(x(4, 6), 2, 1)],
    aten.unsafe_split_with_sizes.default: [s(x(4, 6), [2, 4], 1)],
    aten.unsafe_chunk.default: [s(x(4, 6), 3, 1)],
    aten.roll.default: [s(x(4, 6), [2], [1]), s(x(4, 6), [1]), s(x(4, 6, 8), [1, 2], [0, -1])],
    aten.glu.default: [s(x(4, 6)), s(x(4, 6, 8), 1)],
    aten.glu_backward.default: [s(x(4, 3), x(4, 6), -1), s(x(4, 3, 8), x(4, 6, 8), 1)],
    aten._fft_r2c.default: [s(x(4, 6), [1], 0, True), s(x(4, 6, 8), [0, 2], 0, False)],
    aten._fft_c2c.default: [s(_complex, [1], 0, True)],
    aten._fft_c2r.default: [s(_complex, [1], 0, 10)],
    aten.unfold.default: [s(x(4, 6), 1, 3, 2), s(x(4, 6), 0, 2, 1)],
    aten.unfold_backward.default: [s(x(4, 2, 3), [4, 6], 1, 3, 2), s(x(3, 6, 2), [4, 6], 0, 2, 1)],
    aten.diagonal.default: [s(x(4, 6, 6), 0, 1, 2), s(x(4, 6, 4), 1, 0, -1)],
    aten.diagonal_copy.default: [s(x(4, 6, 6), 0, 1, 2)],
    aten.diagonal_backward.default: [s(x(4, 6), [4, 6, 6], 0, 1, 2), s(x(4, 3), [5, 4, 3], 0, 0, 2)],
    aten.diag_embed.default: [s(x(4, 6)), s(x(4, 6), 1, 0, 2)],
    aten.diagonal_scatter.default: [s(x(4, 6, 6), x(4, 6), 0, 1, 2)],
    aten.trace.default: [s(x(4, 6))],
    aten.rot90.default: [s(x(4, 6, 8), 1, [1, 2]), s(x(4, 6, 8), 2, [0, 2])],
    # Images
    aten.adaptive_max_pool2d.default: [s(x(4, 2, 6, 6), [3, 2]), s(x(4, 6, 6), [3, 2])],
    aten.adaptive_max_pool3d.default: [s(x(4, 2, 6, 6, 6), [3, 3, 2]), s(x(4, 6, 6, 6), [3, 3, 2])],
    aten.adaptive_max_pool2d_backward.default: _adaptive_backward(2),
    aten.adaptive_max_pool3d_backward.default: _adaptive_backward(3),
    aten._adaptive_avg_pool3d.default: [s(x(4, 2, 6, 6, 6), [3, 3, 2]), s(x(4, 6, 6, 6), [3, 3, 2])],
    aten._adaptive_avg_pool3d_backward.default: [s(x(4, 2, 3, 3, 2), x(4, 2, 6, 6, 6))],
    aten.max_unpool2d.default: _unpool(2),
    aten.max_unpool3d.default: _unpool(3),
    **_padding(1, "reflection"),
    **_padding(2, "reflection"),
    **_padding(3, "reflection"),
    **_padding(1, "replication"),
    **_padding(2, "replication"),
    **_padding(3, "replication"),
    **_resampling("upsample_nearest1d", 1, corners=False),
    **_resampling("upsample_nearest3d", 3, corners=False),
    **_resampling("_upsample_nearest_exact1d", 1, corners=False),
    **_resampling("_upsample_nearest_exact2d", 2, corners=False),
    **_resampling("_upsample_nearest_exact3d", 3, corners=False),
    **_resampling("upsample_linear1d", 1, corners=True),
    **_resampling("upsample_trilinear3d", 3, corners=True),
    **_resampling("upsample_bicubic2d", 2, corners=True),
    **_resampling("_upsample_bilinear2d_aa", 2, corners=True),
    **_resampling("_upsample_bicubic2d_aa", 2, corners=True),
    **_grid_sampler(2),
    **_grid_sampler(3),
    aten.affine_grid_generator.default: [s(x(4, 2, 3), [4, 2, 3, 5], False), s(x(4, 3, 4), [4, 1, 2, 3, 5], True)],
    aten.pixel_shuffle.default: [s(x(4, 8, 3, 3), 2), s(x(2, 4, 4, 3, 3), 2)],
    aten.pixel_unshuffle.default: [s(x(4, 2, 6, 6), 2)],
    aten.channel_shuffle.default: [s(x(4, 6, 3, 3), 2)],
    aten.im2col.default: [
        s(x(4, 2, 6, 6), [3, 3], [1, 1], [1, 1], [1, 1]),
        s(x(2, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    aten.col2im.default: [
        s(x(4, 8, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
        s(x(8, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    # Losses
    aten.multi_margin_loss.default: _margin(0) + _margin(1),
    aten.multi_margin_loss_backward.default: [
        s(x(8), x(8, 6), ints(6, 8), 1, 1.0, None, 0),
        s(x(8), x(8, 6), ints(6, 8), 2, 1.0, x(6).exp(), 0),
        s(x(), x(8, 6), ints(6, 8), 1, 1.0, None, 1),
    ],
    aten.multilabel_margin_loss_forward.default: [s(x(4, 4), _labels(), reduction) for reduction in (0, 1)],
    aten.multilabel_margin_loss_backward.default: _multilabel_backward(0) + _multilabel_backward(2),
    flex_attention: [s(*_flex())],
    flex_attention_backward: [s(x(4, 8, 6, 2), None, *_flex(), []), s(x(4, 8, 6, 2), x(4, 8, 6), *_flex(), [1, 2])],
    EXPERT_MM: [s(x(4, 3), x(2, 2, 3, 8), ints(4, 4, 2), 4, 0), s(x(2, 4, 2, 3), x(2, 3, 3, 4), ints(6, 4, 2), 6, 0)],
    EXPERT_MM_SUMMED: [s(x(2, 4, 2, 3), x(2, 2, 3, 8), ints(4, 4, 2), 4, 0)],
    EXPERT_WEIGHT_GRADIENT: [
        s(x(4, 3), x(2, 4, 2, 8), ints(4, 4, 2), 2, 4, 0),
        s(x(2, 4, 2, 3), x(2, 4, 2, 4), ints(4, 4, 2), 2, 4, 0),
        s(x(2, 4, 3), x(2, 4, 2, 4), ints(4, 4, 2), 2, 4, 0),
    ],
    GATHER_IDS: [s(ints(4, 4, 2))],
    DISPATCH: [s(x(4, 3), ints(4, 4, 2), 4, 4)],
    COMBINE: [s(x(4, 8, 3), ints(4, 8, 2), 4)],
    repeat_heads: [s(x(2, 4, 6, 3), 2), s(x(4, 3, 2, 3), 4)],
    sum_heads: [s(x(2, 8, 6, 3), 2), s(x(4, 12, 2, 3), 4)],
    CTC_LOSS: [s(*_spoken(), 0, True), s(*_end_to_end(), 0, False)],
    CTC_LOSS_BACKWARD: [s(x(4), *_spoken(), 0, True), s(x(4), *_end_to_end(), 0, False)],
}
