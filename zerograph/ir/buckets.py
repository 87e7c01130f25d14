"""Buckets: parameters of one optimizer group and dtype in one flat tensor.

Where the update is elementwise they lie end to end, and the ranks' shards cut through them. Where it is not, or where
the mode says so, they are *dealt*: each lies whole within the shard of one rank, its owner, which alone updates it.
Gathering and reducing such a bucket is the same collective, the update needs none, and any operator whatever sees the
whole parameter. Elementwise updates are made once over a whole shard either way, others *one by one*.

Parameters that the user has split (tensor parallelism) lie in buckets of rows: row r is the flat bucket of rank r along
the mesh dimension that they are split along, so that rows are S(0) there, and their elements S(1) along ZeRO's. Where
that is ZeRO's own, they are split already: no stage has anything to say of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy
import torch
from torch import Tensor

from zerograph.ir.mesh import Mesh, local_part
from zerograph.ir.sbp import NdSbp, Split, broadcast


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
class Folder:
    """A directory for files that tensors rest in: one file for each rank.

    Attributes:
        keep: the files outlive the process.
        fast: zeros that a new file begins with are not written into it.
    """

    path: str
    keep: bool = False
    fast: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class ShardStorage:
    """Where a bucket rests between steps, if not in the memory of its device: its shard, and the optimizer's state.

    0-d entries of the state stay in memory.

    Attributes:
        device: in whose memory it rests, and is updated; None for the device that computes with it.
        pinned: so that an accelerator can copy from there by itself.
        parameters, state: files instead.
        room: the shard rests within memory for the whole bucket, into which a step gathers the other ranks' pieces.
    """

    device: torch.device | None = None
    pinned: bool = field(default=True, compare=False)
    parameters: Folder | None = None
    state: Folder | None = None
    gather_buffer: bool = False


@dataclass(frozen=True)
class Bucket:
    """The layout of a flat tensor of ``padded`` elements, of which the slots use ``numel``.

    ``key`` is what its parameters have in common: optimizer, group, update program, whether they get gradients.
    ``zero_dim`` is the mesh dimension that ZeRO splits along, ``ranks`` its size, which the bucket is padded for.
    ``rows`` is None for a flat bucket. ``owners`` has the place along ``zero_dim`` of each slot in a dealt one;
    ``one_by_one`` are its parameters updated whose update is not elementwise.
    ``compute_dtype`` is that of the copy which the step computes with; None for the bucket's own.
    ``rest`` is where it lies between steps.
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
    owners: tuple[int, ...] | None = None
    one_by_one: bool = False
    compute_dtype: torch.dtype | None = None
    storage: ShardStorage = ShardStorage()

    @property
    def storage_device(self) -> torch.device:
        """The device in whose memory it rests, and which updates it."""
        return self.device if self.storage.device is None else self.storage.device

    @property
    def dealt(self) -> bool:
        return self.owners is not None

    @property
    def by_user(self) -> bool:
        """Whether the user has split it along ZeRO's own dimension: it rests, and enters the step, just so."""
        return self.rows is not None and self.sbp[self.zero_dim] == Split(0)

    @property
    def split_sbp(self) -> NdSbp:
        """Split along ZeRO's dimension, whether or not it rests so."""
        if self.by_user:
            return self.sbp
        split = Split(0 if self.rows is None else 1)
        return tuple(split if dim == self.zero_dim else one for dim, one in enumerate(self.sbp))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the padding between and behind the slots, in elements of a row."""
        taken = sorted((slot.offset, slot.offset + slot.numel) for slot in self.slots if slot.numel)
        starts, ends = [0, *(end for _, end in taken)], [*(start for start, _ in taken), self.padded]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

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
        if self.by_user:
            return self.sbp
        return tuple(broadcast if dim == self.zero_dim else one for dim, one in enumerate(self.sbp))

    def sbp_of(self, slot: Slot) -> NdSbp:
        """The SBP of one of its parameters, in dimensions of that; S(0) where shards of the bucket cut through it."""
        if self.rows is None or slot.split is None:
            return self.sbp
        seen = {Split(0): Split(slot.split), Split(1): Split(0)}
        return tuple(seen[one] if isinstance(one, Split) else one for one in self.sbp)


@dataclass(frozen=True)
class Parameter:
    """What bucketing needs to know of a parameter; ``sbp`` is how the user placed it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: Hashable
    sbp: NdSbp
    dealt: bool = False
    one_by_one: bool = False
    compute_dtype: torch.dtype | None = None


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
            A dealt bucket grows until its parameters deal out evenly: its padding would cost more than its latency.
        first_number: buckets are named ``bucket<n>`` from here on.
    """
    most = bucket_bytes or default_bytes(sum(map(_bytes, parameters)))
    ranks = mesh.shape[zero_dim]
    by_key: dict[Hashable, list[list[Parameter]]] = {}
    in_order: list[list[Parameter]] = []
    for parameter in parameters:
        # Small ones apart also where all are whole: the stages then have the same buckets, and the same sums.
        small = _numel(parameter) < min_split_numel
        kind = (parameter.dtype, parameter.compute_dtype, parameter.device)
        key = (small, parameter.sbp, kind, parameter.key)
        alike = by_key.setdefault(key, [])
        if not alike or (sum(map(_bytes, alike[-1])) + _bytes(parameter) > most and _even(alike[-1], ranks)):
            alike.append([])
            in_order.append(alike[-1])
        alike[-1].append(parameter)
    for alike in by_key.values():
        if len(alike) > 1 and not _even(alike[-1], ranks):
            alike[-2] += alike[-1]
            alike[-1].clear()
    loads = [0] * ranks
    found: list[Bucket] = []
    for members in filter(None, in_order):
        whole = not split or _numel(members[0]) < min_split_numel
        found.append(_lay(f"bucket{first_number + len(found)}", members, mesh, zero_dim, whole, loads))
    return tuple(found)


# Larger ones take memory and begin late.
MOST_BYTES = 2**25


def default_bytes(total: int) -> int:
    """An eighth of the parameters, so that a few buckets overlap, within 1 MiB (latency) and 32 MiB (memory)."""
    return max(2**20, min(MOST_BYTES, total // 8))


def state_layout(
    bucket: Bucket, name: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Bucket:
    """The layout of one entry of the optimizer's state: of any shapes where parameters are updated one by one.

    It is S(0) there even where the parameters are B: only the owner ever reads it.
    """
    # It lies beside its bucket, and never leaves it: nothing copies from there. Step counts are on the CPU anyway.
    rest = ShardStorage() if device != bucket.device else ShardStorage(bucket.storage.device, pinned=False)
    if bucket.owners is None or not bucket.one_by_one:
        return replace(bucket, name=name, dtype=dtype, device=device, storage=rest)
    slots = [
        Slot(slot.name, shape, 0, torch.Size(shape).numel()) for slot, shape in zip(bucket.slots, shapes, strict=True)
    ]
    laid, padded = _dealt(slots, bucket.owners, bucket.ranks)
    numel = sum(slot.numel for slot in slots)
    return replace(
        bucket,
        name=name,
        slots=laid,
        numel=numel,
        padded=padded,
        dtype=dtype,
        device=device,
        sbp=bucket.split_sbp,
        storage=rest,
    )


def _lay(name: str, members: Sequence[Parameter], mesh: Mesh, zero_dim: int, whole: bool, loads: list[int]) -> Bucket:
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
    if not whole and cut != zero_dim:
        sbp[zero_dim] = Split(0 if rows is None else 1)
    kind = (first.dtype, first.device, tuple(sbp), first.key)
    if first.dealt:
        owners = _owners([slot.numel for slot in slots], ranks, loads)
        laid, padded = _dealt(slots, owners, ranks)
        about = owners, first.one_by_one, first.compute_dtype
        return Bucket(name, laid, offset, padded, *kind, ranks, zero_dim, rows, *about)
    return Bucket(name, tuple(slots), offset, padded, *kind, ranks, zero_dim, rows, None, False, first.compute_dtype)


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


def _owners(sizes: Sequence[int], ranks: int, loads: list[int]) -> tuple[int, ...]:
    """The rank of each parameter: the largest first, to the rank with the least so far (Graham's LPT rule).

    Elements are what counts: every shard is as long as the longest, in memory and on the wire. Work goes with them
    wherever matrices have one smaller side in common, as in a transformer (Muon's flops are elements times that side).
    Between ranks that have as much of this bucket, ``loads``, the sums over the buckets so far, decides.
    """
    here, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = owners[index] = min(range(ranks), key=lambda rank: (here[rank], loads[rank], rank))
        here[owner] += sizes[index]
        loads[owner] += sizes[index]
    return tuple(owners)


def _dealt(slots: Sequence[Slot], owners: Sequence[int], ranks: int) -> tuple[tuple[Slot, ...], int]:
    """The slots, each in the shard of its owner, and the length of all shards together."""
    used = [0] * ranks
    for slot, owner in zip(slots, owners, strict=True):
        used[owner] += slot.numel
    shard, used = max(used), [0] * ranks
    laid = []
    for slot, owner in zip(slots, owners, strict=True):
        laid.append(replace(slot, offset=owner * shard + used[owner]))
        used[owner] += slot.numel
    return tuple(laid), shard * ranks


# Most padding of a dealt bucket, as a part of its parameters, for which no further ones are awaited.
_PADDING = 1 / 8


def _even(members: Sequence[Parameter], ranks: int) -> bool:
    """Whether the parameters may be a bucket of their own: dealt out, they need little padding."""
    if not members[0].dealt:
        return True
    sizes = list(map(_numel, members))
    loads = [0] * ranks
    _owners(sizes, ranks, loads)
    return max(loads) * ranks - sum(sizes) <= _PADDING * sum(sizes)


def _numel(parameter: Parameter) -> int:
    return torch.Size(parameter.shape).numel()


def _bytes(parameter: Parameter) -> int:
    return _numel(parameter) * parameter.dtype.itemsize


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
    """Return the place of element ``index``, counted row by row, in a tensor of that shape."""
    return tuple(map(int, numpy.unravel_index(index, tuple(shape))))


def element_name(name: str, place: Sequence[int]) -> str:
    """``model.weight[2, 1]``."""
    return f"{name}[{', '.join(map(str, place))}]" if place else name
