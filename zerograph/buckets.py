"""Buckets: parameters of one optimizer group and dtype, laid end to end in one flat tensor.

Parameters that the user has split along another mesh dimension than ZeRO's (tensor parallelism) lie in buckets of
rows: row r is the flat bucket of rank r along that dimension, so that rows are S(0) there, and their elements S(1)
along ZeRO's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.mesh import Mesh
from zerograph.sbp import NdSbp, Split, broadcast


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket; ``offset`` and ``numel`` in elements of a row.

    ``split`` is the dimension of the parameter that is cut into rows; None in a bucket without.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    split: int | None = None


@dataclass(frozen=True)
class Bucket:
    """The layout of a flat tensor of ``padded`` elements, the last ``padded - numel`` of them unused.

    ``key`` is what its parameters have in common: optimizer, group, update program, whether they get gradients.
    ``zero_dim`` is the mesh dimension that ZeRO splits along, ``ranks`` its size, which the bucket is padded for.
    ``rows`` is None for a flat bucket.
    """

    name: str
    slots: tuple[Slot, ...]
    numel: int
    padded: int
    dtype: torch.dtype
    device: torch.device
    sbp: NdSbp
    key: Hashable
    ranks: int
    zero_dim: int = 0
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return (self.padded,) if self.rows is None else (self.rows, self.padded)

    @property
    def is_whole(self) -> bool:
        return all(one == broadcast for one in self.sbp)

    @property
    def gathered(self) -> NdSbp:
        """The SBP in which the step computes with its parameters."""
        return tuple(broadcast if dim == self.zero_dim else one for dim, one in enumerate(self.sbp))


@dataclass(frozen=True)
class Parameter:
    """What bucketing needs to know of a parameter; ``sbp`` is how the user placed it (ZeRO's dimension left B)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: Hashable
    sbp: NdSbp


def plan_buckets(
    parameters: Sequence[Parameter],
    *,
    mesh: Mesh,
    zero_dim: int,
    split: bool,
    min_split_numel: int,
    bucket_bytes: int | None,
    first_number: int = 0,
) -> tuple[Bucket, ...]:
    """Lay parameters, given in order of first use, into buckets.

    Args:
        mesh: buckets are padded to a multiple of its size along ``zero_dim``, whole ones too: norms are summed in as
            many pieces whatever the stage.
        zero_dim: the mesh dimension along which buckets are split.
        split: whether they are; else B.
        min_split_numel: parameters with fewer elements stay B, in buckets of their own.
        bucket_bytes: most bytes per bucket (a larger parameter has one to itself); None: :func:`default_bytes`.
        first_number: buckets are named ``bucket<n>`` from here on.
    """
    most = bucket_bytes or default_bytes(parameters)
    open_buckets: dict[Hashable, list[Parameter]] = {}
    closed: list[tuple[list[Parameter], bool]] = []
    for parameter in parameters:
        small = _numel(parameter) < min_split_numel
        whole = not split or small
        # Small ones apart also where all are whole: the stages then have the same buckets, and the same sums.
        key = (small, parameter.sbp, parameter.dtype, parameter.device, parameter.key)
        members = open_buckets.get(key)
        if members is None or sum(map(_bytes, members)) + _bytes(parameter) > most:
            members = open_buckets[key] = []
            closed.append((members, whole))
        members.append(parameter)
    return tuple(
        _lay(f"bucket{first_number + i}", members, mesh, zero_dim, whole) for i, (members, whole) in enumerate(closed)
    )


def default_bytes(parameters: Sequence[Parameter]) -> int:
    """An eighth of the parameters, so that a few buckets overlap, within 1 MiB (latency) and 32 MiB (memory)."""
    return max(2**20, min(2**25, sum(map(_bytes, parameters)) // 8))


def _lay(name: str, members: Sequence[Parameter], mesh: Mesh, zero_dim: int, whole: bool) -> Bucket:
    first = members[0]
    cut = next((dim for dim, one in enumerate(first.sbp) if isinstance(one, Split)), None)
    rows = None if cut is None else mesh.shape[cut]
    slots, offset = [], 0
    for parameter in members:
        numel = _numel(parameter) // (rows or 1)
        slots.append(Slot(parameter.name, parameter.shape, offset, numel, split_dim(parameter.sbp)))
        offset += numel
    ranks = mesh.shape[zero_dim]
    padded = -(-offset // ranks) * ranks
    sbp = [broadcast if one == broadcast else Split(0) for one in first.sbp]
    if not whole:
        sbp[zero_dim] = Split(0 if rows is None else 1)
    kind = (first.dtype, first.device, tuple(sbp), first.key)
    return Bucket(name, tuple(slots), offset, padded, *kind, ranks, zero_dim, rows)


def split_dim(sbp: NdSbp) -> int | None:
    """The dimension that a parameter is split along; None for one that is whole."""
    return next((one.dim for one in sbp if isinstance(one, Split)), None)


def to_rows(value: Tensor, slot: Slot, rows: int | None) -> Tensor:
    """A whole parameter as it lies in its bucket: flat, or (rows, elements of a row)."""
    if rows is None or slot.split is None:
        return value.reshape(-1)
    return torch.stack([piece.reshape(-1) for piece in value.chunk(rows, slot.split)])


def from_rows(laid: Tensor, slot: Slot) -> Tensor:
    """The whole parameter from how it lies in its bucket; of a flat one a view."""
    if slot.split is None:
        return laid.view(slot.shape)
    rows = laid.shape[0]
    piece = [size // rows if dim == slot.split else size for dim, size in enumerate(slot.shape)]
    return torch.cat([row.view(piece) for row in laid], slot.split)


def _numel(parameter: Parameter) -> int:
    return torch.Size(parameter.shape).numel()


def _bytes(parameter: Parameter) -> int:
    return _numel(parameter) * parameter.dtype.itemsize
