"""Operators that repeat, roll, window or embed elements along some dimensions and keep the others."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, dim_names, mixing, rule, together

aten = torch.ops.aten


def _rolled(operands: Operands) -> set[int]:
    # Without dimensions it rolls the flattened tensor.
    return set(operands["dims"]) or set(range(operands.inputs[0].dim()))


rule(aten.roll.default, mixing(_rolled), linear=(0,))
rule(aten.glu.default, mixing(lambda operands: {operands["dim"]}))
rule(aten.glu_backward.default, mixing(lambda operands: {operands["dim"]}), linear=(0,))
for _operator in (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default):
    rule(_operator, mixing(lambda operands: set(operands["dim"])), linear=(0,))


def _unfolded(operands: Operands) -> str:
    whole, windows = _whole_and_windows(operands.inputs[0].dim(), operands["dimension"])
    return f"{whole} -> {windows}"


def _folded(operands: Operands) -> str:
    whole, windows = _whole_and_windows(operands.outputs[0].dim(), operands["dim"])
    return f"{windows} -> {whole}"


def _whole_and_windows(rank: int, dim: int) -> tuple[str, str]:
    names = [f"{name}!" if rank and i == dim % rank else name for i, name in enumerate(dim_names(rank))]
    return " ".join(names), " ".join(["windows!" if name.endswith("!") else name for name in names] + ["size!"])


rule(aten.unfold.default, _unfolded, linear=(0,))
rule(aten.unfold_backward.default, _folded, linear=(0,))


def _diagonal(operands: Operands) -> str:
    matrix, line = _matrix_and_diagonal(operands, operands.inputs[0].dim())
    return f"{matrix} -> {line}"


def _from_diagonal(operands: Operands) -> str:
    matrix, line = _matrix_and_diagonal(operands, operands.outputs[0].dim())
    return f"{line} -> {matrix}"


def _onto_diagonal(operands: Operands) -> str:
    matrix, line = _matrix_and_diagonal(operands, operands.inputs[0].dim())
    return f"{matrix}, {line} -> {matrix}"


def _matrix_and_diagonal(operands: Operands, rank: int) -> tuple[str, str]:
    matrix = {operands["dim1"] % rank, operands["dim2"] % rank}
    others = [name for i, name in enumerate(dim_names(rank)) if i not in matrix]
    return " ".join(f"{n}!" if i in matrix else n for i, n in enumerate(dim_names(rank))), " ".join(
        [*others, "diagonal!"]
    )


rule(aten.diagonal.default, _diagonal, linear=(0,))
rule(aten.diagonal_copy.default, _diagonal, linear=(0,))
rule(aten.diagonal_backward.default, _from_diagonal, linear=(0,))
rule(aten.diag_embed.default, _from_diagonal, linear=(0,))
rule(aten.diagonal_scatter.default, _onto_diagonal, linear=together(0, 1))
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
