"""Factor notation: an operator's index space as a string, from which its signatures follow.

``"m k, k n -> m n"`` names one factor per dimension of each operand. Splitting a factor splits every operand that has
it. An output without the factor is then a partial sum, an input without it is broadcast.

=========== ===================================================================================
``m``       a factor; the same letter is the same index everywhere
``m!``      cannot be split (a normalised dimension, a convolution window)
``1``       a dimension of size one that is not an index (a kept reduced dimension)
``(b t)``   one dimension that runs over two factors, the first one slowest
``b:4``     a factor of size 4, where no dimension of its own tells
``...``     any number of leading or trailing factors, aligned at the right as in broadcasting
``+ m n``   an operand that is added to the result: where that is a partial sum, so is the operand
=========== ===================================================================================

The precedent is the sharding rule of Shardy (OpenXLA): pass-through, reduction and need-replication factors.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerograph.ir.sbp import Signature, Split, broadcast, partial_sum

Shape = tuple[int, ...]
Linear = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True)
class _Factor:
    name: str
    splittable: bool


# One dimension of an operand: the factors that it runs over, slowest first; none for a plain size of one.
_Dimension = tuple[_Factor, ...]
_Operand = tuple[_Dimension, ...]


@functools.lru_cache(maxsize=65536)
def signatures(
    notation: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], linear: Linear, ranks: int
) -> tuple[Signature, ...]:
    """Return every signature that ``notation`` allows.

    Args:
        notation: one operand for each tensor in ``inputs`` and ``outputs``.
        inputs, outputs: the global shapes of the operands.
        linear: indices of inputs in which the operator is linear (the others held fixed). Such an input may be a
            partial sum, and the outputs then are partial sums. A tuple of indices means linear in all of them together.
        ranks: number of ranks along the mesh dimension.

    Raises:
        ValueError: the notation does not fit the shapes, so the rule is wrong.
    """
    left, right = notation.split("->")
    added = [part.startswith("+") for part in _commas(left, len(inputs))]
    operands = [_parse(part, shape) for part, shape in zip(_commas(left, len(inputs)), inputs, strict=True)]
    results = [_parse(part, shape) for part, shape in zip(_commas(right, len(outputs)), outputs, strict=True)]
    sizes = _sizes([*operands, *results], [*inputs, *outputs])
    operands = [_without_broadcast(operand, shape, sizes) for operand, shape in zip(operands, inputs, strict=True)]
    results = [_without_broadcast(result, shape, sizes) for result, shape in zip(results, outputs, strict=True)]
    whole = Signature((broadcast,) * len(inputs), (broadcast,) * len(outputs))
    return (
        whole,
        *_split_signatures(operands, results, sizes, added, ranks),
        *_partial_signatures(len(inputs), len(outputs), linear),
    )


def _split_signatures(
    operands: Sequence[_Operand], results: Sequence[_Operand], sizes: dict[str, int], added: Sequence[bool], ranks: int
) -> Iterator[Signature]:
    """Yield a signature for each factor that can be split."""
    for name in dict.fromkeys(f.name for operand in [*operands, *results] for dim in operand for f in dim):
        dims = [_position(operand, name, sizes) for operand in [*operands, *results]]
        if sizes[name] % ranks or sizes[name] == 0 or any(dim is _NOWHERE_LEGAL for dim in dims):
            continue
        outputs = tuple(partial_sum if dim is None else Split(dim) for dim in dims[len(operands) :])
        # An operand that is added to a partial sum is itself partial, or every rank would add it.
        unsplit = [partial_sum if is_added and partial_sum in outputs else broadcast for is_added in added]
        inputs = tuple(unsplit[i] if dim is None else Split(dim) for i, dim in enumerate(dims[: len(operands)]))
        yield Signature(inputs, outputs)


def _partial_signatures(inputs: int, outputs: int, linear: Linear) -> Iterator[Signature]:
    """Yield a signature for each group of inputs in which the operator is linear."""
    for group in linear:
        indices = (group,) if isinstance(group, int) else group
        if all(index < inputs for index in indices):
            sbps = tuple(partial_sum if i in indices else broadcast for i in range(inputs))
            yield Signature(sbps, (partial_sum,) * outputs)


def miscounted(notation: str, inputs: int, outputs: int) -> str:
    """Describe what is wrong with a notation for so many operands, of any shapes; return an empty text if nothing."""
    left, arrow, right = notation.partition("->")
    if not arrow or "->" in right:
        return "it needs one arrow '->' between inputs and outputs"
    for text, expected, kind in ((left, inputs, "inputs"), (right, outputs, "outputs")):
        count = len(text.split(",")) if expected or text.strip() else 0
        if count != expected:
            return f"it names {count} {kind}, there are {expected}"
    return ""


def mismatch(notation: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> str:
    """Describe what is wrong with a notation for operands of these shapes; return an empty text if nothing is."""
    if problem := miscounted(notation, len(inputs), len(outputs)):
        return problem
    left, right = notation.split("->")
    shapes, operands = (*inputs, *outputs), []
    for part, shape in zip([*_commas(left, len(inputs)), *_commas(right, len(outputs))], shapes, strict=True):
        if not _NOTATION.fullmatch(part):
            return f"{part!r} is no list of factors (m, m!, 1, (b t), b:4, ...)"
        try:
            operands.append(_parse(part, shape))
        except ValueError:
            return f"{part!r} names another number of dimensions than {shape} has"
    sizes = _sizes(operands, shapes)
    for operand, shape in zip(operands, shapes, strict=True):
        for dimension, size in zip(operand, shape, strict=True):
            names = " ".join(factor.name for factor in dimension)
            expected = math.prod(sizes[factor.name] for factor in dimension)
            if size not in (expected, 1):
                return f"{names or '1'!s} is {expected} and {size}"
    return ""


_FACTOR = r"(?:[A-Za-z_]\w*(?::\d+)?!?|1|\.\.\.!?)"
_NOTATION = re.compile(rf"\s*(?:(?:{_FACTOR}|\(\s*{_FACTOR}(?:\s+{_FACTOR})*\s*\))(?:\s+|(?=\()|$))*\s*")

_NOWHERE_LEGAL = -1


def _position(operand: _Operand, name: str, sizes: dict[str, int]) -> int | None:
    """Return the dimension of ``operand`` to cut in order to split factor ``name``; None if the operand lacks it."""
    for dim, dimension in enumerate(operand):
        for index, factor in enumerate(dimension):
            if factor.name == name:
                # Slices of a dimension are contiguous: only its slowest factor of a size above 1 can be split.
                slowest = all(sizes[before.name] == 1 for before in dimension[:index])
                return dim if factor.splittable and slowest else _NOWHERE_LEGAL
    return None


def _commas(text: str, operands: int) -> list[str]:
    """Split text at commas. Blank text is one operand without dimensions, or none: ``operands`` decides."""
    return [part.strip() for part in text.split(",")] if operands else []


def _parse(text: str, shape: Shape) -> _Operand:
    dimensions: list[_Dimension] = []
    group: list[_Factor] | None = None
    tokens = text.lstrip("+").replace("(", " ( ").replace(")", " ) ").split()
    explicit = _count(tokens)
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            dimensions.append(tuple(group or ()))
            group = None
        elif token in ("...", "...!"):
            missing = len(shape) - explicit
            # Numbered from the right: operands of different rank line up as in broadcasting.
            dimensions += [(_Factor(f"...{missing - i}", token == "..."),) for i in range(missing)]
        elif token == "1":
            dimensions.append(())
        else:
            factor = _Factor(token.rstrip("!"), not token.endswith("!"))
            if group is None:
                dimensions.append((factor,))
            else:
                group.append(factor)
    if len(dimensions) != len(shape):
        raise ValueError(f"notation {text!r} does not fit shape {shape}")
    return tuple(dimensions)


def _count(tokens: Sequence[str]) -> int:
    depth = count = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        count += (token == ")") or (depth == 0 and token not in ("...", "...!"))
    return count


def _sizes(operands: list[_Operand], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the size of every factor: the largest of its dimensions; smaller ones are broadcast."""
    factors = {factor.name for operand in operands for dimension in operand for factor in dimension}
    sizes = {name: int(name.split(":")[1]) for name in factors if ":" in name}
    for operand, shape in zip(operands, shapes, strict=True):
        for dimension, size in zip(operand, shape, strict=True):
            if len(dimension) == 1 and ":" not in dimension[0].name:
                sizes[dimension[0].name] = max(sizes.get(dimension[0].name, 0 if size == 0 else 1), size)
    for operand, shape in zip(operands, shapes, strict=True):
        for dimension, size in zip(operand, shape, strict=True):
            if len(dimension) > 1:
                _divide(dimension, size, sizes)
    return sizes


def _without_broadcast(operand: _Operand, shape: Shape, sizes: dict[str, int]) -> _Operand:
    """Drop factors from dimensions of size 1 that are broadcast along them."""
    return tuple(
        () if len(dimension) == 1 and size == 1 and sizes[dimension[0].name] > 1 else dimension
        for dimension, size in zip(operand, shape, strict=True)
    )


def _divide(dimension: _Dimension, size: int, sizes: dict[str, int]) -> None:
    """Derive the size of the one factor of a grouped dimension that no other dimension names."""
    product = 1
    unsized = [factor.name for factor in dimension if factor.name not in sizes]
    for factor in dimension:
        product *= sizes.get(factor.name, 1)
    for name in unsized:
        sizes[name] = size // product if name is unsized[0] and product else 1
