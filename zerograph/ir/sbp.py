"""SBP: the placement of a global tensor, one of broadcast, split(d) and partial sum per mesh dimension.

The terms are those of OneFlow (arXiv 2110.15032, section 3.1). They correspond to the placements of
``torch.distributed.tensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerograph.errors import PlacementError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs


@dataclass(frozen=True, repr=False)
class Broadcast:
    """Every rank holds the whole tensor. ``broadcast()`` is ``broadcast``: OneFlow has both forms."""

    def __call__(self) -> Broadcast:
        """Return itself."""
        return self

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, repr=False)
class Split:
    """Rank r holds slice r of dimension ``dim``."""

    dim: int

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, repr=False)
class PartialSum:
    """The tensor is the sum of the tensors that the ranks hold. ``partial_sum()`` is ``partial_sum``."""

    def __call__(self) -> PartialSum:
        """Return itself."""
        return self

    def __repr__(self) -> str:
        return "P"


Sbp = Broadcast | Split | PartialSum
NdSbp = tuple[Sbp, ...]


@dataclass(frozen=True)
class Signature:
    """One legal assignment of an SBP, along one mesh dimension, to each tensor operand and each output."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]


broadcast = Broadcast()
partial_sum = PartialSum()


def all_broadcast(mesh_dims: int) -> NdSbp:
    """Return broadcast along every mesh dimension."""
    return (broadcast,) * mesh_dims


def split(dim: int) -> Split:
    """Return ``split(d)``: rank r holds slice r of dimension d.

    Raises:
        PlacementError: ``dim`` is not a whole number from 0 up.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise PlacementError(f"split({dim!r}): the dimension must be a whole number from 0 up")
    return Split(dim)


def nd_sbp(sbp: Sbp | Sequence[Sbp], mesh_dims: int) -> NdSbp:
    """Return one SBP per mesh dimension, from one SBP (for a 1-D mesh) or a sequence of them.

    Raises:
        PlacementError: not an SBP, or not as many as the mesh has dimensions.
    """
    entries = tuple(sbp) if isinstance(sbp, Sequence) and not isinstance(sbp, str) else (sbp,)
    for entry in entries:
        if not isinstance(entry, Sbp):
            raise PlacementError(f"{entry!r} is not an SBP: use sbp.broadcast, sbp.split(d) or sbp.partial_sum")
    if len(entries) != mesh_dims:
        raise PlacementError(f"{show(entries)} has {len(entries)} SBPs for a placement of {mesh_dims} dimension(s)")
    return entries


def dims_split(sbps: Sequence[NdSbp]) -> set[int]:
    """Return the mesh dimensions along which any of them is split."""
    return {dim for sbp in sbps for dim, entry in enumerate(sbp) if isinstance(entry, Split)}


def show(sbp: NdSbp) -> str:
    """Return the text of an SBP: ``S(0)`` for one mesh dimension, ``(S(0), B)`` for two."""
    return str(sbp[0]) if len(sbp) == 1 else "(" + ", ".join(map(str, sbp)) + ")"


_BOXING = {
    (PartialSum, Broadcast): "all-reduce",
    (PartialSum, Split): "reduce-scatter",
    (Split, Broadcast): "all-gather",
    (Split, Split): "all-to-all",
    (Broadcast, Split): "slice",
}


def boxing_kind(source: Sbp, target: Sbp) -> str | None:
    """Return the collective that changes one SBP into another along a mesh dimension; None if there is none."""
    return None if source == target else _BOXING.get((type(source), type(target)))


def wire_bytes(source: Sbp, target: Sbp, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends to change one SBP into another with ring algorithms.

    For M bytes and N ranks: all-reduce 2 M (N-1)/N, reduce-scatter and all-gather M (N-1)/N, all-to-all M (N-1)/N^2,
    slice 0.

    Args:
        source: the SBP before.
        target: the SBP after.
        nbytes: size in bytes of the tensor that the ranks along the mesh dimension hold together.
        ranks: number of ranks along the mesh dimension.

    Returns:
        Bytes; ``inf`` for a change that no boxing makes, such as broadcast to partial.
    """
    if source == target:
        return 0.0
    moved = nbytes * (ranks - 1) / ranks
    return {
        "all-reduce": 2 * moved,
        "reduce-scatter": moved,
        "all-gather": moved,
        "all-to-all": moved / ranks,
        "slice": 0.0,
        None: float("inf"),
    }[boxing_kind(source, target)]


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor. Importing that class takes long, and without the import there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_dtensor(sbp: NdSbp) -> tuple[Placement, ...]:
    """Return the placements of ``torch.distributed.tensor`` for an SBP."""
    return tuple(map(_to_dtensor, sbp))


def _to_dtensor(sbp: Sbp) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(sbp, Split):
        return Shard(sbp.dim)
    return Replicate() if isinstance(sbp, Broadcast) else Partial("sum")


def from_dtensor(placements: Sequence[Placement]) -> NdSbp:
    """Return the SBP for placements of ``torch.distributed.tensor``.

    Raises:
        PlacementError: a placement has no SBP, such as a partial maximum.
    """
    return tuple(map(_from_dtensor, placements))


def _from_dtensor(placement: Placement) -> Sbp:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(placement, Replicate):
        return broadcast
    if type(placement) is Shard:
        return Split(placement.dim)
    if isinstance(placement, Partial) and placement.reduce_op == "sum":
        return partial_sum
    raise PlacementError(f"{placement} has no SBP: redistribute the DTensor to Replicate, Shard(d) or Partial('sum')")
