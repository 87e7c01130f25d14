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
