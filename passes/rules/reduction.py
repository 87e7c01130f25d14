"""Reductions: a sum over a split factor is a partial sum, any other reduction needs the factor whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerograph.passes.rules.registry import Operands, dim_names, mixing, rule

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
        letters = dim_names(operands.inputs[0].dim())
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
    aten._is_all_true.default,
    aten._is_any_true.default,
    aten.prod.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten.aminmax.default,
    aten.kthvalue.default,
    aten.median.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
):
    rule(_operator, _reduce(False))


# Operators that run along one dimension and keep the others.
_along = mixing(lambda operands: {operands["dim"]})
rule(aten._softmax.default, _along)
rule(aten._safe_softmax.default, _along)
rule(aten._log_softmax.default, _along)
for _operator in (
    aten.cummax.default,
    aten.cummin.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
):
    rule(_operator, _along)
rule(aten._softmax_backward_data.default, _along, linear=(0,))
rule(aten._log_softmax_backward_data.default, _along, linear=(0,))
rule(aten.histc.default, lambda operands: _counted(operands))
rule(aten.cumsum.default, _along, linear=(0,))
rule(aten.flip.default, mixing(lambda operands: operands["dims"]), linear=(0,))
rule(aten.sort.default, _along)
rule(aten.topk.default, _along)


def _counted(operands: Operands) -> str:
    """Return the notation of a histogram: counts of parts add up if the range of the bins is fixed."""
    fixed = operands["min"] != operands["max"]
    source = " ".join(name if fixed else f"{name}!" for name in dim_names(operands.inputs[0].dim()))
    return f"{source} -> bins!"


# One norm for each slice along the dimension.
rule(aten.renorm.default, mixing(lambda operands: {*range(operands.inputs[0].dim())} - _reduced_dims(operands, "dim")))
rule(aten.linalg_cross.default, _along, linear=(0, 1))
