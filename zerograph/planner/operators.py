"""Operators with which `calibrate` measures a device: products, and one operator of each memory-bound kind.

Each function creates fresh arguments and returns a call with its bytes and operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import sdpa_flop_count

Run = Callable[[], Any]
# (number of elements, device) -> (call, bytes that it reads and writes).
Operator = Callable[[int, torch.device], tuple[Run, int]]
# device -> (call, bytes that it reads and writes, operations of each product in it).
Product = Callable[[torch.device], tuple[Run, int, Sequence[float]]]


def linear(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Run, int, float]:
    """Return a linear layer with both gradients: input [width / 2, width], weight [2 * width, width].

    Returns:
        The call, the bytes that it reads and writes, and the operations of each of its three products.
    """
    x, w, g = (
        torch.randn(rows, columns, device=device).to(dtype)
        for rows, columns in ((width // 2, width), (2 * width, width), (width // 2, 2 * width))
    )
    return lambda: (x @ w.t(), g @ w, g.t() @ x), 7 * width**2 * dtype.itemsize, 2.0 * width**3


def _convolution(device: torch.device) -> tuple[Run, int, Sequence[float]]:
    """Return four 3x3 convolutions of a residual network, from wide images of few channels to small ones of many."""
    aten = torch.ops.aten
    runs: list[Run] = []
    count, operations = 0, []
    for channels, side in ((64, 32), (128, 16), (256, 8), (512, 4)):
        x, g = (torch.randn(8, channels, side, side, device=device) for _ in range(2))
        w = torch.randn(channels, channels, 3, 3, device=device)
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        runs += [
            functools.partial(aten.convolution, x, w, None, *options),
            functools.partial(aten.convolution_backward, g, x, w, None, *options, [True, True, False]),
        ]
        count += 4 * (4 * x.numel() + 2 * w.numel())
        once = 2.0 * x.numel() * channels * 9
        operations += [once, 2 * once]
    return lambda: [run() for run in runs], count, operations


def _attention(device: torch.device) -> tuple[Run, int, Sequence[float]]:
    """Return causal attention over four sequences of 256 tokens, with eight heads of width 64."""
    q, k, v = (torch.randn(4, 8, 256, 64, device=device, requires_grad=True) for _ in range(3))
    g = torch.randn_like(q)

    def run() -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g)

    once = float(sdpa_flop_count(q.shape, k.shape, v.shape))
    return run, 8 * q.numel() * 4, (once, 2.5 * once)


PRODUCTS: dict[str, Product] = {"convolution": _convolution, "attention": _attention}


def _add(numel: int, device: torch.device) -> tuple[Run, int]:
    a, b = torch.randn(numel, device=device), torch.randn(numel, device=device)
    return lambda: a + b, 12 * numel


def _gelu(numel: int, device: torch.device) -> tuple[Run, int]:
    a = torch.randn(numel, device=device)
    return lambda: F.gelu(a), 8 * numel


def _norm(numel: int, device: torch.device) -> tuple[Run, int]:
    a = torch.randn(numel // 256, 256, device=device)
    return lambda: F.layer_norm(a, (256,)), 8 * numel


def _lookup(numel: int, device: torch.device) -> tuple[Run, int]:
    table = torch.randn(8192, 256, device=device)
    rows = torch.randint(8192, (max(numel // 256, 1),), device=device)
    return lambda: F.embedding(rows, table), 8 * numel


def _sum(numel: int, device: torch.device) -> tuple[Run, int]:
    a = torch.randn(numel // 256, 256, device=device)
    return lambda: a.sum(0), 4 * numel


def _update(numel: int, device: torch.device) -> tuple[Run, int]:
    parameter = torch.nn.Parameter(torch.zeros(numel, device=device))
    parameter.grad = torch.ones(numel, device=device)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return optimizer.step, 16 * numel


OPERATORS: dict[str, Operator] = {
    "memory": _add,
    "transcendental": _gelu,
    "norm": _norm,
    "indexing": _lookup,
    "reduction": _sum,
    "update": _update,
}
