"""Buckets: parameters of one optimizer group and dtype, laid end to end in one flat tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from zerograph.sbp import NdSbp, Split, broadcast


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket; ``offset`` and ``numel`` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """The layout of a flat tensor of ``padded`` elements, the last ``padded - numel`` of them unused.

    ``key`` is what its parameters have in common: optimizer, group, update program, whether they get gradients;
    ``ranks`` is the size of the mesh that it is padded for.
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

    @property
    def local_numel(self) -> int:
        """Elements that one rank holds at rest."""
        return self.padded if self.is_whole else self.padded // self.ranks

    @property
    def is_whole(self) -> bool:
        return all(one == broadcast for one in self.sbp)


@dataclass(frozen=True)
class Parameter:
    """What bucketing needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: Hashable


def plan_buckets(
    parameters: Sequence[Parameter],
    *,
    ranks: int,
    split: bool,
    min_split_numel: int,
    bucket_bytes: int | None,
    first_number: int = 0,
) -> tuple[Bucket, ...]:
    """Lay parameters, given in order of first use, into buckets.

    Args:
        ranks: size of the mesh; buckets are padded to a multiple of it, whole ones too: norms are summed in as many
            pieces whatever the stage.
        split: whether buckets at rest are S(0); else B.
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
        key = (small, parameter.dtype, parameter.device, parameter.key)
        members = open_buckets.get(key)
        if members is None or sum(map(_bytes, members)) + _bytes(parameter) > most:
            members = open_buckets[key] = []
            closed.append((members, whole))
        members.append(parameter)
    return tuple(_lay(f"bucket{first_number + i}", members, ranks, whole) for i, (members, whole) in enumerate(closed))


def default_bytes(parameters: Sequence[Parameter]) -> int:
    """An eighth of the parameters, so that a few buckets overlap, within 1 MiB (latency) and 32 MiB (memory)."""
    return max(2**20, min(2**25, sum(map(_bytes, parameters)) // 8))


def _lay(name: str, members: Sequence[Parameter], ranks: int, whole: bool) -> Bucket:
    slots, offset = [], 0
    for parameter in members:
        slots.append(Slot(parameter.name, parameter.shape, offset, _numel(parameter)))
        offset += _numel(parameter)
    padded = -(-offset // ranks) * ranks
    sbp: NdSbp = (broadcast,) if whole else (Split(0),)
    first = members[0]
    return Bucket(name, tuple(slots), offset, padded, first.dtype, first.device, sbp, first.key, ranks)


def _numel(parameter: Parameter) -> int:
    return torch.Size(parameter.shape).numel()


def _bytes(parameter: Parameter) -> int:
    return _numel(parameter) * parameter.dtype.itemsize
