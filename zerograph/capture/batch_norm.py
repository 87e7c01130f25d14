"""Batch norm with the statistics of each rank's part of the batch, in terms of global tensors.

The batch is a sequence of groups of consecutive samples, one for each rank. Statistics have a group dimension, which is
split as the batch is, so that only the running statistics need communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import CaptureError

aten = torch.ops.aten


def grouped(groups: int, plain: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of batch norm over groups of the batch.

    Args:
        groups: number of groups.
        plain: decompositions for evaluation mode and instance norm.
    """

    def without_groups(x: Tensor, training: bool) -> bool:
        """Return True in evaluation, which has no batch statistics, and for instance norm, whose batch size is 1."""
        return not training or len(x) == 1

    def forward(operator: Any, *args: Any) -> Any:
        x, weight, bias, mean, var, training, momentum, eps = args
        if without_groups(x, training):
            return plain[operator](*args)
        result = _forward(groups, x, weight, bias, mean, var, momentum, eps)
        return result if operator is aten.native_batch_norm.default else (*result, x.new_zeros(0, dtype=torch.uint8))

    def backward(operator: Any, *args: Any) -> Any:
        first, second, weight, _, _, saved, rstd, training, *_ = args
        # The cudnn kernel has a backward for training only, and takes the input first.
        is_cudnn = operator is aten.cudnn_batch_norm_backward.default
        x, gradient = (first, second) if is_cudnn else (second, first)
        if without_groups(x, is_cudnn or training):
            return plain[operator](*args)
        return _backward(groups, gradient, x, weight, saved, rstd)

    both = {
        forward: (aten.native_batch_norm.default, aten.cudnn_batch_norm.default),
        backward: (aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default),
    }
    return {one: functools.partial(run, one) for run, operators in both.items() for one in operators}


def _forward(
    groups: int, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and mean and reciprocal deviation [groups, channels]."""
    parts = _grouped(groups, x)
    dims, count = _reduced_dims(parts), parts.numel() // (groups * parts.shape[2])
    if count == 1:
        # As torch.nn.functional.batch_norm does, which only sees the whole batch.
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
    for running, statistic in ((running_mean, mean), (running_var, unbiased)):
        if running is not None:
            new = statistic.reshape(groups, -1).sum(0) / groups
            running.copy_(running * (1 - momentum) + new * momentum)
    return out.to(x.dtype), mean.reshape(groups, -1), rstd.reshape(groups, -1)


def _backward(
    groups: int, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    parts, grad = _grouped(groups, x), _grouped(groups, gradient)
    dims, count = _reduced_dims(parts), parts.numel() // (groups * parts.shape[2])
    shape = [groups, 1, -1] + [1] * (x.dim() - 2)
    mean, rstd = mean.reshape(shape), rstd.reshape(shape)
    normed = (parts - mean) * rstd
    total, projected = grad.sum(dims, keepdim=True), (grad * normed).sum(dims, keepdim=True)
    grad_input = (grad - total / count - normed * (projected / count)) * rstd
    if weight is not None:
        grad_input = grad_input * weight.reshape(shape[1:])
    grad_weight, grad_bias = (value.reshape(groups, -1).sum(0) for value in (projected, total))
    return grad_input.reshape(x.shape).to(x.dtype), grad_weight, grad_bias


def _grouped(groups: int, x: Tensor) -> Tensor:
    """Return ``x`` in at least fp32 as [groups, samples, channels, ...]."""
    if groups > 1 and not isinstance(x.shape[0], int):
        raise CaptureError(
            f"config.batch_norm = 'local' needs {groups} parts of one size, which does not change between calls\n"
            "Give each rank as many samples, and each micro-batch, or set config.batch_norm = 'global'."
        )
    if len(x) % groups:
        raise CaptureError(
            f"batch norm of {len(x)} samples, which {groups} parts do not divide, with config.batch_norm = 'local'\n"
            "Each rank normalises its own part, micro-batch by micro-batch: give each as many samples, or set "
            "config.batch_norm = 'global'."
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape([groups, len(x) // groups, *x.shape[1:]])


def _reduced_dims(parts: Tensor) -> list[int]:
    """Return all dimensions except groups and channels."""
    return [1, *range(3, parts.dim())]
