"""Mesh: the ranks of a step as a grid, and which part of a global tensor one of them holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.ir.sbp import NdSbp, Sbp, Split


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, seen by one of them.

    Attributes:
        shape: number of ranks along each dimension.
        position: this rank's place along each.
        groups: for each dimension the name of the process group of the ranks that differ from this one there only.
    """

    shape: tuple[int, ...]
    position: tuple[int, ...]
    groups: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dims(self) -> int:
        return len(self.shape)

    @property
    def rank(self) -> int:
        """This rank's place when all are counted, the last dimension first."""
        found = 0
        for size, position in zip(self.shape, self.position, strict=True):
            found = found * size + position
        return found


def line(ranks: int, rank: int, group: str) -> Mesh:
    """A mesh of one dimension."""
    return Mesh((ranks,), (rank,), (group,))


def piece_count(sbp: NdSbp, mesh: Mesh) -> int:
    """Into how many different pieces a tensor is cut; 1 for one that every rank holds whole."""
    return math.prod(size for one, size in zip(sbp, mesh.shape, strict=True) if isinstance(one, Split))


def local_shape(shape: Sequence[int], sbp: Sequence[Sbp], mesh: Mesh) -> tuple[int, ...]:
    """This rank's shape of a global tensor, cut along the first ``len(sbp)`` mesh dimensions.

    Split dimensions divide by the number of ranks.
    """
    local = [int(size) for size in shape]
    for one, ranks in zip(sbp, mesh.shape, strict=False):
        if isinstance(one, Split):
            local[one.dim] //= ranks
    return tuple(local)


def local_start(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[int, ...]:
    """Where this rank's part of a global tensor begins, in each dimension of the tensor.

    Of two mesh dimensions that split the same dimension of the tensor, the first cuts the larger pieces.
    """
    start, size = [0] * len(shape), list(shape)
    for one, ranks, position in zip(sbp, mesh.shape, mesh.position, strict=True):
        if isinstance(one, Split):
            size[one.dim] //= ranks
            start[one.dim] += position * size[one.dim]
    return tuple(start)


def local_part(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[slice, ...]:
    """The index that takes this rank's part out of the whole tensor."""
    begin, size = local_start(shape, sbp, mesh), local_shape(shape, sbp, mesh)
    return tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))
