"""Buckets: parameters of one optimizer group and dtype in one flat tensor.

If the update is elementwise, parameters are concatenated, and the ranks' shards cut through them. Otherwise, or if the
mode asks for it, each one has an *owner*: it is whole inside the shard of one rank, which updates it. Gathering and
reducing such a bucket is the same collective, and the update sees whole parameters without communication. Elementwise
updates run once over a whole shard in both cases, other updates *one by one*.

Parameters that the user has split (tensor parallelism) are in buckets with rows. Row r is the flat bucket of rank r
along the mesh dimensions of that split: rows are S(0) along them, and elements S(1) along the ZeRO dimension.
Parameters that the user has split along the ZeRO dimension itself are stored as the user split them at every stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zerograph.ir.mesh import Mesh, local_part, size_along
from zerograph.ir.sbp import NdSbp, Split, broadcast, dims_split
from zerograph.ir.slots import Slot, cuts, unravel


@dataclass(frozen=True)
class Folder:
    """A directory for the files of offloaded tensors, one for each rank.

    Attributes:
        path: the directory.
        keep: keep the files when the process ends.
        fast: do not write the initial zeros to a new file.
    """

    path: str
    keep: bool = False
    fast: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class ShardStorage:
    """Where the shard and the optimizer state of a bucket are stored between steps.

    0-d entries of the state stay in memory.

    Attributes:
        device: the device that stores and updates the shard; None for the device that computes with it.
        pinned: use pinned memory on the CPU.
        parameters: folder of files for the shard; None for memory.
        state: folder of files for the state; None for memory.
        gather_buffer: the shard is a slice of memory for the whole bucket, into which a step gathers the other shards.
    """

    device: torch.device | None = None
    pinned: bool = field(default=True, compare=False)
    parameters: Folder | None = None
    state: Folder | None = None
    gather_buffer: bool = False


@dataclass(frozen=True)
class Bucket:
    """The layout of a bucket.

    Attributes:
        name: name of the bucket.
        slots: its parameters.
        numel: number of elements of a row that slots use.
        padded: number of elements of a row.
        dtype: dtype of the shard.
        device: the device that computes with it.
        sbp: SBP of the stored bucket.
        key: common properties of its parameters: optimizer, group, update program, whether they get gradients.
        ranks: number of ranks along ``zero_dims`` together, which divides ``padded``.
        zero_dims: the mesh dimensions that ZeRO splits along, ascending. The shards of the first are the largest.
        rows: number of rows; None for a flat bucket.
        owners: index along ``zero_dims`` of the owner of each slot; None if slots have no owners.
        one_by_one: the update is not elementwise and runs for each parameter.
        compute_dtype: dtype of the copy that the step computes with; None for ``dtype``.
        storage: where the bucket is stored between steps.
        block: slots and shards begin at multiples of it, in elements; see :mod:`zerograph.ops.blocks`.
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
    zero_dims: tuple[int, ...] = (0,)
    rows: int | None = None
    owners: tuple[int, ...] | None = None
    one_by_one: bool = False
    compute_dtype: torch.dtype | None = None
    storage: ShardStorage = ShardStorage()
    block: int = 1

    @property
    def storage_device(self) -> torch.device:
        """The device that stores and updates the shard."""
        return self.device if self.storage.device is None else self.storage.device

    @property
    def has_owners(self) -> bool:
        """True if each parameter is whole inside the shard of its owner."""
        return self.owners is not None

    @property
    def by_user(self) -> bool:
        """True if the user has split it along a ZeRO dimension: it is stored, and enters the step, with that SBP."""
        return self.rows is not None and any(self.sbp[dim] == Split(0) for dim in self.zero_dims)

    @property
    def split_sbp(self) -> NdSbp:
        """SBP of the bucket split along the ZeRO dimensions, also if it is stored as a broadcast."""
        if self.by_user:
            return self.sbp
        split = Split(0 if self.rows is None else 1)
        return tuple(split if dim in self.zero_dims else dim_sbp for dim, dim_sbp in enumerate(self.sbp))

    @property
    def gradient_sbp(self) -> NdSbp:
        """SBP that the gradient is reduced to. With owners it is reduced to them, even if all ranks keep the bucket."""
        return self.split_sbp if self.one_by_one else self.sbp

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the padding between and after the slots, in elements of a row."""
        taken = sorted((slot.offset, slot.offset + slot.numel) for slot in self.slots if slot.numel)
        starts, ends = [0, *(end for _, end in taken)], [*(start for start, _ in taken), self.padded]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    @property
    def norm_block(self) -> int:
        """Number of elements that a norm sums together with ``config.virtual_ranks``, whatever the shards."""
        return norm_block(self.numel)

    @property
    def is_in_norm_blocks(self) -> bool:
        """True if shards begin at multiples of ``norm_block``, or parameters with owners at multiples of vectors."""
        if self.has_owners:
            return self.block % _SMALLEST_NORM_BLOCK == 0
        return self.padded % (self.ranks * self.norm_block) == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global tensor: (padded,) or (rows, padded)."""
        return (self.padded,) if self.rows is None else (self.rows, self.padded)

    @property
    def is_whole(self) -> bool:
        """True if every rank stores the whole bucket."""
        return all(dim_sbp == broadcast for dim_sbp in self.sbp)

    @property
    def gathered(self) -> NdSbp:
        """SBP of the gathered bucket, which the step computes with."""
        if self.by_user:
            return self.sbp
        return tuple(broadcast if dim in self.zero_dims else dim_sbp for dim, dim_sbp in enumerate(self.sbp))

    def sbp_of(self, slot: Slot) -> NdSbp:
        """Return the SBP of a parameter in terms of its own dimensions; S(0) where shards cut through it."""
        if self.rows is None or not slot.split:
            return self.sbp
        cuts = iter(slot.split)
        of_user = [Split(next(cuts)[0]) if dim_sbp == Split(0) else dim_sbp for dim_sbp in self.sbp]
        return tuple(Split(0) if own == Split(1) else dim_sbp for own, dim_sbp in zip(self.sbp, of_user, strict=True))


@dataclass(frozen=True)
class Parameter:
    """The properties of a parameter that bucketing depends on.

    Attributes:
        sbp: the user's annotation.
        key: parameters of one bucket have equal ones.
        has_owner: it is whole inside the shard of one rank.
        one_by_one: the update is not elementwise and runs for each parameter.
        fused: one kernel updates the whole shard.
        compute_dtype: dtype of the copy that the step computes with; None for ``dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    key: Hashable
    sbp: NdSbp
    has_owner: bool = False
    one_by_one: bool = False
    compute_dtype: torch.dtype | None = None
    fused: bool = False
    layer: str = ""


# The longest vectors of CPUs, in bytes. A fused kernel rounds the elements after the last whole vector otherwise.
VECTOR_BYTES = 64


def from_whole_vector(x: Tensor) -> Tensor:
    """Return a tensor in contiguous memory that begins at a whole vector; products of others may round otherwise."""
    fits = x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def plan_buckets(
    parameters: Sequence[Parameter],
    *,
    mesh: Mesh,
    zero_dims: tuple[int, ...],
    split: bool,
    min_split_numel: int,
    bucket_bytes: int | None,
    block: int = 1,
    in_norm_blocks: bool = False,
) -> tuple[Bucket, ...]:
    """Group parameters into buckets.

    Args:
        parameters: the parameters in order of first use.
        mesh: the mesh. Buckets are padded to a multiple of its size along ``zero_dims``, broadcast ones too: norms are
            then summed in the same pieces at every stage. Shards with a fused update are whole vectors, so that an
            element is rounded alike at every stage.
        zero_dims: the mesh dimensions along which buckets are split, ascending; those of :func:`free_dims` for
            parameters that the user splits.
        split: split the buckets; else they are broadcast.
        min_split_numel: parameters with fewer elements are broadcast, in buckets of their own.
        bucket_bytes: maximum size of a bucket in bytes (a larger parameter has a bucket to itself); None for
            :func:`default_bytes`, or for whole layers where parameters name theirs. A bucket with owners grows until
            these own about the same, because padding would cost more than latency.
        block: parameters and shards begin at multiples of this power of two, in elements.
        in_norm_blocks: shards begin at multiples of :func:`norm_block`.
    """
    default = default_bytes(sum(map(_bytes, parameters)))
    by_key: dict[Hashable, list[list[Parameter]]] = {}
    in_order: list[list[Parameter]] = []
    for parameter in parameters:
        # Small parameters are separate even if all are broadcast, so that all stages have the same buckets and sums.
        small = _numel(parameter) < min_split_numel
        kind = (parameter.dtype, parameter.compute_dtype, parameter.device)
        key = (small, parameter.sbp, kind, parameter.key)
        group, ranks = by_key.setdefault(key, []), size_along(mesh, free_dims(zero_dims, parameter.sbp))
        if not group or (
            _is_full(group[-1], parameter, bucket_bytes, default) and _needs_little_padding(group[-1], ranks)
        ):
            group.append([])
            in_order.append(group[-1])
        group[-1].append(parameter)
    for group in by_key.values():
        ranks = size_along(mesh, free_dims(zero_dims, group[0][0].sbp))
        if len(group) > 1 and not _needs_little_padding(group[-1], ranks):
            group[-2] += group[-1]
            group[-1].clear()
    loads: dict[tuple[int, ...], list[int]] = {}
    buckets: list[Bucket] = []
    for members in filter(None, in_order):
        whole = not split or _numel(members[0]) < min_split_numel
        dims = free_dims(zero_dims, members[0].sbp)
        taken = loads.setdefault(dims, [0] * size_along(mesh, dims))
        name = f"bucket{len(buckets)}"
        buckets.append(_lay(name, members, mesh, dims, whole, taken, block, in_norm_blocks=in_norm_blocks))
    return tuple(buckets)


# The most sums of blocks of a bucket, which each rank receives for a norm.
_NORM_BLOCKS = 4096
# The fewest elements of a block: whole vectors of each dtype.
_SMALLEST_NORM_BLOCK = 64


def norm_block(numel: int) -> int:
    """Return the number of elements in a block of a bucket of ``numel`` elements; see :attr:`Bucket.norm_block`."""
    return max(_SMALLEST_NORM_BLOCK, 1 << (-(-numel // _NORM_BLOCKS) - 1).bit_length())


def free_dims(zero_dims: tuple[int, ...], sbp: NdSbp) -> tuple[int, ...]:
    """Return the mesh dimensions along which ZeRO splits a parameter that the user places so.

    They are those along which the user does not; if there are none, the parameter stays as the user placed it.
    """
    return tuple(dim for dim in zero_dims if sbp[dim] == broadcast) or zero_dims


def layer_of(parameter: str) -> str:
    """Return the outermost numbered module of a parameter, or its outermost module."""
    parts = parameter.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _is_full(members: Sequence[Parameter], parameter: Parameter, bucket_bytes: int | None, default: int) -> bool:
    """Return whether a bucket should not take another parameter."""
    size = sum(map(_bytes, members))
    if bucket_bytes is not None or not parameter.layer:
        return size + _bytes(parameter) > (bucket_bytes or default)
    # Small layers share buckets: collectives of less than the default size take as long.
    ends_layer = members[-1].layer != parameter.layer and size >= default
    return ends_layer or size + _bytes(parameter) > _MAX_LAYER_BYTES


# Larger buckets take memory, and their collectives start late.
MAX_BUCKET_BYTES = 2**25
# On accelerators a bucket is a whole layer up to this size.
_MAX_LAYER_BYTES = 2**29


def default_bytes(total: int) -> int:
    """Return the default bucket size in bytes for parameters of ``total`` bytes.

    It is an eighth of them, so that a few buckets overlap, but at least 1 MiB (latency) and at most 32 MiB (memory).
    """
    return max(2**20, min(MAX_BUCKET_BYTES, total // 8))


def state_layout(
    bucket: Bucket, name: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Bucket:
    """Return the layout of one entry of the optimizer's state for a bucket.

    If parameters are updated one by one, entries have any shapes, and are S(0) even if the parameters are broadcast:
    only the owner reads them.

    Args:
        bucket: layout of the parameters.
        name: name of the entry.
        shapes: shape of the entry for each parameter.
        dtype: dtype of the entry.
        device: device of the update.
    """
    # State is updated where it is stored, so pinned memory is of no use. Step counts are on the CPU in any case.
    storage = ShardStorage() if device != bucket.device else ShardStorage(bucket.storage.device, pinned=False)
    if bucket.owners is None or not bucket.one_by_one:
        return replace(bucket, name=name, dtype=dtype, device=device, storage=storage)
    slots = [
        Slot(slot.name, shape, 0, torch.Size(shape).numel()) for slot, shape in zip(bucket.slots, shapes, strict=True)
    ]
    laid, padded = _laid_by_owner(slots, bucket.owners, bucket.ranks, bucket.block, bucket.block)
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
        storage=storage,
    )


def _lay(
    name: str,
    members: Sequence[Parameter],
    mesh: Mesh,
    zero_dims: tuple[int, ...],
    whole: bool,
    loads: list[int],
    block: int,
    *,
    in_norm_blocks: bool,
) -> Bucket:
    first = members[0]
    row_dims = dims_split([first.sbp])
    rows = size_along(mesh, row_dims) if row_dims else None
    slots, offset = [], 0
    for parameter in members:
        numel = _numel(parameter) // (rows or 1)
        slots.append(Slot(parameter.name, parameter.shape, offset, numel, cuts(parameter.sbp, mesh)))
        offset += _rounded_up(numel, block)
    numel = sum(slot.numel for slot in slots)
    ranks = size_along(mesh, zero_dims)
    vector = VECTOR_BYTES // first.dtype.itemsize if first.fused and ranks > 1 else 1
    vector = norm_block(numel) if in_norm_blocks else vector
    # With blocks each rank of the mesh can sum whole blocks, whatever the dimensions that a reduction runs along.
    padded = _rounded_up(offset, ranks * vector if block == 1 else mesh.size * max(vector, block))
    sbp = [broadcast if dim_sbp == broadcast else Split(0) for dim_sbp in first.sbp]
    if not whole and row_dims.isdisjoint(zero_dims):
        for dim in zero_dims:
            sbp[dim] = Split(0 if rows is None else 1)
    kind = (first.dtype, first.device, tuple(sbp), first.key)
    if first.has_owner:
        owners = _owners([slot.numel for slot in slots], ranks, loads)
        if in_norm_blocks:
            # A parameter then begins at an address of the same alignment on each number of ranks.
            block, vector = max(block, _SMALLEST_NORM_BLOCK), _SMALLEST_NORM_BLOCK
        multiple = vector if block == 1 else mesh.size // ranks * max(vector, block)
        laid, padded = _laid_by_owner(slots, owners, ranks, multiple, block)
        form = (first.one_by_one, first.compute_dtype)
        return Bucket(name, laid, numel, padded, *kind, ranks, zero_dims, rows, owners, *form, block=block)
    form = (False, first.compute_dtype)
    return Bucket(name, tuple(slots), numel, padded, *kind, ranks, zero_dims, rows, None, *form, block=block)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _owners(sizes: Sequence[int], ranks: int, loads: list[int]) -> tuple[int, ...]:
    """Return the owner of each parameter: the largest first goes to the rank with the fewest elements (LPT rule).

    The number of elements is balanced because every shard is padded to the longest, in memory and on the wire. It is
    proportional to the work if matrices share a smaller side, as in a transformer (the flops of Muon are elements times
    that side). ``loads``, the elements of each rank in earlier buckets, breaks ties and is updated.
    """
    elements, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = owners[index] = min(range(ranks), key=lambda rank: (elements[rank], loads[rank], rank))
        elements[owner] += sizes[index]
        loads[owner] += sizes[index]
    return tuple(owners)


def _laid_by_owner(
    slots: Sequence[Slot], owners: Sequence[int], ranks: int, multiple: int = 1, block: int = 1
) -> tuple[tuple[Slot, ...], int]:
    """Return the slots, each inside the shard of its owner, and the length of all shards together.

    Args:
        multiple: the length of a shard is a multiple of it.
        block: slots begin at multiples of it.
    """
    used = [0] * ranks
    for slot, owner in zip(slots, owners, strict=True):
        used[owner] += _rounded_up(slot.numel, block)
    shard, used = _rounded_up(max(used), multiple), [0] * ranks
    laid = []
    for slot, owner in zip(slots, owners, strict=True):
        laid.append(replace(slot, offset=owner * shard + used[owner]))
        used[owner] += _rounded_up(slot.numel, block)
    return tuple(laid), shard * ranks


# A bucket with owners and at most this padding, as a fraction of its parameters, takes no further parameters.
_MAX_PADDING = 1 / 8


def _needs_little_padding(members: Sequence[Parameter], ranks: int) -> bool:
    """Return True if all shards are about as long as the longest, or the parameters have no owners."""
    if not members[0].has_owner:
        return True
    sizes = list(map(_numel, members))
    loads = [0] * ranks
    _owners(sizes, ranks, loads)
    return max(loads) * ranks - sum(sizes) <= _MAX_PADDING * sum(sizes)


def _numel(parameter: Parameter) -> int:
    return torch.Size(parameter.shape).numel()


def _bytes(parameter: Parameter) -> int:
    return _numel(parameter) * parameter.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """The elements of a parameter in one row of this rank's shard of a bucket.

    Attributes:
        slot: the parameter.
        row: index of the row in the shard; None in a flat bucket.
        start: index of the first element in that row.
        stop: index after the last element.
        piece: index of the row in the whole bucket, and so of the slice of the parameter in that row.
        low: index of the first element in that slice.
    """

    slot: Slot
    row: int | None
    start: int
    stop: int
    piece: int
    low: int

    def element(self, at: int) -> tuple[int, ...]:
        """Return the index in the parameter of element ``at`` of the span."""
        start = self.slot.start(self.piece)
        return tuple(map(sum, zip(start, unravel(self.low + at, self.slot.piece), strict=True)))


def spans(layout: Bucket, mesh: Mesh) -> Iterator[Span]:
    """Yield the spans of this rank's shard in the order of slots, without padding."""
    *rows, own = local_part(layout.shape, layout.sbp, mesh)
    numbers = range(rows[0].start, rows[0].stop) if rows else range(1)
    for slot in layout.slots:
        low, high = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
        if low < high:
            for row, number in enumerate(numbers):
                start, stop = low - own.start, high - own.start
                yield Span(slot, row if rows else None, start, stop, number, low - slot.offset)


def element_name(name: str, index: Sequence[int]) -> str:
    """Return the name of an element: ``model.weight[2, 1]``."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name
