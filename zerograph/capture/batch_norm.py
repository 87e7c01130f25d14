"""Batch norm whose statistics are those of each rank's part of the batch, as global mathematics.

The batch is seen as groups of consecutive samples, one for each rank: statistics have a group dimension, which is split
as the batch is, so that nothing is exchanged but what the running statistics need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import CaptureError

aten = torch.ops.aten


def grouped(groups: int, plain: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions of batch norm over ``groups`` parts of the batch; of what knows no batch, the ``plain`` ones."""

    def native(
        x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
    ) -> Any:
        if _whole(x, training):
            return plain[aten.native_batch_norm.default](x, weight, bias, mean, var, training, momentum, eps)
        return _forward(groups, x, weight, bias, mean, var, momentum, eps)

    def native_backward(
        gradient: Tensor, x: Tensor, weight: Any, mean: Any, var: Any, saved: Any, rstd: Any, training: bool, *rest: Any
    ) -> Any:
        if _whole(x, training):
            operator = plain[aten.native_batch_norm_backward.default]
            return operator(gradient, x, weight, mean, var, saved, rstd, training, *rest)
        return _backward(groups, gradient, x, weight, saved, rstd)

    def cudnn(
        x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
    ) -> Any:
        if _whole(x, training):
            return plain[aten.cudnn_batch_norm.default](x, weight, bias, mean, var, training, momentum, eps)
        return *_forward(groups, x, weight, bias, mean, var, momentum, eps), x.new_zeros(0, dtype=torch.uint8)

    def cudnn_backward(
        x: Tensor, gradient: Tensor, weight: Any, mean: Any, var: Any, saved: Any, rstd: Any, *rest: Any
    ) -> Any:
        # Of cudnn's kernel there is a backward in training only.
        if _whole(x, True):
            operator = plain[aten.cudnn_batch_norm_backward.default]
            return operator(x, gradient, weight, mean, var, saved, rstd, *rest)
        return _backward(groups, gradient, x, weight, saved, rstd)

    return {
        aten.native_batch_norm.default: native,
        aten.native_batch_norm_backward.default: native_backward,
        aten.cudnn_batch_norm.default: cudnn,
        aten.cudnn_batch_norm_backward.default: cudnn_backward,
    }


def _whole(x: Tensor, training: bool) -> bool:
    """In evaluation there are no statistics of a batch; instance norm lays samples and channels in one dimension."""
    return not training or len(x) == 1


def _forward(
    groups: int, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and reciprocal deviation of each group and channel."""
    parts = _parted(groups, x)
    dims, count = _others(parts), parts.numel() // (groups * parts.shape[2])
    if count == 1:
        # As torch.nn.functional.batch_norm refuses it, which here has seen all parts at once.
        raise CaptureError(
            f"batch norm of {len(x)} samples in {groups} parts, with config.batch_norm = 'local': a single value of a "
            "channel has no variance\nGive each rank's micro-batches more than one sample, or set config.batch_norm to "
            "'global'."
        )
    mean = parts.sum(dims, keepdim=True) / count
    var = (parts - mean).square().sum(dims, keepdim=True) / count
    rstd = (var + eps).rsqrt()
    out = ((parts - mean) * rstd).reshape(x.shape)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    unbiased = var * (count / (count - 1))
    for running, each in ((running_mean, mean), (running_var, unbiased)):
        if running is not None:
            new = each.reshape(groups, -1).sum(0) / groups
            running.copy_(running * (1 - momentum) + new * momentum)
    return out.to(x.dtype), mean.reshape(groups, -1), rstd.reshape(groups, -1)


def _backward(
    groups: int, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    parts, given = _parted(groups, x), _parted(groups, gradient)
    dims, count = _others(parts), parts.numel() // (groups * parts.shape[2])
    shape = [groups, 1, -1] + [1] * (x.dim() - 2)
    mean, rstd = mean.reshape(shape), rstd.reshape(shape)
    normed = (parts - mean) * rstd
    total, along = given.sum(dims, keepdim=True), (given * normed).sum(dims, keepdim=True)
    slope = (given - total / count - normed * (along / count)) * rstd
    if weight is not None:
        slope = slope * weight.reshape(shape[1:])
    sums = [one.reshape(groups, -1).sum(0) for one in (along, total)]
    return slope.reshape(x.shape).to(x.dtype), sums[0], sums[1]


def _parted(groups: int, x: Tensor) -> Tensor:
    if len(x) % groups:
        raise CaptureError(
            f"batch norm of {len(x)} samples, which {groups} parts do not divide, with config.batch_norm = 'local'\n"
            "Each rank normalises its own part, micro-batch by micro-batch: give each as many samples, or set "
            "config.batch_norm = 'global'."
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape([groups, len(x) // groups, *x.shape[1:]])


def _others(parts: Tensor) -> list[int]:
    """All dimensions but groups and channels."""
    return [1, *range(3, parts.dim())]
