"""Reductions: a sum over a split factor is a partial sum, anything else needs the factor whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerograph.passes.rules.registry import Operands, rule
from zerograph.passes.rules.registry import letters as _letters

aten = torch.ops.aten


def _reduced_dims(operands: Operands, argument: str) -> set[int]:
    rank = operands.inputs[0].dim()
    dims = operands.arguments.get(argument)
    if dims is None or dims == []:
        return set(range(rank))
    return {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)} if rank else set()


def _reduce(splittable: bool, argument: str = "dim") -> Callable[[Operands], str]:
    def notation(operands: Operands) -> str:
        reduced = _reduced_dims(operands, argument)
        letters = _letters(operands.inputs[0].dim())
        source = " ".join(name if splittable or i not in reduced else f"{name}!" for i, name in enumerate(letters))
        if operands.arguments.get("keepdim"):
            result = " ".join("1" if i in reduced else name for i, name in enumerate(letters))
        else:
            result = " ".join(name for i, name in enumerate(letters) if i not in reduced)
        return f"{source} -> " + ", ".join([result] * len(operands.outputs))

    return notation


rule(aten.sum.default, _reduce(True), linear=(0,))
rule(aten.sum.dim_IntList, _reduce(True), linear=(0,))
for _operator in (
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
    aten.any.default,
    aten.any.dim,
    aten.all.default,
    aten.all.dim,
    aten.prod.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
):
    rule(_operator, _reduce(False))


def along(argument: str = "dim", operands_with_dim: int = 1) -> Callable[[Operands], str]:
    """Operators that run along one dimension and keep the shape: softmax, cumsum, sort."""

    def notation(operands: Operands) -> str:
        rank = operands.inputs[0].dim()
        dim = operands[argument] % rank if rank else 0
        text = " ".join(f"{name}!" if i == dim else name for i, name in enumerate(_letters(rank)))
        inputs = [text if value.dim() == rank else "" for value in operands.inputs]
        return ", ".join(inputs) + " -> " + ", ".join([text] * len(operands.outputs))

    return notation


rule(aten._softmax.default, along())
rule(aten._safe_softmax.default, along())
rule(aten._log_softmax.default, along())
rule(aten._softmax_backward_data.default, along(), linear=(0,))
rule(aten._log_softmax_backward_data.default, along(), linear=(0,))
rule(aten.histc.default, lambda operands: _counted(operands))
rule(aten.cumsum.default, along(), linear=(0,))
rule(aten.flip.default, lambda operands: _flip(operands), linear=(0,))
rule(aten.sort.default, along())
rule(aten.topk.default, lambda operands: _resized(operands))


def _flip(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    flipped = {dim % rank for dim in operands["dims"]}
    text = " ".join(f"{name}!" if i in flipped else name for i, name in enumerate(_letters(rank)))
    return f"{text} -> {text}"


def _resized(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    source = " ".join(f"{name}!" if i == dim else name for i, name in enumerate(_letters(rank)))
    result = " ".join("k!" if i == dim else name for i, name in enumerate(_letters(rank)))
    return f"{source} -> {result}, {result}"


def _counted(operands: Operands) -> str:
    """Counts add up over the parts, unless the bins span from the smallest value to the largest."""
    fixed = operands["min"] != operands["max"]
    source = " ".join(name if fixed else f"{name}!" for name in _letters(operands.inputs[0].dim()))
    return f"{source} -> bins!"
