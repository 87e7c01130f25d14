"""Shapes of operators for which torch computes none with symbolic sizes: their meta kernels are C++ over integers.

``FakeTensorMode._dispatch_impl`` is private. It is the one place where a single mode can be told a shape; torch's own
tables of meta kernels would change for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def _resampled(gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: Any, **__: Any) -> Tensor:
    return gradient.new_empty(input_size)


def _resampled_as_stored(
    gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: Any, **__: Any
) -> Tensor:
    """Keep the memory format of the gradient, channels last or not."""
    return gradient.new_empty(input_size).to(memory_format=suggest_memory_format(gradient))


def _columns(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    *samples, channels, height, width = x.shape
    sizes = zip((height, width), kernel, dilation, padding, stride, strict=True)
    blocks = [(size + 2 * pad - spread * (length - 1) - 1) // step + 1 for size, length, spread, pad, step in sizes]
    return x.new_empty((*samples, channels * kernel[0] * kernel[1], blocks[0] * blocks[1]))


def _images(
    columns: Tensor,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    *samples, rows, _ = columns.shape
    return columns.new_empty((*samples, rows // (kernel[0] * kernel[1]), *output_size))


# Shapes of the results, each computed on tensors or fake tensors.
SYMBOLIC_SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (
            aten.upsample_nearest1d_backward.default,
            aten._upsample_nearest_exact1d_backward.default,
            aten.upsample_linear1d_backward.default,
            aten.upsample_bicubic2d_backward.default,
            aten._upsample_bicubic2d_aa_backward.default,
        ),
        _resampled,
    ),
    **dict.fromkeys(
        (
            aten.upsample_bilinear2d_backward.default,
            aten.upsample_nearest3d_backward.default,
            aten._upsample_nearest_exact3d_backward.default,
            aten.upsample_trilinear3d_backward.default,
        ),
        _resampled_as_stored,
    ),
    aten.im2col.default: _columns,
    aten.col2im.default: _images,
}


def has_symbols(arguments: Any) -> bool:
    """Return whether arguments, nested in lists and dicts, have a symbolic size."""
    if isinstance(arguments, Tensor):
        return any(isinstance(size, torch.SymInt) for size in arguments.shape)
    if isinstance(arguments, dict):
        return any(map(has_symbols, arguments.values()))
    return isinstance(arguments, torch.SymInt) or (
        isinstance(arguments, (list, tuple)) and any(map(has_symbols, arguments))
    )
