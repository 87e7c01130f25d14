"""Measures of a predicted step's speed: tokens, floating-point operations, and the device's peak rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta
from zerograph.ir.sizes import elements
from zerograph.ir.step_graph import runs
from zerograph.ops.flex_attention import flex_attention_backward
from zerograph.passes.recompute.cost import flops
from zerograph.planner.machine import Machine


def tokens(batch: Iterable[Tensor]) -> int | None:
    """Return the number of elements of the first integer tensor [samples, ...]; None if there is none."""
    integers = (tensor for tensor in batch if tensor.dim() >= 2 and tensor.dtype in (torch.int64, torch.int32))
    return next(map(elements, integers), None)


def operations(graph: fx.Graph, count: Callable[[fx.Node], int]) -> int:
    """Return the operations of a rank's step.

    Args:
        graph: the emitted graph.
        count: operations of a node: :func:`zerograph.passes.recompute.cost.flops` or :func:`model_flops`.
    """
    return sum(times * count(node) for node, times in runs(graph) if node.op == "call_function")


def model_flops(node: fx.Node) -> int:
    """Return the operations of the model's mathematics: none for recomputed nodes."""
    if meta(node).get("recomputed"):
        return 0
    count = flops(node)
    if node.target is flex_attention_backward:
        # Two of its six products are forward's.
        return count * 2 // 3
    # One of its five products recomputes the scores.
    return count * 4 // 5 if "scaled_dot_product" in str(node.target) and "backward" in str(node.target) else count


def peak_rate(machine: Machine, buckets: Sequence[Bucket], low: torch.dtype | None) -> float | None:
    """Return the data sheet's rate in the compute dtype of most parameters; None if it is not listed.

    Args:
        low: compute dtype of mixed precision, or None.
    """
    if low is None:
        sizes: Counter[torch.dtype] = Counter()
        for bucket in buckets:
            sizes[bucket.dtype] += math.prod(bucket.shape)
        low = max(sizes, key=sizes.__getitem__, default=torch.float32)
    return machine.device.peaks.get(str(low).removeprefix("torch."))
