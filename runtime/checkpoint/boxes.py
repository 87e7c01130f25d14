"""Stretches of a flattened tensor as boxes of the tensor itself, which is what checkpoints are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """(offsets, sizes) of the boxes that elements ``start`` to ``end`` of the flattened tensor are, in their order.

    At most two for each dimension, and one: a part of the first row, whole rows, a part of the last.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, end // row
    if start % row:
        stop = min(end, (first + 1) * row)
        yield from _within(first, shape, start, stop, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if end % row and first <= last:
        yield from _within(last, shape, last * row, end, row)


def _within(at: int, shape: Sequence[int], start: int, end: int, row: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start - at * row, end - at * row):
        yield (at, *offsets), (1, *sizes)


def disjoint(found: Sequence[Box]) -> bool:
    """Whether no element lies in two of the boxes, which are of one tensor."""
    return _apart([one for one in found if math.prod(one[1])], 0)


def _apart(found: Sequence[Box], dim: int) -> bool:
    """As :func:`disjoint`, for boxes that have an element in common in all dimensions before ``dim``."""
    if len(found) < 2:
        return True
    if dim == len(found[0][0]):
        return False
    begin = sorted(found, key=lambda one: one[0][dim])
    edges = sorted({edge for at, size in found for edge in (at[dim], at[dim] + size[dim])})
    inside: list[Box] = []
    next_one = 0
    # Between two edges it is the same boxes everywhere.
    for edge in edges:
        inside = [one for one in inside if one[0][dim] + one[1][dim] > edge]
        while next_one < len(begin) and begin[next_one][0][dim] == edge:
            inside.append(begin[next_one])
            next_one += 1
        if not _apart(inside, dim + 1):
            return False
    return True
