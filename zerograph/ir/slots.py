"""Which parameter an element of this rank's part of a bucket belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.mesh import Mesh, local_part


@dataclass(frozen=True)
class Span:
    """What one row of this rank's part of a bucket holds of a parameter.

    Attributes:
        row: the row of this rank's part; None in a flat bucket.
        start, stop: where it lies in that row.
        piece: the number of the row in the whole bucket: which piece of the parameter it is of.
        low: where it begins in that piece, in elements.
    """

    slot: Slot
    row: int | None
    start: int
    stop: int
    piece: int
    low: int

    def element(self, at: int, rows: int | None) -> tuple[int, ...]:
        """The place in the parameter of element ``at`` of the span; ``rows`` are those of the bucket."""
        shape = list(self.slot.shape)
        split = self.slot.split if rows is not None else None
        if split is not None and rows is not None:
            shape[split] //= rows
        found = unravel(self.low + at, shape)
        return tuple(i + (self.piece * shape[dim] if dim == split else 0) for dim, i in enumerate(found))


def spans(layout: Bucket, mesh: Mesh) -> Iterator[Span]:
    """What this rank's part holds, parameter by parameter in slot order; padding is left out."""
    *rows, own = local_part(layout.shape, layout.sbp, mesh)
    numbers = range(rows[0].start, rows[0].stop) if rows else range(1)
    for slot in layout.slots:
        low, high = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
        if low < high:
            for row, number in enumerate(numbers):
                place = low - own.start, high - own.start
                yield Span(slot, row if rows else None, *place, number, low - slot.offset)


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The place of element ``index``, counted row by row, in a tensor of that shape."""
    found: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.insert(0, at)
    return tuple(found)


def shown(name: str, place: Sequence[int]) -> str:
    """``model.weight[2, 1]``."""
    return f"{name}[{', '.join(map(str, place))}]" if place else name
