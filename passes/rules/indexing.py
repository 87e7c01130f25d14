"""Operators that look elements up by index, and their transposes."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, rule

aten = torch.ops.aten

rule(aten.embedding.default, "v! c, ... -> ... c", linear=(0,))


def _embedding_backward(operands: Operands) -> str:
    # Scaled by how often a token occurs in the batch, the parts do not add up to the whole.
    index = "...!" if operands["scale_grad_by_freq"] else "..."
    return f"{index} c, {index} -> v! c"


rule(aten.embedding_dense_backward.default, _embedding_backward, linear=(0,))


def _gathered(operands: Operands) -> str:
    source, index = operands.inputs
    dim = operands["dim"] % source.dim()
    same = [a == b for a, b in zip(source.shape, index.shape, strict=True)]
    return f"{_line('s', dim, same)}, {_line('i', dim, same)} -> {_line('i', dim, same)}"


def _scattered(operands: Operands) -> str:
    source = operands.inputs[0]
    dim = operands["dim"] % source.dim()
    others = operands.inputs[1:]
    same = [all(a == v.shape[i] for v in others) for i, a in enumerate(source.shape)]
    rest = ", ".join(_line("i", dim, same) for _ in others)
    return f"{_line('s', dim, same)}, {rest} -> {_line('s', dim, same)}"


def _line(prefix: str, dim: int, same: list[bool]) -> str:
    """Dimensions that all operands walk together are factors; the indexed one, and cut ones, stay whole."""
    return " ".join(f"d{i}" if i != dim and equal else f"{prefix}{i}!" for i, equal in enumerate(same))


rule(aten.gather.default, _gathered, linear=(0,))
rule(aten.scatter.value, _scattered)
rule(aten.scatter.src, _scattered, linear=((0, 2),))
rule(aten.scatter_add.default, _scattered, linear=((0, 2),))


def _index_selected(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    source = " ".join("v!" if i == dim else f"d{i}" for i in range(rank))
    result = " ".join("picked" if i == dim else f"d{i}" for i in range(rank))
    return f"{source}, picked -> {result}"


rule(aten.index_select.default, _index_selected, linear=(0,))
