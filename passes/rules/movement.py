"""Operators that repeat, roll, window or embed elements along some dimensions and keep the others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerograph.passes.rules.registry import Operands, dim_names, mixing, rule, together, with_dim

aten = torch.ops.aten


def _rolled(operands: Operands) -> set[int]:
    # Without dimensions it rolls the flattened tensor.
    return set(operands["dims"]) or set(range(operands.inputs[0].dim()))


rule(aten.roll.default, mixing(_rolled), linear=(0,))
rule(aten.glu.default, mixing(lambda operands: {operands["dim"]}))
rule(aten.glu_backward.default, mixing(lambda operands: {operands["dim"]}), linear=(0,))
for _operator in (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default):
    rule(_operator, mixing(lambda operands: set(operands["dim"])), linear=(0,))


def _whole_and_windows(rank: int, dim: int) -> list[str]:
    dim %= max(rank, 1)
    return [with_dim(rank, dim, "whole!"), f"{with_dim(rank, dim, 'windows!')} size!"]


def _unfolded(operands: Operands) -> str:
    return " -> ".join(_whole_and_windows(operands.inputs[0].dim(), operands["dimension"]))


def _folded(operands: Operands) -> str:
    return " -> ".join(reversed(_whole_and_windows(operands.outputs[0].dim(), operands["dim"])))


rule(aten.unfold.default, _unfolded, linear=(0,))
rule(aten.unfold_backward.default, _folded, linear=(0,))


def _diagonal(form: str) -> Callable[[Operands], str]:
    """Return a notation of matrices and their diagonals, in this form."""

    def notation(operands: Operands) -> str:
        rank = max(value.dim() for value in (*operands.inputs, *operands.outputs))
        dims = {operands["dim1"] % rank, operands["dim2"] % rank}
        names = list(enumerate(dim_names(rank)))
        matrix = " ".join(f"{name}!" if i in dims else name for i, name in names)
        return form.format(matrix=matrix, line=" ".join([*(name for i, name in names if i not in dims), "diagonal!"]))

    return notation


rule(aten.diagonal.default, _diagonal("{matrix} -> {line}"), linear=(0,))
rule(aten.diagonal_copy.default, _diagonal("{matrix} -> {line}"), linear=(0,))
rule(aten.diagonal_backward.default, _diagonal("{line} -> {matrix}"), linear=(0,))
rule(aten.diag_embed.default, _diagonal("{line} -> {matrix}"), linear=(0,))
rule(aten.diagonal_scatter.default, _diagonal("{matrix}, {line} -> {matrix}"), linear=together(0, 1))
rule(aten.trace.default, "i! j! -> ", linear=(0,))


def _turned(operands: Operands) -> str:
    letters = dim_names(operands.inputs[0].dim())
    first, second = (dim % len(letters) for dim in operands["dims"])
    left = [f"{name}!" if i in (first, second) else name for i, name in enumerate(letters)]
    right = list(left)
    if operands["k"] % 2:
        right[first], right[second] = left[second], left[first]
    return f"{' '.join(left)} -> {' '.join(right)}"


rule(aten.rot90.default, _turned, linear=(0,))
