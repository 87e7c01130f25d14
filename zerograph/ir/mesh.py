"""The mesh of ranks, and the shard of a global tensor that one rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerograph.errors import ConfigError
from zerograph.ir.rank_numbers import RankNumber
from zerograph.ir.sbp import NdSbp, Sbp, Split
from zerograph.ir.sizes import sizes_of

# Name of the process group in the mesh dimension of time, which has no group.
TIME = "time"
_MOST_RANKS = 2**20


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, from the view of one of them.

    Attributes:
        shape: number of ranks along each dimension.
        position: index of this rank along each dimension.
        groups: name of the process group along each dimension: the ranks that differ from this one there only.
        rows: number of rows of each rank of a line, where they differ. A dimension can then be split if the number of
            all rows divides it, and each rank has as large a part of it as of the rows. None: parts are equal.
        slices: number of slices of the batch (``config.virtual_ranks``), if the ranks of a line do not divide it. Each
            rank then has a part of as many slices as the first one has. That of a rank with fewer begins with one that
            it computes, but does not add: in rows of the whole batch that before its own, in inputs its first again.
    """

    shape: tuple[int, ...]
    position: tuple[int, ...]
    groups: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    slices: int | None = None

    def __post_init__(self) -> None:
        # The compiler lists them.
        if self.size > _MOST_RANKS:
            raise ConfigError(f"{self.size:,} ranks are more than the {_MOST_RANKS:,} that a graph may have")

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
        if self.slices is not None and not dim:
            return self.slices
        return self.shape[dim] if self.rows is None else sum(self.rows)

    def parts(self, size: int, dim: int) -> list[int]:
        """Return the size of each rank's part of a dimension of this size, split along a mesh dimension."""
        if self.rows is None:
            return [size // self.shape[dim]] * self.shape[dim]
        return [size // sum(self.rows) * rows for rows in self.rows]

    @property
    def rank(self) -> int:
        """Linear index of this rank in row-major order."""
        return index_along(self, range(self.dims))


def with_slices(mesh: Mesh, slices: int | None) -> Mesh:
    """Return the mesh with slices of the batch if its ranks do not divide them, for tensors that have rows of it."""
    return mesh if slices is None or not slices % mesh.shape[0] else replace(mesh, slices=slices)


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
    if mesh.slices is not None and not mesh_dim:
        return size // mesh.slices * most_slices(mesh.slices, ranks)
    return size // ranks if mesh.rows is None else mesh.parts(size, mesh_dim)[mesh.position[mesh_dim]]


def has_slices(size: int, held: int, mesh: Mesh) -> bool:
    """Return whether ``held`` of a dimension of this size are a rank's slices; see :attr:`Mesh.slices`. Or equal parts.

    The two differ where slices do not fit the ranks.
    """
    return mesh.slices is not None and size % mesh.slices == 0 and held == _local_size(size, mesh.shape[0], 0, mesh)


def most_slices(slices: int, ranks: int) -> int:
    """Return the number of slices of the batch that the first rank has."""
    return -(-slices // ranks)


def own_slices(slices: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first slice of a rank, and the first one after it: the first ranks may have one more than the last."""
    share, rest = divmod(slices, ranks)
    first = rank * share + min(rank, rest)
    return first, first + share + (rank < rest)


def slice_counts(slices: int, ranks: int) -> list[int]:
    """Return the number of slices of each rank."""
    return [end - first for first, end in (own_slices(slices, ranks, rank) for rank in range(ranks))]


def with_all_slices(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """Return a rank's rows with as many slices as the first rank has: its first ones come again before them."""
    if mesh.slices is None:
        return x
    first, end = own_slices(mesh.slices, mesh.size, mesh.rank)
    again = (most_slices(mesh.slices, mesh.size) - (end - first)) * (x.shape[dim] // (end - first))
    return torch.cat([x.narrow(dim, 0, again), x], dim) if again else x


def of_own_slices(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """Return a rank's rows without those that it has before its own, see :attr:`Mesh.slices`."""
    if mesh.slices is None:
        return x
    first, end = own_slices(mesh.slices, mesh.size, mesh.rank)
    rows = x.shape[dim] // most_slices(mesh.slices, mesh.size) * (end - first)
    return x.narrow(dim, x.shape[dim] - rows, rows)


def start_of_slices(size: int, slices: int, ranks: int) -> RankNumber:
    """Return where a rank's part begins in a dimension of this size; see :attr:`Mesh.slices`."""
    (share, rest), rows = divmod(slices, ranks), size // slices
    return RankNumber((share * rows,), (rest - 1) * rows, most=RankNumber(((share + 1) * rows,)))


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
            elif mesh.slices is not None and not mesh_dim:
                start[dim_sbp.dim] += start_of_slices(whole, mesh.slices, ranks).at(mesh.position)
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
    if mesh.slices is not None:
        return tuple(
            start_of_slices(size, mesh.slices, mesh.shape[0]) if Split(dim) == sbp[0] else RankNumber(())
            for dim, size in enumerate(shape)
        )
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
