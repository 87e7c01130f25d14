"""The mesh of ranks, and the shard of a global tensor that one rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zerograph.ir.rank_numbers import RankNumber
from zerograph.ir.sbp import NdSbp, Sbp, Split
from zerograph.ir.sizes import sizes_of

# Name of the process group in the mesh dimension of time, which has no group.
TIME = "time"


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, from the view of one of them.

    Attributes:
        shape: number of ranks along each dimension.
        position: index of this rank along each dimension.
        groups: name of the process group along each dimension: the ranks that differ from this one there only.
        rows: number of rows of each rank of a line, where they differ. A dimension can then be split if the number of
            all rows divides it, and each rank has as large a part of it as of the rows. None: parts are equal.
    """

    shape: tuple[int, ...]
    position: tuple[int, ...]
    groups: tuple[str, ...]
    rows: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def dims(self) -> int:
        """Number of mesh dimensions."""
        return len(self.shape)

    def divisor(self, dim: int) -> int:
        """Return what must divide the size of a dimension that is split along a mesh dimension."""
        return self.shape[dim] if self.rows is None else sum(self.rows)

    def parts(self, size: int, dim: int) -> list[int]:
        """Return the size of each rank's part of a dimension of this size, split along a mesh dimension."""
        if self.rows is None:
            return [size // self.shape[dim]] * self.shape[dim]
        return [size // sum(self.rows) * rows for rows in self.rows]

    @property
    def rank(self) -> int:
        """Linear index of this rank in row-major order."""
        index = 0
        for size, position in zip(self.shape, self.position, strict=True):
            index = index * size + position
        return index


def line(ranks: int, rank: int, group: str) -> Mesh:
    """Return a mesh of one dimension.

    Args:
        ranks: number of ranks.
        rank: index of this rank.
        group: name of the process group.
    """
    return Mesh((ranks,), (rank,), (group,))


def size_along(mesh: Mesh, dims: Iterable[int]) -> int:
    """Return the number of ranks along some mesh dimensions together."""
    return math.prod(mesh.shape[dim] for dim in dims)


def index_along(mesh: Mesh, dims: Sequence[int]) -> int:
    """Return the linear index of this rank along some mesh dimensions, in row-major order."""
    index = 0
    for dim in dims:
        index = index * mesh.shape[dim] + mesh.position[dim]
    return index


def piece_count(sbp: NdSbp, mesh: Mesh) -> int:
    """Return the number of different shards of a tensor; 1 for a tensor that is broadcast."""
    return math.prod(size for dim_sbp, size in zip(sbp, mesh.shape, strict=True) if isinstance(dim_sbp, Split))


def local_shape(shape: Sequence[int], sbp: Sequence[Sbp], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a shard.

    Args:
        shape: global shape. Its split dimensions are divisible by the number of ranks, or are a number of rows.
        sbp: SBP along the first ``len(sbp)`` mesh dimensions.
        mesh: the mesh.
    """
    local = list(shape)
    for mesh_dim, (dim_sbp, ranks) in enumerate(zip(sbp, mesh.shape, strict=False)):
        if isinstance(dim_sbp, Split):
            local[dim_sbp.dim] = _local_size(local[dim_sbp.dim], ranks, mesh_dim, mesh)
    return tuple(local)


def global_shape(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[int, ...]:
    """Return the global shape of a tensor from the shape of its shards, which are equal."""
    whole = list(shape)
    for dim_sbp, ranks in zip(sbp, mesh.shape, strict=True):
        if isinstance(dim_sbp, Split):
            whole[dim_sbp.dim] *= ranks
    return tuple(whole)


def _local_size(size: int, ranks: int, mesh_dim: int, mesh: Mesh) -> int:
    """Return the size of a shard along a dimension of size ``size``, which may be symbolic."""
    if not isinstance(size, int):
        return sizes_of(size).part(size, ranks, mesh_dim)
    return size // ranks if mesh.rows is None else mesh.parts(size, mesh_dim)[mesh.position[mesh_dim]]


def local_start(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[int, ...]:
    """Return the index in the global tensor at which this rank's shard begins.

    If two mesh dimensions split the same dimension of the tensor, the first one makes the larger slices. Along time
    it is the first micro-batch's, but for rows, whose start is a symbol in each micro-batch.
    """
    start, size = [0] * len(shape), list(shape)
    for mesh_dim, (dim_sbp, ranks, position) in enumerate(zip(sbp, mesh.shape, mesh.position, strict=True)):
        if isinstance(dim_sbp, Split):
            whole = size[dim_sbp.dim]
            size[dim_sbp.dim] = _local_size(whole, ranks, mesh_dim, mesh)
            if mesh.rows is not None:
                start[dim_sbp.dim] += sum(mesh.parts(whole, mesh_dim)[:position])
            elif isinstance(whole, int):
                start[dim_sbp.dim] += position * size[dim_sbp.dim]
            elif sizes_of(whole).is_rows(whole) or mesh.groups[mesh_dim] != TIME:
                start[dim_sbp.dim] += sizes_of(whole).start(whole, ranks, mesh_dim)
    return tuple(start)


def local_start_numbers(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[RankNumber | None, ...]:
    """Return :func:`local_start` as a function of the position; None for an index that is symbolic."""
    if mesh.rows is not None:
        # They are no multiples of the position.
        return (None,) * len(shape)
    at_zero = local_start(shape, sbp, replace(mesh, position=(0,) * mesh.dims))
    units = [tuple(int(one == dim) for one in range(mesh.dims)) for dim in range(mesh.dims)]
    at_units = [local_start(shape, sbp, replace(mesh, position=unit)) for unit in units]
    return tuple(
        RankNumber(tuple(one[dim] for one in at_units)) if isinstance(index, int) else None
        for dim, index in enumerate(at_zero)
    )


def local_part(shape: Sequence[int], sbp: NdSbp, mesh: Mesh) -> tuple[slice, ...]:
    """Return the slices of the global tensor that are this rank's shard."""
    starts, sizes = local_start(shape, sbp, mesh), local_shape(shape, sbp, mesh)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
