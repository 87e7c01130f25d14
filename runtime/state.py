"""State that a rank holds between steps: its shard of each bucket, and the optimizer state of that shard.

A *store* is one bucket with its state. A parameter belongs to at most one store, which is an attribute of the
parameter, so every graph that shares the module uses the same one. The parameters of an unsplit bucket are views of it;
those of a split bucket are hidden (``parameters``).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.errors import InputError
from zerograph.ir.buckets import Bucket
from zerograph.ir.coded_state import decode_entry, encode_entry
from zerograph.ir.mesh import local_part, local_shape
from zerograph.ir.sbp import NdSbp, PartialSum
from zerograph.ir.slots import Slot, from_rows, to_rows
from zerograph.ir.step_graph import nbytes
from zerograph.ir.update_program import StateSpec
from zerograph.ops import blocks
from zerograph.runtime.checkpoint.file_tensor import FileTensor
from zerograph.runtime.job.exchange import gather_whole, start_gather
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import fill, read, read_to_overwrite, write
from zerograph.runtime.parameters import hide, show
from zerograph.runtime.tensor_hash import hash_bits

PlainState = dict[str, Tensor]

# A rank's part of a tensor, in memory or in a file.
TensorOrExtent = Tensor | Extent
# The file extents of a store's tensors, by name in ``Store.state``; the shard has the name "".
Extents = Mapping[str, Extent]


class ShardedState(enum.Enum):
    """Where the values of a store's parameters are.

    Transitions::

        (new)        -- create_store                        --> SHARDED
        (new)        -- create_provisional_store            --> PROVISIONAL
        SHARDED     <-- unshard, reshard                    --> UNSHARDED
        PROVISIONAL <-- unshard, reshard                    --> PROVISIONAL_UNSHARDED
        any          -- create_store, move, release         --> RELEASED

    ``create_store`` releases the stores that it takes the last parameter of. ``unshard`` leaves an unsplit bucket
    SHARDED: its parameters are usable as they are.

    Attributes:
        PROVISIONAL: one split parameter that no step trains yet. Its optimizer still holds its state. The first step
            that trains it moves it into a bucket.
        SHARDED: a bucket of a step. Parameters are hidden if the bucket is split, else views of it.
        PROVISIONAL_UNSHARDED, UNSHARDED: the parameters have whole values for the user to read and change.
        RELEASED: the parameters belong to another store or to none. Final.
    """

    PROVISIONAL = enum.auto()
    SHARDED = enum.auto()
    PROVISIONAL_UNSHARDED = enum.auto()
    UNSHARDED = enum.auto()
    RELEASED = enum.auto()


@dataclass(eq=False)
class Store:
    """One bucket between steps.

    Attributes:
        layout: the slot of each parameter in the bucket.
        parameters: the modules' own parameters, in slot order.
        flat: this rank's part of the bucket; whole where the bucket is not split.
        state: optimizer state by name; 0-d entries are equal on all ranks.
        specs: what the entries of ``state`` are.
        layouts: the slot of each parameter in an entry; 0-d entries have no layout.
        fresh: no update has run: a plain optimizer would hold no state yet.
        first_differs: the first update is another program than later ones, in a step compiled for this store.
        optimizer: the optimizer that ``state`` belongs to.
        keeps_unused: the update of a step compiled for this store uses only some entries of ``state``; another update
            of the same optimizer uses the others.
        gather_buffer: memory for the whole bucket; ``flat`` is this rank's piece of it, and the other pieces are those
            of the last step that gathered them. None where each step allocates memory for the gathered bucket.
        accumulated: the sum of gradients that the next update uses; None: none were added up.
        residuals: by mesh dimension, what this rank's codes of gradients have lacked; see :func:`residual`.
        own_residual: the mesh dimension of the residual of gradients that no two ranks share; None: there is none.
        received: the bucket as all ranks have it from gathers that send differences; see :func:`received`.
        unsharded_bits: a hash of the whole values that parameters got, where ``received`` depends on them.
        serial: the number of this store in the process; it is new in a copy by ``replace``.
    """

    job: Job
    layout: Bucket
    parameters: tuple[nn.Parameter, ...]
    flat: TensorOrExtent  # [padded / ranks]; in a bucket of rows [1, padded / ranks]
    state: dict[str, TensorOrExtent] = field(default_factory=dict)  # as ``flat``, of the entry's layout; or []
    specs: Mapping[str, StateSpec] = field(default_factory=dict)
    layouts: Mapping[str, Bucket] = field(default_factory=dict)
    fresh: bool = True
    first_differs: bool = False
    optimizer: torch.optim.Optimizer | None = None
    keeps_unused: bool = False
    gather_buffer: Tensor | None = None  # [padded], or [rows, padded]
    accumulated: Tensor | None = None  # this rank's part of a bucket with ``layout.gradient_sbp``
    residuals: dict[int, Tensor] = field(default_factory=dict)
    own_residual: int | None = None
    received: Tensor | None = None  # this rank's part of a bucket with ``layout.gathered``
    unsharded_bits: int | None = None
    sharded_state: ShardedState = ShardedState.SHARDED
    serial: int = field(default_factory=itertools.count(1).__next__, init=False)

    @property
    def is_provisional(self) -> bool:
        """Return whether no step trains the parameter yet."""
        return self.sharded_state in (ShardedState.PROVISIONAL, ShardedState.PROVISIONAL_UNSHARDED)

    @property
    def is_unsharded(self) -> bool:
        """Return whether split parameters have whole values at the moment."""
        return self.sharded_state in (ShardedState.UNSHARDED, ShardedState.PROVISIONAL_UNSHARDED)

    @property
    def is_released(self) -> bool:
        """Return whether the parameters belong to another store, or to none."""
        return self.sharded_state is ShardedState.RELEASED

    def slots(self) -> Iterable[tuple[nn.Parameter, Slot]]:
        """Return each parameter with its slot."""
        return zip(self.parameters, self.layout.slots, strict=True)

    def check_aliases(self) -> None:
        """Raise if the data of a parameter is no longer a view of this unsplit bucket.

        Raises:
            InputError: ``module.to(...)`` or an assignment to ``.data`` replaced it.
        """
        if not self.layout.is_whole:
            return
        flat = in_memory(self.flat)
        base, size = flat.data_ptr(), flat.element_size()
        for parameter, slot in self.slots():
            if slot.numel and parameter.data_ptr() != base + slot.offset * size:
                raise InputError(
                    f"the data of {slot.name} was replaced after the graph was compiled (module.to(), .data = ...)\n"
                    "Change parameters in place, or through load_state_dict()."
                )


def store_of(parameter: nn.Parameter) -> Store | None:
    """Return the store that the parameter belongs to, or None."""
    store: Store | None = getattr(parameter, "_zerograph_store", None)
    return store


def stores_of(parameters: Iterable[nn.Parameter]) -> list[Store]:
    """Return the distinct stores of the parameters, in parameter order: the same order on all ranks."""
    return [store for store in dict.fromkeys(map(store_of, parameters)) if store is not None]


def in_memory(value: TensorOrExtent) -> Tensor:
    """Return the tensor itself, or a copy of the one that a file holds.

    Raises:
        OffloadError: the file cannot be read.
    """
    return value if isinstance(value, Tensor) else read(value)


def accumulated(store: Store) -> Tensor:
    """Return this rank's part of the bucket's accumulated gradient; zeros where none was added yet."""
    if store.accumulated is None:
        layout = store.layout
        shape = local_shape(layout.shape, layout.gradient_sbp, store.job.mesh)
        store.accumulated = torch.zeros(shape, dtype=layout.dtype, device=layout.storage_device)
    return store.accumulated


def residual(store: Store, dim: int, sbp: NdSbp, dtype: torch.dtype) -> Tensor:
    """Return this rank's residual of the reductions along a mesh dimension.

    Before the first step that of each rank's own gradients has what a checkpoint held (:func:`set_residuals`), whatever
    mesh that was of. Others are zeros.

    Args:
        sbp: the placement of the gradients that are coded.
        dtype: dtype of the residual.
    """
    sizes = store.job.mesh.shape
    is_own = all(isinstance(entry, PartialSum) for entry, size in zip(sbp, sizes, strict=False) if size > 1)
    if is_own:
        store.own_residual = dim
    if dim not in store.residuals:
        layout = store.layout
        shape = local_shape(layout.shape, sbp, store.job.mesh)
        store.residuals[dim] = new = torch.zeros(shape, dtype=dtype, device=layout.device)
        for parameter, slot in store.slots():
            for saved_dim, loaded in pending_residuals(parameter).items() if is_own else ():
                del vars(parameter)[_LOADED_RESIDUALS][saved_dim]
                if shape == layout.shape == (layout.padded,):
                    new[slot.offset : slot.offset + slot.numel].copy_(loaded)
    return store.residuals[dim]


def received(store: Store, dtype: torch.dtype) -> Tensor:
    """Return the bucket as all ranks have it from gathers that send differences.

    Before the first gather it is what a checkpoint held, else the exact bucket: a collective then. So it is where the
    step before computed with another dtype.

    Args:
        dtype: the dtype that the step computes with.
    """
    if store.received is None or store.received.dtype is not dtype:
        layout = store.layout
        whole = gather_whole(store.job, in_memory(store.flat).to(layout.device), layout.sbp).to(dtype)
        store.received = whole[local_part(layout.shape, layout.gathered, store.job.mesh)].clone()
        for parameter, slot in store.slots():
            loaded = vars(parameter).get(_LOADED_RESIDUALS, {}).pop(RECEIVED, None)
            if loaded is not None and store.received.shape == (layout.padded,):
                store.received[slot.offset : slot.offset + slot.numel].copy_(loaded)
    return store.received


_LOADED_RESIDUALS = "_zerograph_residuals"
# The key of received weights beside residuals, whose keys are mesh dimensions.
RECEIVED = -1


def pending_residuals(parameter: nn.Parameter) -> dict[int, Tensor]:
    """Return this rank's residuals of a checkpoint, by mesh dimension, that no step has read yet."""
    pending: dict[int, Tensor] = vars(parameter).get(_LOADED_RESIDUALS, {})
    return {dim: tensor for dim, tensor in pending.items() if dim != RECEIVED}


def set_residuals(parameters: Iterable[nn.Parameter], loaded: Mapping[int, dict[int, Tensor]]) -> None:
    """Replace this rank's residuals of these parameters.

    Args:
        parameters: the parameters.
        loaded: by ``id`` of a parameter, its parts of the residuals by mesh dimension, [numel], and under ``RECEIVED``
            of the weights that all ranks have. Other residuals become 0, other weights are gathered.
    """
    for parameter in parameters:
        vars(parameter).pop(_LOADED_RESIDUALS, None)
        if id(parameter) in loaded:
            vars(parameter)[_LOADED_RESIDUALS] = loaded[id(parameter)]
        store = store_of(parameter)
        if store is not None:
            store.residuals.clear()
            store.received = None


def accumulated_gradients(store: Store) -> list[Tensor]:
    """Return the whole accumulated gradient of each parameter, views of one bucket. A collective where split."""
    layout = store.layout
    whole = gather_whole(store.job, accumulated(store).to(layout.device), layout.gradient_sbp)
    return [_slot_part(whole, slot) for slot in layout.slots]


def load_accumulated(store: Store, gradients: Sequence[Tensor | None]) -> None:
    """Overwrite accumulated gradients with whole values; None leaves one as it is. No collective."""
    layout = replace(store.layout, sbp=store.layout.gradient_sbp)
    load_part(store.job, layout, accumulated(store), gradients)


def initial_value(spec: StateSpec) -> float:
    """Return the value of a state entry before the first update; the sign of a zero counts."""
    return 0.0 if spec.initial is None else spec.initial


def unshard(stores: Iterable[Store]) -> None:
    """Give split parameters their whole values, for the user to read or change. A collective; gathers overlap."""
    stores = list(stores)
    for finish in [start_unshard(store) for store in stores]:
        finish()
    for store in stores:
        if store.received is not None and store.is_unsharded:
            store.unsharded_bits = _bits(store)


def start_unshard(store: Store) -> Callable[[], None]:
    """Start :func:`unshard`, and return the function that ends it."""
    layout = store.layout
    if layout.is_whole:
        return lambda: None
    finish = start_gather(store.job, in_memory(store.flat).to(layout.device), layout.sbp)

    def show_parameters() -> None:
        whole = finish()
        show_whole(store, [_slot_part(whole, slot) for slot in layout.slots])

    return show_parameters


def show_whole(store: Store, values: Iterable[Tensor]) -> None:
    """Make split parameters whole, with these values."""
    for parameter, value in zip(store.parameters, values, strict=True):
        show(parameter, value)
    store.unsharded_bits = None
    provisional = store.is_provisional
    store.sharded_state = ShardedState.PROVISIONAL_UNSHARDED if provisional else ShardedState.UNSHARDED


def reshard(store: Store, *, keep_changes: bool = True) -> None:
    """Undo :func:`unshard`: each rank keeps its own part, with the user's changes. No collective."""
    if store.is_unsharded:
        if keep_changes:
            if store.received is not None and store.unsharded_bits != _bits(store):
                # The user assigned other values, on every rank the same: no difference of an update.
                store.received = None
            load_parameters(store, [parameter.detach() for parameter in store.parameters])
        bind_parameters(store)
        store.sharded_state = ShardedState.PROVISIONAL if store.is_provisional else ShardedState.SHARDED


def _bits(store: Store) -> int:
    """Return a hash of the whole values of an unsharded bucket's parameters: equal on all ranks."""
    hashes = torch.stack([hash_bits(parameter.detach()) for parameter in store.parameters])
    return int(hash_bits(hashes))


def bind_parameters(store: Store) -> None:
    """Give the parameters the form that they have between steps: hidden if split, else views of the bucket."""
    if store.layout.is_whole:
        flat = in_memory(store.flat)
        for parameter, slot in store.slots():
            show(parameter, _slot_part(flat, slot))
    else:
        for parameter in store.parameters:
            hide(parameter)


def _gather(job: Job, layout: Bucket, shard: TensorOrExtent) -> Tensor:
    """Return a whole bucket or state entry, in memory of its own. A collective where split."""
    return gather_whole(job, in_memory(shard).to(layout.device), layout.sbp)


def gather_parts(store: Store, indices: Sequence[int], name: str = "") -> Iterator[tuple[int, Tensor]]:
    """Yield the whole values of some parameters, by index, or of their parts of an entry. A collective where split.

    Values are in the parameter's shape: views of one whole bucket if that is flat.
    """
    layout, shard = (store.layouts.get(name), store.state[name]) if name else (store.layout, store.flat)
    if layout is None:
        # A step count that all parameters share.
        yield from ((index, in_memory(shard)) for index in indices)
        return
    whole = _gather(store.job, layout, shard)
    for index in indices:
        yield index, _slot_part(whole, layout.slots[index])


def _gather_all(store: Store, name: str = "") -> list[Tensor]:
    return [part for _, part in gather_parts(store, range(len(store.parameters)), name)]


def _slot_part(whole: Tensor, slot: Slot) -> Tensor:
    return from_rows(whole[..., slot.offset : slot.offset + slot.numel], slot)


def plain_parameters(store: Store) -> list[Tensor]:
    """Return the whole value of each parameter, in memory of its own. A collective where split."""
    return [part.clone() for part in _gather_all(store)]


def plain_states(store: Store) -> list[PlainState]:
    """Return for each parameter the state that a plain optimizer would hold. A collective where split."""
    states: list[PlainState] = [{} for _ in store.parameters]
    if store.fresh:
        return states
    for name, spec in store.specs.items():
        for (_, slot), state, value in zip(store.slots(), states, _gather_all(store, name), strict=True):
            state[name] = plain_entry(store, name, value, slot).to(spec.plain_dtype, copy=True)
    return states


def load_parameters(store: Store, values: Sequence[Tensor | None]) -> None:
    """Overwrite parameters with whole values; None leaves one as it is. No collective: each rank takes its part."""
    load_part(store.job, store.layout, store.flat, values)


def load_states(store: Store, states: Sequence[Mapping[str, Any]]) -> None:
    """Overwrite the optimizer state with that of a plain optimizer.

    Args:
        states: for each parameter its state by name; all empty: as before the first update.
    """
    store.fresh = not any(states)
    for name, spec in store.specs.items():
        layout = store.layouts.get(name)
        entry = store.state[name]
        if layout is not None and not store.fresh:
            values = [state.get(name) for state in states]
            load_part(
                store.job,
                layout,
                entry,
                [
                    value if value is None or spec.codec is None else encode_entry(_whole(value), spec.codec)
                    for value in values
                ],
            )
            continue
        if layout is not None and spec.codec is not None:
            _overwrite(entry, initial_entry(store, name))
            continue
        value = states[0][name] if layout is None and states[0] else initial_value(spec)
        if isinstance(entry, Extent):
            fill(entry, value)
        else:
            entry.fill_(value)


def initial_entry(store: Store, name: str) -> Tensor:
    """Return this rank's part of a state entry before the first update, where its layout keeps it."""
    layout, spec = store.layouts[name], store.specs[name]
    shape = local_shape(layout.shape, layout.sbp, store.job.mesh)
    value, device = initial_value(spec), layout.storage_device
    if spec.codec is None:
        return torch.full(shape, value, dtype=layout.dtype, device=device)
    numel = shape[-1] // spec.codec.block_bytes * spec.codec.block
    coded: Tensor = blocks.encode(torch.full((*shape[:-1], numel), value, device=device), *spec.codec.arguments)
    return coded


def plain_entry(store: Store, name: str, value: Tensor, slot: Slot) -> Tensor:
    """Return a parameter's whole state entry, as the store keeps it, in the form that a plain optimizer keeps.

    Args:
        slot: the parameter's slot in the bucket.
    """
    spec = store.specs[name]
    return value if spec.codec is None else decode_entry(value, torch.Size(slot.shape), spec.codec, spec.dtype)


def coded_entry(store: Store, name: str, value: Tensor) -> Tensor:
    """Return a parameter's whole state entry in the form that the store keeps; the inverse of :func:`plain_entry`."""
    codec = store.specs[name].codec
    return value if codec is None else encode_entry(value, codec)


def _whole(value: Any) -> Tensor:
    return value.whole() if isinstance(value, FileTensor) else torch.as_tensor(value)


def _overwrite(target: TensorOrExtent, value: Tensor) -> None:
    if isinstance(target, Extent):
        write(target, value)
    else:
        target.copy_(value)


def load_part(job: Job, layout: Bucket, target: TensorOrExtent, values: Sequence[Any]) -> None:
    """Write this rank's part of whole values into its part of a bucket; None leaves a slot as it is.

    Of a :class:`FileTensor` only the rows of this rank's part are read.
    """
    complete = all(value is not None for value in values)
    shard = read_to_overwrite(target, whole=complete) if isinstance(target, Extent) else target
    *rows, own = local_part(layout.shape, layout.sbp, job.mesh)
    with torch.no_grad():
        for slot, value in zip(layout.slots, values, strict=True):
            low, high = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
            if value is None or low >= high:
                continue
            own_part = shard[..., low - own.start : high - own.start]
            if isinstance(value, FileTensor) and layout.rows is None:
                value.copy_flat(own_part, low - slot.offset)
                continue
            whole = _whole(value)
            laid = to_rows(whole, slot)[tuple(rows)]
            own_part.copy_(laid[..., low - slot.offset : high - slot.offset])
    if isinstance(target, Extent):
        write(target, shard)


def stored_bytes(stores: Iterable[Store]) -> int:
    """Return the bytes of this rank's memory that the stores take between steps, gather buffers included."""
    values: list[TensorOrExtent] = []
    for store in stores:
        # The shard is a view of the gather buffer.
        values += [store.flat if store.gather_buffer is None else store.gather_buffer, *store.state.values()]
        values += [value for value in (store.accumulated, store.received) if value is not None]
        values += store.residuals.values()
    return sum(nbytes(value) for value in values if isinstance(value, Tensor))


def extents(store: Store) -> dict[str, Extent]:
    """Return the file extents of the store's tensors, by name in its state; the shard has the name ""."""
    values = {"": store.flat, **store.state}
    return {name: value for name, value in values.items() if isinstance(value, Extent)}


def holds_state_of(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether stores, rather than the optimizer itself, hold some of the optimizer's state."""
    stores = (store_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return any(store is not None and store.optimizer is optimizer for store in stores)
