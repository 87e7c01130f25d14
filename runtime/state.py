"""State that a rank holds between steps: its shard of each bucket, and the optimizer state of that shard.

A *store* is one bucket with its state. A parameter belongs to at most one store, which is an attribute of the
parameter, so every graph that shares the module uses the same one. The parameters of an unsplit bucket are views of it;
those of a split bucket are hidden (``parameters``). ``optimizer.state`` of an optimizer whose state stores hold is a
:class:`StoredState`: whole and writable in ``full_parameters()``, an error elsewhere.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import math
import sys
from collections import ChainMap, UserDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph._torch import WeakStorage, version
from zerograph.errors import InputError, SplitParameterError
from zerograph.ir.buckets import Bucket, Parameter, plan_buckets
from zerograph.ir.coded_state import decode_entry, encode_entry
from zerograph.ir.mesh import local_part, local_shape
from zerograph.ir.sbp import NdSbp, Split, broadcast, is_dtensor
from zerograph.ir.slots import Slot, from_rows, to_rows
from zerograph.ir.step_graph import nbytes
from zerograph.ir.update_program import StateSpec
from zerograph.ops import blocks
from zerograph.runtime.checkpoint.file_tensor import FileTensor
from zerograph.runtime.job.exchange import broadcast_from, gather_whole, start_gather
from zerograph.runtime.job.process_group import Job, agree
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import fill, read, read_to_overwrite, write
from zerograph.runtime.parameters import hide, in_memory_read, parameters_of, settle_gradient, show
from zerograph.runtime.tensor_hash import hash_bits

PlainState = dict[str, Any]

# A rank's part of a tensor, in memory or in a file.
TensorOrExtent = Tensor | Extent
# The file extents of a store's tensors, by name in ``Store.state``; the shard has the name "".
Extents = Mapping[str, Extent]


class ShardedState(enum.Enum):
    """Where the values of a store's parameters are.

    Transitions::

        (new)        -- create_store                        --> SHARDED
        (new)        -- create_, plan_provisional_store     --> PROVISIONAL
        SHARDED     <-- unshard, reshard                    --> UNSHARDED
        PROVISIONAL <-- unshard, reshard                    --> PROVISIONAL_UNSHARDED
        any          -- create_store, fill_in, move, release --> RELEASED

    ``create_store`` releases the stores that it takes the last parameter of. ``unshard`` leaves an unsplit bucket
    SHARDED: its parameters are usable as they are.

    Attributes:
        PROVISIONAL: one parameter that no step trains yet. The store has its optimizer state if a checkpoint was
            loaded, else the optimizer has it. The first step that trains it moves both into a bucket.
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
class BucketState:
    """A bucket and its optimizer state, of a step or between steps; without the values.

    Attributes:
        layout: the slot of each parameter in the bucket.
        specs: what the entries of the optimizer state are, by name.
        layouts: the slot of each parameter in an entry; 0-d entries have no layout.
        optimizer: the optimizer that the state belongs to; None: there is none.
        fresh: no update has run: a plain optimizer would hold no state yet.
    """

    layout: Bucket
    specs: Mapping[str, StateSpec]
    layouts: Mapping[str, Bucket]
    optimizer: torch.optim.Optimizer | None
    fresh: bool


@dataclass(eq=False)
class Store(BucketState):
    """One bucket between steps.

    Attributes:
        parameters: the modules' own parameters, in slot order.
        flat: this rank's part of the bucket; whole where the bucket is not split.
        state: optimizer state by name; 0-d entries are equal on all ranks.
        first_differs: the first update is another program than later ones, in a step compiled for this store.
        keeps_unused: the update of a step compiled for this store uses only some entries of ``state``; another update
            of the same optimizer uses the others.
        gather_buffer: memory for the whole bucket; ``flat`` is this rank's piece of it, and the other pieces are those
            of the last step that gathered them. None where each step allocates memory for the gathered bucket.
        accumulated: the sum of gradients that the next update uses; None: none were added up.
        reduce: makes this rank's part of the sum of ``accumulated``, which is what the rank adds to it. None: it is
            that part.
        residuals: by mesh dimension, what this rank's codes of gradients have lacked; see ``feedback``.
        own_residual: the mesh dimension of the residual of gradients that no two ranks share; None: there is none.
        received: the bucket as all ranks have it from gathers that send differences; see ``feedback``.
        unsharded_bits: a hash of the whole values that parameters got, where ``received`` depends on them.
        serial: the number of this store in the process; it is new in a copy by ``replace``.
        gathered_version: the version of ``flat`` that all of the gather buffer has; None: it may have any values.
        former: the memory of trained parameters before they were moved here, by name; other tensors may still have it.
    """

    job: Job
    parameters: tuple[nn.Parameter, ...]
    flat: TensorOrExtent  # [padded / ranks]; in a bucket of rows [1, padded / ranks]
    state: dict[str, TensorOrExtent] = field(default_factory=dict)  # as ``flat``, of the entry's layout; or []
    first_differs: bool = False
    keeps_unused: bool = False
    gather_buffer: Tensor | None = None  # [padded], or [rows, padded]
    accumulated: Tensor | None = None  # this rank's part of a bucket with ``layout.gradient_sbp``; unreduced [padded]
    reduce: Callable[[Bucket, Tensor], Tensor] | None = None
    residuals: dict[int, Tensor] = field(default_factory=dict)
    own_residual: int | None = None
    received: Tensor | None = None  # this rank's part of a bucket with ``layout.gathered``
    unsharded_bits: int | None = None
    sharded_state: ShardedState = ShardedState.SHARDED
    serial: int = field(default_factory=itertools.count(1).__next__, init=False)
    gathered_version: int | None = field(default=None, init=False)
    former: dict[str, WeakStorage] = field(default_factory=dict)

    @property
    def is_gathered(self) -> bool:
        """Return whether the gather buffer has the present values of all ranks' parts."""
        return self.gathered_version is not None and self.gathered_version == version(in_memory(self.flat))

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


def store_of(tensor: Tensor) -> Store | None:
    """Return the store that the tensor, a parameter, belongs to, or None."""
    store: Store | None = getattr(tensor, "_zerograph_store", None)
    return store


def stores_of(parameters: Iterable[nn.Parameter]) -> list[Store]:
    """Return the distinct stores of the parameters, in parameter order: the same order on all ranks."""
    found: Any = dict.fromkeys(map(dict.get, map(vars, parameters), itertools.repeat("_zerograph_store")))
    found.pop(None, None)
    return [*found]


def in_memory(value: TensorOrExtent) -> Tensor:
    """Return the tensor itself, or a copy of the one that a file holds.

    Raises:
        OffloadError: the file cannot be read.
    """
    return value if isinstance(value, Tensor) else read(value)


def accumulated(store: Store) -> Tensor:
    """Return this rank's part of the bucket's accumulated gradient; zeros where none was added yet.

    A collective if it is to be reduced.
    """
    if store.accumulated is not None and store.reduce is not None:
        store.accumulated = store.reduce(store.layout, store.accumulated)
    store.reduce = None
    if store.accumulated is None:
        layout = store.layout
        shape = local_shape(layout.shape, layout.gradient_sbp, store.job.mesh)
        store.accumulated = torch.zeros(shape, dtype=layout.dtype, device=layout.storage_device)
    return store.accumulated


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
        show(parameter, in_memory_read(parameter, value))
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


def gather_parts(store: Store, indices: Sequence[int], name: str = "") -> Iterator[tuple[int, Tensor]]:
    """Yield the whole values of some parameters, by index, or of their parts of an entry. A collective where split.

    Values are in the parameter's shape: views of one whole bucket if that is flat.
    """
    layout, shard = (store.layouts.get(name), store.state[name]) if name else (store.layout, store.flat)
    if layout is None:
        # A step count that all parameters share.
        yield from ((index, in_memory(shard)) for index in indices)
        return
    whole = gather_whole(store.job, in_memory(shard).to(layout.device), layout.sbp)
    for index in indices:
        yield index, _slot_part(whole, layout.slots[index])


def _slot_part(whole: Tensor, slot: Slot) -> Tensor:
    return from_rows(whole[..., slot.offset : slot.offset + slot.numel], slot)


def plain_parameters(store: Store) -> list[Tensor]:
    """Return the whole value of each parameter, in memory of its own. A collective where split."""
    return [part.clone() for _, part in gather_parts(store, range(len(store.parameters)))]


def plain_states(store: Store) -> list[PlainState]:
    """Return for each parameter the state that a plain optimizer would hold. A collective where split."""
    states: list[PlainState] = [{} for _ in store.parameters]
    if store.fresh:
        return states
    for name, spec in store.specs.items():
        for index, value in gather_parts(store, range(len(states)), name):
            plain = plain_entry(store, name, value, store.layout.slots[index])
            plain = plain.to(spec.plain_dtype, copy=True)
            states[index][name] = plain if spec.number is None else _number(plain.item(), spec.number)
    return states


def _number(value: float, kind: str) -> float:
    # One that has begun as 0 may have become a float.
    return int(value) if kind == "int" and value.is_integer() else value


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
            if spec.codec is not None:
                values = [None if value is None else encode_entry(_whole(value), spec.codec) for value in values]
            load_part(store.job, layout, entry, values)
        elif isinstance(entry, Extent):
            _write_initial(store, name, entry)
        elif layout is not None and spec.codec is not None:
            entry.copy_(initial_entry(store, name))
        else:
            entry.fill_(states[0][name] if layout is None and states[0] else initial_value(spec))


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


def _write_initial(store: Store, name: str, extent: Extent, *, fast: bool = False) -> None:
    """Write this rank's part of a state entry before the first update to its file; ``fast`` as for ``fill``."""
    if store.specs[name].codec is None:
        fill(extent, initial_value(store.specs[name]), fast=fast)
    else:
        write(extent, initial_entry(store, name))


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
    if isinstance(value, FileTensor):
        return value.whole()
    # An optimizer's state of a global tensor is a global tensor too.
    return value.full_tensor() if is_dtensor(value) else torch.as_tensor(value)


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
    return any(store.optimizer is optimizer for store in stores_of(parameters_of(optimizer)))


# Which store holds a parameter, and where its tensors are. Values travel one bucket at a time, so about one bucket of
# each kind is whole at once.


def create_store(job: Job, planned: BucketState, parameters: Sequence[nn.Parameter], extents: Extents) -> Store:
    """Move parameters, and their state in the planned optimizer, into a new store. A collective.

    Plain parameters take rank 0's values. Other stores that hold some of the parameters lose them: a store that has
    lost all is released, and other optimizers get their state back. Takes memory for one whole bucket, and for one
    whole source bucket, beside what is there already.

    Args:
        planned: the new bucket.
        parameters: those of its slots, in order.
        extents: where tensors go that are offloaded to files.

    Raises:
        OffloadError: a file could not be written.
    """
    layout, optimizer, sources = planned.layout, planned.optimizer, stores_of(parameters)
    for source in sources:
        if source.optimizer is not optimizer:
            _return_state(source, parameters)
    states = [_state_in(optimizer, parameter) for parameter in parameters]
    with torch.no_grad():
        plain_or_stores = [store_of(parameter) or parameter.detach() for parameter in parameters]
        whole = _gather(job, layout, parameters, plain_or_stores)
        in_buffer = layout.storage.gather_buffer
        shard = _view_of_part(job, layout, whole) if in_buffer else _own_part(job, layout, whole)
        flat = _stored(shard, extents.get(""))
        own = planned.specs, planned.layouts, optimizer, not any(states)
        store = Store(layout, *own, job, tuple(parameters), flat, gather_buffer=whole if in_buffer else None)
        del whole, shard, flat
        for name, spec in planned.specs.items():
            store.state[name] = _create_entry(store, name, spec, states, extents.get(name))
        store.former = dict(ChainMap(*(source.former for source in sources)))
        for parameter, slot in store.slots():
            if store_of(parameter) is None and parameter.requires_grad:
                store.former[slot.name] = WeakStorage(parameter.untyped_storage())
            parameter._zerograph_store = store  # type: ignore[attr-defined]
            if optimizer is not None:
                own_state(optimizer).pop(parameter, None)
        if optimizer is not None:
            guard_state(optimizer)
        bind_parameters(store)
        for source in sources:
            if source.accumulated is not None:
                values = dict(zip(map(id, source.parameters), accumulated_gradients(source), strict=True))
                load_accumulated(store, [values.get(id(parameter)) for parameter in parameters])
            _release_if_empty(source)
    return store


def flat_state(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with the tensors in lists, tuples and dicts as its own entries: ``bases[0]``.

    The rest of such a container is the entry ``bases[]``.
    """
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        items = _items(value) if type(value) in (list, tuple, dict) else []
        if any(isinstance(one, Tensor) for _, one in items):
            flat |= {f"{name}[{key!r}]": one for key, one in items if isinstance(one, Tensor)}
            flat[f"{name}[]"] = _like(value, [None if isinstance(one, Tensor) else one for _, one in items])
        else:
            flat[name] = value
    return flat


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that :func:`flat_state` flattened."""
    entries: dict[str, Any] = {}
    for name, value in flat.items():
        if name.endswith("[]"):
            entries[name[:-2]] = _like(value, [flat.get(f"{name[:-2]}[{key!r}]", one) for key, one in _items(value)])
        elif f"{name.rpartition('[')[0]}[]" not in flat:
            entries[name] = value
    return entries


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if type(container) is dict else enumerate(container))


def _like(container: Any, values: Sequence[Any]) -> Any:
    """Return a container of the same type with other values."""
    return dict(zip(container, values, strict=True)) if type(container) is dict else type(container)(values)


def _state_in(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Any]:
    """Return the optimizer state of the parameter, by name: a tensor, or the store that holds it."""
    store = store_of(parameter)
    if store is not None and store.optimizer is optimizer and not store.fresh:
        return dict.fromkeys(store.specs, store)
    return {} if optimizer is None else flat_state(own_state(optimizer).get(parameter, {}))


def _gather(
    job: Job,
    layout: Bucket,
    parameters: Sequence[nn.Parameter],
    values: Sequence[Any],
    name: str = "",
    convert: Callable[[Any, nn.Parameter, Store | None], Tensor] | None = None,
) -> Tensor:
    """Return a new whole bucket of parameters, or of their entries ``name``, plain or in other stores. A collective.

    Plain values are rank 0's.

    Args:
        values: of each parameter its value, or the store that has it.
        convert: returns a value in the form that the bucket keeps, given its parameter and the store that had it.
    """
    whole = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    slots = {id(parameter): slot for parameter, slot in zip(parameters, layout.slots, strict=True)}

    def put(parameter: nn.Parameter, value: Any, source: Store | None) -> None:
        slot = slots[id(parameter)]
        part = value if convert is None else convert(value, parameter, source)
        whole[..., slot.offset : slot.offset + slot.numel] = to_rows(part, slot)

    for source in dict.fromkeys(value for value in values if isinstance(value, Store)):
        _put_parts(put, source, slots, name)
    for parameter, value in zip(parameters, values, strict=True):
        if not isinstance(value, Store):
            put(parameter, value, None)
    if any(not isinstance(value, Store) or value.layout.is_whole for value in values):
        broadcast_from(job, [whole])
    return whole


def _put_parts(put: Callable[..., None], source: Store, wanted: Container[int], name: str) -> None:
    """Put the wanted parameters of a store, or their entries. A collective where it is split.

    A function of its own: no part of one source stays alive while the next source is gathered.
    """
    indices = [index for index, parameter in enumerate(source.parameters) if id(parameter) in wanted]
    for index, part in gather_parts(source, indices, name):
        put(source.parameters[index], part, source)


def _create_entry(
    store: Store, name: str, spec: StateSpec, states: Sequence[Mapping[str, Any]], extent: Extent | None
) -> TensorOrExtent:
    """Create one entry of a new store's state. A collective unless no parameter has one yet.

    Args:
        states: of each parameter, as :func:`_state_in` returns it.
    """
    layout = store.layouts.get(name)
    if layout is None:
        value = states[0][name] if states and name in states[0] else initial_value(spec)
        value = in_memory(value.state[name]) if isinstance(value, Store) else value
        return torch.as_tensor(value).to(device="cpu", dtype=spec.dtype).clone()
    if not any(name in state for state in states):
        if extent is None:
            return initial_entry(store, name)
        folder = store.layout.storage.state
        _write_initial(store, name, extent, fast=folder is not None and folder.fast)
        return extent
    values, convert = [state[name] for state in states], functools.partial(_entry_from, store, name)
    whole = _gather(store.job, layout, store.parameters, values, name, convert)
    return _stored(_own_part(store.job, layout, whole), extent)


def _entry_from(store: Store, name: str, value: Any, parameter: nn.Parameter, source: Store | None) -> Tensor:
    """Return a parameter's entry, plain or of another store, in the form that ``store`` keeps it in."""
    if source is None:
        return coded_entry(store, name, _whole(value))
    if source.specs[name].codec == store.specs[name].codec:
        part: Tensor = value
        return part
    slot = next(slot for other, slot in source.slots() if other is parameter)
    return coded_entry(store, name, plain_entry(source, name, value, slot))


def adopt_shard(job: Job, name: str, parameter: nn.Parameter, piece: Tensor, sbp: NdSbp) -> None:
    """Create a provisional store for a parameter of which each rank holds a piece. Nothing is sent.

    Args:
        parameter: of the global shape; its data are dropped.
        piece: this rank's slice along the split dimension.
        sbp: split along one mesh dimension, broadcast along the others.
    """
    split_mesh_dim = next(dim for dim, placement in enumerate(sbp) if isinstance(placement, Split))
    described = Parameter(name, tuple(parameter.shape), parameter.dtype, piece.device, None, sbp)
    (layout,) = plan_buckets(
        [described], mesh=job.mesh, zero_dims=(split_mesh_dim,), split=True, min_split_numel=0, bucket_bytes=None
    )
    shard = zero_part(job, layout)
    shard[0, : piece.numel()] = piece.reshape(-1)
    create_provisional_store(job, layout, parameter, shard)


def provisional_layout(
    job: Job, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, split: bool = True
) -> Bucket:
    """Return the layout of a bucket of one parameter, split along the last mesh dimension, or whole."""
    ranks, numel = job.mesh.shape[-1], math.prod(shape)
    sbp: NdSbp = (*(broadcast for _ in job.mesh.shape[:-1]), Split(0) if split else broadcast)
    slot, padded = Slot("parameter", tuple(shape), 0, numel), -(-numel // ranks) * ranks
    return Bucket("parameter", (slot,), numel, padded, dtype, device, sbp, None, ranks, (job.mesh.dims - 1,))


def create_provisional_store(job: Job, layout: Bucket, parameter: nn.Parameter, shard: Tensor) -> Store:
    """Create a provisional store of one parameter and drop the parameter's data.

    Args:
        layout: a split bucket of this parameter alone.
        shard: this rank's part of the bucket, [padded / ranks] or [1, padded / ranks].
    """
    store = Store(layout, {}, {}, None, True, job, (parameter,), shard, sharded_state=ShardedState.PROVISIONAL)
    parameter._zerograph_store = store  # type: ignore[attr-defined]
    bind_parameters(store)
    return store


def plan_provisional_store(
    job: Job,
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer | None,
    entries: Mapping[str, tuple[StateSpec, Sequence[int]]],
    *,
    split: bool,
) -> Store:
    """Return a provisional store of a parameter and its optimizer state; :func:`fill_in` gives it memory.

    Args:
        entries: by name of an entry of the state what it is, and its shape.
        split: False: every rank has the whole parameter and state.
    """

    def layout_of(shape: Sequence[int], dtype: torch.dtype) -> Bucket:
        return provisional_layout(job, shape, dtype, parameter.device, split=split)

    own = layout_of(parameter.shape, parameter.dtype)
    # State of other shapes is that of an update of whole parameters.
    plain = all(spec.scalar or spec.codec or tuple(shape) == parameter.shape for spec, shape in entries.values())
    return Store(
        replace(own, one_by_one=not plain),
        {name: spec for name, (spec, _) in entries.items()},
        {name: layout_of(shape, spec.stored_dtype) for name, (spec, shape) in entries.items() if shape},
        optimizer if entries else None,
        not entries,
        job,
        (parameter,),
        torch.empty(0),
        dict.fromkeys(entries, torch.empty(0)),
        sharded_state=ShardedState.PROVISIONAL,
    )


def fill_in(store: Store) -> None:
    """Give a planned provisional store memory and its parameter, which loses its values and optimizer state."""
    (parameter,) = store.parameters
    before = store_of(parameter)
    parameter._zerograph_store = store  # type: ignore[attr-defined]
    if before is not None:
        _release_if_empty(before)
    # Frees the values.
    hide(parameter)
    store.flat = zero_part(store.job, store.layout)
    for name, spec in store.specs.items():
        layout = store.layouts.get(name)
        store.state[name] = torch.zeros((), dtype=spec.dtype) if layout is None else zero_part(store.job, layout)
    if store.optimizer is not None:
        guard_state(store.optimizer)
    bind_parameters(store)


def zero_part(job: Job, layout: Bucket) -> Tensor:
    """Return this rank's part of a bucket of zeros."""
    return torch.zeros(local_shape(layout.shape, layout.sbp, job.mesh), dtype=layout.dtype, device=layout.device)


def split_part(job: Job, layout: Bucket, value: Tensor) -> Tensor:
    """Return this rank's part of a bucket of one parameter, from the whole value. No collective.

    Args:
        value: the parameter's value, equal on all ranks.
    """
    part = zero_part(job, layout)
    load_part(job, layout, part, [value])
    return part


def move(store: Store, layout: Bucket, extents: Extents) -> Store:
    """Move the store's tensors to where ``layout`` keeps them, into a new store. No collective.

    Raises:
        OffloadError: a file could not be read or written.
    """
    moved = replace(store, layout=layout)
    before = store.layout.storage
    if layout.storage.gather_buffer and not before.gather_buffer:
        moved.gather_buffer = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
        moved.flat = _view_of_part(store.job, layout, moved.gather_buffer).copy_(in_memory(store.flat))
    elif (layout.storage.parameters, layout.storage.gather_buffer) != (before.parameters, before.gather_buffer):
        moved.flat = _stored(_copy_home(in_memory(store.flat), layout), extents.get(""))
        moved.gather_buffer = None
    # The same dict: each entry is freed as it has moved, since a second copy of all may not fit.
    moved.state = store.state
    if layout.storage.state != before.state:
        for name in store.layouts:
            moved.state[name] = _stored(in_memory(store.state[name]), extents.get(name))
    if store.accumulated is not None:
        moved.accumulated, moved.reduce = accumulated(store).to(layout.storage_device), None
    store.sharded_state = ShardedState.RELEASED
    for parameter in store.parameters:
        parameter._zerograph_store = moved  # type: ignore[attr-defined]
    return moved


def release(store: Store) -> None:
    """Make the store's parameters plain, and return their state to the optimizer. A collective."""
    for parameter in store.parameters:
        # Its sum of gradients goes with the store.
        settle_gradient(parameter)
    _return_state(store, store.parameters)
    indices = [index for index, parameter in enumerate(store.parameters) if store_of(parameter) is store]
    for index, part in gather_parts(store, indices):
        show(store.parameters[index], part.clone())
        del store.parameters[index]._zerograph_store  # type: ignore[attr-defined]
    _release_if_empty(store)


def abandon(store: Store) -> None:
    """Release the store without its values, parts of which are lost with their ranks. A load gives others.

    Parameters that every rank has whole become plain zeros, as those of a rank that comes are plain.
    """
    for parameter, slot in store.slots():
        if store_of(parameter) is store:
            if store.layout.is_whole:
                show(parameter, torch.zeros(slot.shape, dtype=store.layout.dtype, device=store.layout.device))
            else:
                hide(parameter)
            del parameter._zerograph_store  # type: ignore[attr-defined]
    _release_if_empty(store)


def _return_state(store: Store, parameters: Sequence[nn.Parameter]) -> None:
    """Give the state of those of the parameters that are in the store back to its optimizer. A collective."""
    if store.optimizer is None or store.fresh:
        return
    for parameter, state in zip(store.parameters, plain_states(store), strict=True):
        if store_of(parameter) is store and any(parameter is other for other in parameters):
            own_state(store.optimizer)[parameter] = state


def _release_if_empty(store: Store) -> None:
    """Release the store, and free its memory, if no parameter belongs to it any more."""
    if not any(store_of(parameter) is store for parameter in store.parameters):
        store.sharded_state = ShardedState.RELEASED
        store.flat, store.gather_buffer, store.accumulated, store.state = torch.empty(0), None, None, {}
        store.residuals, store.received = {}, None


def _own_part(job: Job, layout: Bucket, whole: Tensor) -> Tensor:
    """Return this rank's part of a bucket, on the device where it is kept."""
    return whole if layout.is_whole else _copy_home(_view_of_part(job, layout, whole), layout)


def _view_of_part(job: Job, layout: Bucket, whole: Tensor) -> Tensor:
    return whole[local_part(whole.shape, layout.sbp, job.mesh)]


def _copy_home(shard: Tensor, layout: Bucket) -> Tensor:
    """Copy the shard to the device where the layout keeps it."""
    copy = shard.to(layout.storage_device, copy=True)
    return copy.pin_memory() if layout.storage_device != layout.device and layout.storage.pinned else copy


def _stored(value: Tensor, extent: Extent | None) -> TensorOrExtent:
    """Write the tensor to its extent, if it has one, and return what holds it."""
    if extent is None:
        return value
    write(extent, value)
    return extent


# ``optimizer.state`` while stores hold the state.


class _Entries(UserDict[str, Any]):
    """The state of a parameter, as it is when it is asked: a loop may keep this over updates.

    Args:
        state: the optimizer's state.
        key: the parameter.
        last: its entries. They remain if the loop takes the parameter out of the state.
    """

    def __init__(self, state: StoredState, key: Any, last: MutableMapping[str, Any]) -> None:
        self._state, self._key, self._last = state, key, last

    @property
    def data(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        """The entries, which may be read and written until the next update. A collective after each."""
        self._last = self._state.entries(self._key).get(self._key, self._last)
        return self._last

    def copy(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the entries as a dictionary."""
        return dict(self.data)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class StoredState(MutableMapping[Any, Any]):
    """The attribute ``state`` of an optimizer whose state is in stores.

    Inside ``full_parameters()`` it is whole from the first access on, and may be written; in a loop until the next
    update. Elsewhere an access is an error while the stores have state; before the first update the mapping is empty,
    as that of a plain optimizer.

    Attributes:
        optimizer: the optimizer.
        plain: the state that is in no store, by parameter.
        whole: the state of all parameters, inside the block and after the first access; else None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain: MutableMapping[Any, Any]) -> None:
        self.optimizer, self.plain = optimizer, plain
        self.whole: defaultdict[Any, Any] | None = None
        self._before: dict[str, str] = {}
        self._job: Job | None = None

    def open(self, job: Job) -> None:
        """Let the state be read and written until :meth:`close`."""
        self._job = job

    def replace(self, entries: Mapping[Any, Any]) -> None:
        """Take another state, by parameter, until :meth:`close`."""
        self.whole = defaultdict(dict, entries)
        # Equal to no state.
        self._before = {"the state": "replaced"}

    def written(self) -> dict[str, str] | None:
        """Return hashes of the whole state by name if it was read since :meth:`open`, else None."""
        return None if self.whole is None else _hashes(self._numbered())

    def changes(self) -> dict[int, dict[str, Any]] | None:
        """Return the state as the block has left it, by number of the parameter, or None if nothing was changed."""
        if self.whole is None or _hashes(self._numbered()) == self._before:
            return None
        known = {id(parameter) for parameter in parameters_of(self.optimizer)}
        strange = [key for key in self.whole if id(key) not in known]
        if strange:
            raise SplitParameterError(
                f"{type(self.optimizer).__name__}.state has an entry for {strange[0]!r:.60}, which is none of its "
                "parameters: state of the optimizer as a whole cannot be kept in a graph"
            )
        return self._numbered()

    def close(self) -> None:
        """Drop the whole state."""
        self.whole, self._job, self._before = None, None, {}

    def _stores(self, key: Any = None) -> list[Store]:
        # The loop may have replaced a parameter of which it asks.
        parameters = [*parameters_of(self.optimizer), *([key] if isinstance(key, nn.Parameter) else [])]
        return [store for store in stores_of(parameters) if store.optimizer is self.optimizer]

    def _numbered(self) -> dict[int, dict[str, Any]]:
        assert self.whole is not None
        # The loop may have replaced parameters and not moved their state yet: they are numbered last.
        keys = dict.fromkeys(map(id, [*parameters_of(self.optimizer), *self.whole]))
        numbers = {key: number for number, key in enumerate(keys)}
        return {
            # A loop may have set global tensors, of which each rank has a part.
            numbers[id(key)]: {n: getattr(one, "full_tensor", lambda one=one: one)() for n, one in entries.items()}
            for key, entries in self.whole.items()
            if entries
        }

    def entries(self, key: Any = None, *, reads: bool = False) -> MutableMapping[Any, Any]:
        """Return the state by parameter, whole where it may be read."""
        if self.whole is not None:
            return self.whole
        stores = self._stores(key)
        if not stores or (reads and all(store.fresh for store in stores)):
            return self.plain
        if self._job is None and (open_state := getattr(stores[0].parameters[0], "_zerograph_opens", None)) is not None:
            open_state(self)
        if self._job is not None:
            agree(self._job, f"reading {type(self.optimizer).__name__}.state", 0, dict)
            self.whole = defaultdict(dict, {key: dict(entries) for key, entries in self.plain.items()})
            for store in stores:
                states = zip(store.parameters, plain_states(store), strict=True)
                self.whole |= {p: state for p, state in states if state and store_of(p) is store}
            self._before = _hashes(self._numbered())
            return self.whole
        raise SplitParameterError(
            f"{type(self.optimizer).__name__}.state is read or changed, but a graph has the state in shards\n"
            "Save it by state_dict() and change it by load_state_dict() of the graph. Or use it inside "
            "'with step.full_parameters():', on all ranks."
        )

    def __getitem__(self, key: Any) -> Any:
        try:
            found = self.entries(key)
            return found[key] if found is self.plain else _Entries(self, key, found[key])
        except SplitParameterError:
            # Of the state that it is to replace, torch unflattens a state by the names.
            if sys._getframe(1).f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
                raise
            store = store_of(key)
            return dict.fromkeys(self.plain[key] if store is None else store.specs)

    def copy(self) -> dict[Any, Any]:
        """Return the state as a dictionary."""
        return dict(self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or the default."""
        if key not in self:
            return default
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self.entries(key, reads=True)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries()[key] = value.data if isinstance(value, _Entries) else value

    def __delitem__(self, key: Any) -> None:
        del self.entries(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries(reads=True))

    def __len__(self) -> int:
        return len(self.entries(reads=True))

    def __bool__(self) -> bool:
        """Return whether there is state, in stores or not; torch's checkpoints ask before they call state_dict()."""
        return bool(self.plain) or not all(store.fresh for store in self._stores())

    def __repr__(self) -> str:
        return f"<state of {type(self.optimizer).__name__} in a graph>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self.entries(reads=True)))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(defaultdict(dict, self.entries(reads=True)), memo)


def own_state(optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
    """Return the state that the optimizer itself holds, by parameter: that which is in no store."""
    state: Any = optimizer.state
    return state.plain if isinstance(state, StoredState) else state


def guard_state(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.state`` a :class:`StoredState`."""
    if not isinstance(optimizer.state, StoredState):
        optimizer.state = StoredState(optimizer, optimizer.state)  # type: ignore[assignment]


def replaced_state(optimizer: torch.optim.Optimizer) -> StoredState:
    """Return a guard of a state that was assigned to ``optimizer.state`` while stores held another one."""
    state = StoredState(optimizer, {})
    state.replace(optimizer.state)
    optimizer.state = state  # type: ignore[assignment]
    return state


def guarded_state(optimizer: torch.optim.Optimizer | None) -> StoredState | None:
    """Return the mapping that stands for the optimizer's state in stores, or None."""
    state = None if optimizer is None else optimizer.state
    return state if isinstance(state, StoredState) else None


def _hashes(states: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return a hash of each entry by name."""
    return {
        f"state {name!r} of parameter {number}": text_of(value)
        for number, entries in sorted(states.items())
        for name, value in entries.items()
    }


# Elements of a tensor that a text shows.
_MOST_SHOWN = 16


def text_of(value: Any) -> str:
    """Return text that is equal for equal values: of a tensor its shape, dtype, and values or a hash."""
    if isinstance(value, Tensor):
        content = f"bits {int(hash_bits(value)) % 2**64:#018x}" if value.numel() > _MOST_SHOWN else value.tolist()
        return f"{tuple(value.shape)} {value.dtype} {content}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, bytes)) else type(value).__name__
