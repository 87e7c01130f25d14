"""Scaled dot product attention on accelerators: batch and heads are free, positions and channels are not."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, rule

aten = torch.ops.aten


def _attention(operands: Operands) -> str:
    """Queries, keys, values, masks and results are of four dimensions, their log-sum-exp of three or four.

    The state of a random generator is whole. Heads that several queries share are not split.
    """
    values = (*operands.inputs, *operands.outputs)
    shared = len({value.shape[1] for value in values if value.dim() == 4 and value.shape[1] != 1}) > 1
    lines = []
    for number, value in enumerate(values):
        heads = f"h{number}!" if shared else "h"
        rest = [f"v{number}x{i}!" for i in range(value.dim())]
        lines.append(" ".join(["b", heads, *rest[2:]] if value.dim() in (3, 4) else rest))
    inputs = len(operands.inputs)
    return ", ".join(lines[:inputs]) + " -> " + ", ".join(lines[inputs:])


for _forward, _backward in (
    (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward),
    (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
    (aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward),
):
    rule(_forward.default, _attention)
    rule(_backward.default, _attention, linear=(0,))
