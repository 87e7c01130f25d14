"""Slots: the positions of parameters in buckets, and how a parameter that the user splits lies in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from torch import Tensor

from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split

# Dimension of a parameter and number of parts, for each mesh dimension along which the user splits it. Where two cut
# the same dimension, the parts of the first are the larger ones.
Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slot:
    """The position of a parameter in its bucket.

    Attributes:
        name: qualified name of the parameter.
        shape: its global shape.
        offset: index of its first element in a row.
        numel: number of its elements in a row.
        split: how the user splits the parameter into rows; empty in a flat bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    split: Cuts = ()

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of the parameter's piece in a row."""
        shape = list(self.shape)
        for dim, parts in self.split:
            shape[dim] //= parts
        return tuple(shape)

    def start(self, row: int) -> tuple[int, ...]:
        """Return the index in the parameter at which the piece of a row begins."""
        start, size = [0] * len(self.shape), list(self.shape)
        places = unravel(row, [parts for _, parts in self.split]) if self.split else ()
        for (dim, parts), place in zip(self.split, places, strict=True):
            size[dim] //= parts
            start[dim] += place * size[dim]
        return tuple(start)


def cuts(sbp: NdSbp, mesh: Mesh) -> Cuts:
    """Return how the user's SBP splits a parameter; empty for a broadcast one."""
    return tuple((entry.dim, ranks) for entry, ranks in zip(sbp, mesh.shape, strict=True) if isinstance(entry, Split))


def row_views(slot: Slot) -> tuple[list[int], list[int], list[int]]:
    """Return how a parameter becomes rows: the shape with a dimension for each part, the order of rows, its inverse.

    ``parameter.view(shape).permute(order)`` has the dimensions of rows first, then those of a piece.
    """
    shape: list[int] = []
    of_cuts = [0] * len(slot.split)
    pieces: list[int] = []
    for dim, size in enumerate(slot.piece):
        for index, (cut_dim, parts) in enumerate(slot.split):
            if cut_dim == dim:
                of_cuts[index] = len(shape)
                shape.append(parts)
        pieces.append(len(shape))
        shape.append(size)
    order = [*of_cuts, *pieces]
    return shape, order, sorted(range(len(order)), key=order.__getitem__)


def to_rows(value: Tensor, slot: Slot) -> Tensor:
    """Return a whole parameter as its bucket stores it: [numel], or [rows, elements of a row]."""
    if not slot.split:
        return value.reshape(-1)
    shape, order, _ = row_views(slot)
    return value.reshape(shape).permute(order).reshape(-1, slot.numel)


def from_rows(laid: Tensor, slot: Slot) -> Tensor:
    """Return the whole parameter from its part of a bucket; a view if the bucket is flat."""
    if not slot.split:
        return laid.view(slot.shape)
    shape, order, back = row_views(slot)
    return laid.reshape([shape[dim] for dim in order]).permute(back).reshape(slot.shape)


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the multi-dimensional index of the element with a linear index, in row-major order."""
    return tuple(map(int, numpy.unravel_index(index, tuple(shape))))
