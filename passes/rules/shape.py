"""Operators that move elements without computing: views, concatenation, slices, constants and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from zerograph.ir.sizes import hints
from zerograph.ops.random import uniform
from zerograph.passes.rules.registry import Operands, dim_names, joined, mixing, rule, together, whole, with_dim

aten = torch.ops.aten


def _mapped(choose: Callable[[Operands, list[str]], Sequence[str]]) -> Callable[[Operands], str]:
    """Return a notation with one letter per input dimension; ``choose`` returns the letters of the output."""

    def notation(operands: Operands) -> str:
        letters = dim_names(operands.inputs[0].dim())
        result = choose(operands, letters)
        return " ".join(letters) + " -> " + " ".join(name.rstrip("!") for name in result)

    return notation


def _swapped(operands: Operands, letters: list[str]) -> list[str]:
    first, second = operands["dim0"], operands["dim1"]
    letters = list(letters)
    if letters:
        letters[first], letters[second] = letters[second], letters[first]
    return letters


def _unsqueezed(operands: Operands, letters: list[str]) -> list[str]:
    dim = operands["dim"] % (len(letters) + 1)
    return [*letters[:dim], "1", *letters[dim:]]


def _squeezed(operands: Operands, letters: list[str]) -> list[str]:
    shape, rank = operands.inputs[0].shape, len(letters)
    dims = operands.arguments.get("dim")
    squeezed = range(rank) if dims is None else sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)})
    # Where an earlier mesh dimension leaves one row, the row stays. Which of two sizes of one stays is all the same.
    ones = [i for i in squeezed if shape[i] == 1][: rank - operands.outputs[0].dim()]
    return [name for i, name in enumerate(letters) if i not in ones]


rule(aten.t.default, _mapped(lambda operands, letters: letters[::-1]), linear=(0,))
rule(aten.transpose.int, _mapped(_swapped), linear=(0,))
rule(aten.permute.default, _mapped(lambda o, letters: [letters[d] for d in o["dims"]]), linear=(0,))
rule(aten.unsqueeze.default, _mapped(_unsqueezed), linear=(0,))
for _operator in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
    rule(_operator, _mapped(_squeezed), linear=(0,))


def _reshaped(operands: Operands) -> str:
    source, target = _common_factors(hints(operands.inputs[0].shape), hints(operands.outputs[0].shape))
    return f"{source} -> {target}"


def _common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[str, str]:
    """Return both shapes as products of the same factors: ``(64, 8)`` to ``(4, 16, 8)`` is ``(a b) c -> a b c``.

    Where sizes do not divide one another, their greatest common divisor is a factor. What remains is not split.
    """
    if math.prod(source) == 0:
        return " ".join(f"s{i}!" for i in range(len(source))), " ".join(f"t{i}!" for i in range(len(target)))
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    i = j = count = 0
    a, b = (source[0] if source else 1), (target[0] if target else 1)
    while i < len(source) and j < len(target):
        if a == 1 and i < len(source):
            i += 1
            a = source[i] if i < len(source) else 1
            continue
        if b == 1 and j < len(target):
            j += 1
            b = target[j] if j < len(target) else 1
            continue
        factor = math.gcd(a, b)
        if factor == 1:
            break
        name = f"f{count}:{factor}"
        count += 1
        left[i].append(name)
        right[j].append(name)
        a, b = a // factor, b // factor
        if a != 1 and b != 1:
            break
    return _grouped(left, source, "x"), _grouped(right, target, "y")


def _grouped(factors: list[list[str]], shape: Sequence[int], prefix: str) -> str:
    text = []
    for index, (names, size) in enumerate(zip(factors, shape, strict=True)):
        remainder = size // math.prod(int(name.split(":")[1]) for name in names)
        parts = [*names, *([f"{prefix}{index}:{remainder}!"] if remainder > 1 else [])]
        text.append("1" if not parts else parts[0] if len(parts) == 1 else "(" + " ".join(parts) + ")")
    return " ".join(text)


for _operator in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
    rule(_operator, _reshaped, linear=(0,))
rule(aten.as_strided.default, whole)


def _expanded(operands: Operands) -> str:
    source, target = operands.inputs[0].shape, operands.outputs[0].shape
    new = len(target) - len(source)
    letters = dim_names(len(target))
    return (
        " ".join("1" if size == 1 else letters[new + i] for i, size in enumerate(source)) + " -> " + " ".join(letters)
    )


# Linear, but a sum is cheaper to reduce before it is expanded.
rule(
    aten.expand.default,
    _expanded,
    linear=lambda operands: (0,) if operands.inputs[0].numel() == operands.outputs[0].numel() else (),
)


def _cut(operands: Operands) -> str:
    """Return the notation of operators that take a part along one dimension; taking all of it leaves it splittable."""
    source = operands.inputs[0].shape
    dim = operands["dim"] % len(source)
    rank = len(source)
    if all(v.dim() == rank and v.shape[dim] == source[dim] for v in operands.outputs):
        return joined(operands, [" ".join(dim_names(rank))] * (1 + len(operands.outputs)))
    outputs = enumerate(operands.outputs)
    after = [with_dim(rank, dim, f"part{index}!" if value.dim() == rank else "") for index, value in outputs]
    return joined(operands, [with_dim(rank, dim, "whole!"), *after])


for _operator in (
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten.unbind.int,
    aten.chunk.default,
    aten.narrow.default,
):
    rule(_operator, _cut, linear=(0,))


def _joined(operands: Operands) -> str:
    rank = operands.outputs[0].dim()
    dim = operands["dim"] % rank
    # cat() accepts an empty 1-D tensor beside tensors of any rank.
    inputs = [
        with_dim(rank, dim, f"in{index}!") if value.dim() == rank else "empty!"
        for index, value in enumerate(operands.inputs)
    ]
    return ", ".join(inputs) + " -> " + with_dim(rank, dim, "all!")


def _stacked(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % (rank + 1)
    letters = dim_names(rank)
    inputs = ", ".join([" ".join(letters)] * len(operands.inputs))
    return inputs + " -> " + " ".join([*letters[:dim], "new!", *letters[dim:]])


# Operators that replace a part; the transposes of slice and select write it into zeros.
rule(aten.slice_scatter.default, lambda operands: _replaced(operands), linear=together(0, 1))
rule(aten.select_scatter.default, lambda operands: _replaced(operands), linear=together(0, 1))


def _replaced(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    whole, part = with_dim(rank, dim, "all!"), "part!" if operands.inputs[1].dim() == rank else ""
    return f"{whole}, {with_dim(rank, dim, part)} -> {whole}"


rule(aten.cat.default, _joined, linear="all")
rule(aten.stack.default, _stacked, linear="all")


def _padded(operands: Operands) -> set[int]:
    pad = operands["pad"]
    return {-1 - k for k in range(len(pad) // 2) if pad[2 * k] or pad[2 * k + 1]}


rule(aten.constant_pad_nd.default, mixing(_padded), linear=lambda operands: () if operands["value"] else (0,))
rule(aten.tril.default, mixing(lambda operands: (-1, -2)), linear=(0,))
rule(aten.triu.default, mixing(lambda operands: (-1, -2)), linear=(0,))


# Constant tensors: all pieces are equal.
def _filled(operands: Operands) -> str:
    return "-> " + " ".join(dim_names(operands.outputs[0].dim()))


for _operator in (aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default):
    rule(_operator, _filled)
# Each random number follows from its position in the global tensor.
rule(uniform, _filled)

# Tables of positions: pieces differ, so they are computed whole.
for _operator in (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m):
    rule(_operator, whole)
rule(aten.linspace.default, whole)
