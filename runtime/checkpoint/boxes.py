"""Convert ranges of a flattened tensor to boxes of the tensor, the unit of checkpoints."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from torch import Tensor

Offsets = tuple[int, ...]
# (offsets, sizes), one of each per dimension.
Box = tuple[Offsets, tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``end`` of a flattened tensor cover, in order.

    There are a part of the first row, whole rows, and a part of the last row: at most 2 d - 1 boxes in d dimensions.
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
        yield from _boxes_in_row(first, shape, start, stop, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if end % row and first <= last:
        yield from _boxes_in_row(last, shape, last * row, end, row)


def _boxes_in_row(index: int, shape: Sequence[int], start: int, end: int, row: int) -> Iterator[Box]:
    """Yield the boxes of a range within one row, of ``row`` elements, of the first dimension."""
    for offsets, sizes in boxes(shape[1:], start - index * row, end - index * row):
        yield (index, *offsets), (1, *sizes)


def overlap(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes have in common; None if no element is in both."""
    offsets, sizes = [], []
    for start, size, other_start, other_size in zip(*first, *second, strict=True):
        begin, end = max(start, other_start), min(start + size, other_start + other_size)
        if begin >= end:
            return None
        offsets.append(begin)
        sizes.append(end - begin)
    return tuple(offsets), tuple(sizes)


def part_of(whole: Tensor, box: Box, origin: Offsets | None = None) -> Tensor:
    """Return a view of a box of a tensor, or of a tensor that begins at ``origin`` in the one that has the box."""
    offsets, sizes = box
    starts = offsets if origin is None else map(operator.sub, offsets, origin)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def disjoint(boxes: Sequence[Box]) -> bool:
    """Return whether no element of a tensor is in two of its boxes."""
    return _disjoint_from([box for box in boxes if math.prod(box[1])], 0)


def _disjoint_from(boxes: Sequence[Box], dim: int) -> bool:
    """Do as :func:`disjoint` does, for boxes that have indices in common in all dimensions before ``dim``."""
    if len(boxes) < 2:
        return True
    if dim == len(boxes[0][0]):
        return False
    by_start = sorted(boxes, key=lambda box: box[0][dim])
    edges = sorted({edge for offsets, sizes in boxes for edge in (offsets[dim], offsets[dim] + sizes[dim])})
    covering: list[Box] = []
    entered = 0
    # The same boxes cover all indices between two edges.
    for edge in edges:
        covering = [box for box in covering if box[0][dim] + box[1][dim] > edge]
        while entered < len(by_start) and by_start[entered][0][dim] == edge:
            covering.append(by_start[entered])
            entered += 1
        if not _disjoint_from(covering, dim + 1):
            return False
    return True
