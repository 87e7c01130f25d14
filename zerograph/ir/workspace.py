"""Workspace: memory that a kernel takes beside its results and gives back, where that is as large as its operands.

Convolutions on the CPU: oneDNN works on blocks of channels, and lays its operands so in copies; without it (fp64) torch
writes out the columns that each weight is multiplied with. In the resident size of a process with torch 2.13 these
forms are within 10 % for kernels of 1x1 to 7x7, grouped, depthwise, of one to three dimensions, in fp32 and bf16.
Transposed ones, and the gradient of the input of strided ones, take up to twice as much. That of other operators is
small, and of accelerators it is not known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from zerograph.ir.step_graph import nbytes

aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that the node's kernel takes while it runs, beside its operands and results."""
    if node.target is aten.convolution.default:
        x, weight, out = *_values(node, 2), node.meta["val"]
        return _forward(x, weight, out) if _blocked(x) else _columns(x, weight, out)
    if node.target is aten.convolution_backward.default:
        out, x, weight = _values(node, 3)
        return max(nbytes(x) + nbytes(out), nbytes(weight)) if _blocked(x) else _columns(x, weight, out)
    return 0


def _forward(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """The operands are copied before, the result behind."""
    return max(nbytes(x) + nbytes(weight), nbytes(out))


def _columns(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Of each place of the result what the kernel covers there; one that covers a single place reads it directly."""
    if x.device.type != "cpu" or x.dtype != torch.float64:
        return 0
    covered = math.prod(weight.shape[2:])
    return 0 if covered == 1 else x.shape[0] * x.shape[1] * covered * math.prod(out.shape[2:]) * x.itemsize


def _blocked(x: Tensor) -> bool:
    """Whether oneDNN computes it, from a layout that is not its own: channels that lie last stay where they are."""
    if x.device.type != "cpu" or x.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
        return False
    return x.is_contiguous() or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last)


def _values(node: fx.Node, count: int) -> list[Tensor]:
    given = node.args[:count]
    return [one.meta["val"] for one in given if isinstance(one, fx.Node)]
