"""What a rank holds between steps: of each bucket its shard, and the optimizer's state next to it.

A *store* is one bucket at rest. A parameter lives in one store or in none; which one is noted on the parameter, so
that every graph that shares the module finds it. Whole buckets lend their parameters views of themselves; split
ones hide them (``parameters``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph.errors import InputError
from zerograph.ir.buckets import Bucket, Parameter, Slot, from_rows, plan_buckets, to_rows
from zerograph.ir.mesh import local_part, local_shape
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import nbytes
from zerograph.ir.update_program import StateSpec
from zerograph.runtime.job.process_group import Job, broadcast_from_first, gather_whole
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import fill, read, read_to_overwrite, write
from zerograph.runtime.parameters import hide, show

PlainState = dict[str, Tensor]

# What a rank has of a tensor: its part, in memory or in a file.
Held = Tensor | Extent
# Where what does not rest in memory is to rest, by name in ``Store.state``; the shard under the name "".
Places = Mapping[str, Extent]

_serials = itertools.count(1)


@dataclass(eq=False)
class Store:
    """One bucket at rest.

    Attributes:
        layout: which parameters lie where.
        parameters: the modules' own parameters, in slot order.
        flat: this rank's part of the bucket: 1-D, or one row of it.
        state: optimizer state by name: shaped like ``flat``, or 0-d and equal on all ranks.
            What rests in a file is that part of it.
        specs: what the entries of ``state`` are.
        layouts: where each parameter's part of an entry lies, for those that are 1-D.
        fresh: no update has been made: a plain optimizer would hold no state yet.
        room: memory for the whole bucket, of which ``flat`` is this rank's piece; the others are those of the last step
            that gathered them. None where a step takes memory for that anew.
        first_differs: of a step that was compiled for it, the first update is another program than the later ones.
        keeps_unused: of a step that was compiled for it, the update does not use all entries of ``state``: another
            update of the same optimizer does.
        keeper: the optimizer whose state this is.
        opened: the parameters are whole at the moment, lent to the user.
        dissolved: the parameters live elsewhere by now.
        provisional: it holds one parameter, made split or split by the user, until a step that trains lays that into a
            bucket. The state that an optimizer has for it is the optimizer's still.
    """

    job: Job
    layout: Bucket
    parameters: tuple[nn.Parameter, ...]
    flat: Held
    state: dict[str, Held]
    specs: Mapping[str, StateSpec]
    layouts: Mapping[str, Bucket]
    fresh: bool
    first_differs: bool
    keeper: torch.optim.Optimizer | None
    serial: int
    opened: bool = False
    dissolved: bool = False
    provisional: bool = False
    keeps_unused: bool = False
    room: Tensor | None = None

    def slots(self) -> Iterable[tuple[nn.Parameter, Slot]]:
        return zip(self.parameters, self.layout.slots, strict=True)

    def check_lent(self) -> None:
        """Raise if somebody replaced the data of a parameter that is a view of this bucket.

        Raises:
            InputError: ``module.to(...)`` or an assignment to ``.data`` did.
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
    """The store that holds the parameter's values, if any."""
    found: Store | None = getattr(parameter, "_zerograph_store", None)
    return found


def stores_of(parameters: Iterable[nn.Parameter]) -> list[Store]:
    """The distinct stores that hold the parameters, in their order: the same on all ranks."""
    return [store for store in dict.fromkeys(map(store_of, parameters)) if store is not None]


def in_memory(held: Held) -> Tensor:
    """The tensor itself; of what rests in a file a copy.

    Raises:
        OffloadError: the file cannot be read.
    """
    return held if isinstance(held, Tensor) else read(held)


def _rest(value: Tensor, place: Extent | None) -> Held:
    if place is None:
        return value
    write(place, value)
    return place


def _whole(job: Job, layout: Bucket, shard: Held) -> Tensor:
    """The whole of a bucket or of one state entry, in memory of its own. A collective where split."""
    return gather_whole(job, in_memory(shard).to(layout.device), layout.sbp)


def _parts(layout: Bucket, whole: Tensor) -> list[Tensor]:
    """The part of each parameter in a whole bucket, in its shape and in slot order: views if it is flat."""
    return [from_rows(whole[..., s.offset : s.offset + s.numel], s) for s in layout.slots]


def settle(
    job: Job,
    layout: Bucket,
    parameters: Sequence[nn.Parameter],
    specs: Mapping[str, StateSpec],
    layouts: Mapping[str, Bucket],
    first_differs: bool,
    keeper: torch.optim.Optimizer | None,
    places: Places,
) -> Store:
    """Move parameters into a new store, from wherever they are, with the state that ``keeper`` has for each.

    A collective. Of plain parameters all ranks take rank 0's values. What other stores hold is taken out of them; a
    store that has given all is over, and optimizers other than ``keeper`` get their state back. Memory: one whole
    bucket, and one whole bucket of what it is made of, beside what is there already.

    Raises:
        OffloadError: a file could not be written.
    """
    sources = stores_of(parameters)
    for source in sources:
        if source.keeper is not keeper:
            _give_back(source, parameters)
    held = [_held(keeper, parameter) for parameter in parameters]
    fresh = not any(held)
    with torch.no_grad():
        whole = _laid(job, layout, parameters)
        flat = _rest(
            _piece(job, layout, whole) if layout.storage.gather_buffer else _part(job, layout, whole), places.get("")
        )
        store = Store(
            job, layout, tuple(parameters), flat, {}, specs, layouts, fresh, first_differs, keeper, next(_serials)
        )
        store.room = whole if layout.storage.gather_buffer else None
        del whole
        for name, spec in specs.items():
            store.state[name] = _initial(store, name, spec, held, places.get(name))
        for parameter in parameters:
            parameter._zerograph_store = store  # type: ignore[attr-defined]
            if keeper is not None:
                keeper.state.pop(parameter, None)
        lend(store)
        for source in sources:
            _end_if_empty(source)
    return store


def adopt(job: Job, name: str, parameter: nn.Parameter, piece: Tensor, sbp: NdSbp) -> None:
    """Let a parameter of which each rank has a piece live in a store of its own. Nothing is sent.

    Args:
        parameter: of the global shape; its data are dropped.
        piece: this rank's part.
        sbp: split along one mesh dimension, broadcast along the others.
    """
    cut = next(dim for dim, one in enumerate(sbp) if isinstance(one, Split))
    about = Parameter(name, tuple(parameter.shape), parameter.dtype, piece.device, None, sbp)
    (layout,) = plan_buckets([about], mesh=job.mesh, zero_dim=cut, split=True, min_split_numel=0, bucket_bytes=None)
    flat = torch.zeros(local_shape(layout.shape, layout.sbp, job.mesh), dtype=piece.dtype, device=piece.device)
    flat[0, : piece.numel()] = piece.reshape(-1)
    store = Store(job, layout, (parameter,), flat, {}, {}, {}, True, False, None, next(_serials), provisional=True)
    parameter._zerograph_store = store  # type: ignore[attr-defined]
    lend(store)


def _end_if_empty(store: Store) -> None:
    """A store that holds no parameter any more is over, and gives its memory back."""
    if not any(store_of(one) is store for one in store.parameters):
        store.dissolved, store.flat, store.room, store.state = True, torch.empty(0), None, {}


def split_part(job: Job, layout: Bucket, value: Tensor) -> Tensor:
    """This rank's part of a bucket of one parameter, which has this value on every rank. No collective."""
    part = torch.zeros(local_shape(layout.shape, layout.sbp, job.mesh), dtype=layout.dtype, device=layout.device)
    _load(job, layout, part, [value])
    return part


def settle_part(job: Job, layout: Bucket, parameter: nn.Parameter, part: Tensor) -> Store:
    """A provisional store of a plain parameter, whose value is given up for the part that this rank keeps of it."""
    kept = (job, layout, (parameter,), part)
    store = Store(*kept, {}, {}, {}, True, False, None, next(_serials), provisional=True)
    parameter._zerograph_store = store  # type: ignore[attr-defined]
    lend(store)
    return store


def _held(keeper: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Any]:
    """What there is of optimizer state for the parameter, by name: a tensor, or the store that it is in."""
    store = store_of(parameter)
    if store is not None and store.keeper is keeper and not store.fresh:
        return dict.fromkeys(store.specs, store)
    return {} if keeper is None else keeper.state.get(parameter, {})


def _laid(job: Job, layout: Bucket, parameters: Sequence[nn.Parameter]) -> Tensor:
    """A new bucket of parameters, whole, wherever their values are. A collective."""
    whole = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    by_parameter = {id(parameter): slot for parameter, slot in zip(parameters, layout.slots, strict=True)}
    for source in stores_of(parameters):
        taken = [index for index, one in enumerate(source.parameters) if id(one) in by_parameter]
        slots = [by_parameter[id(source.parameters[index])] for index in taken]
        _lay_all(whole, layout, slots, _whole_parts(source, source.layout, source.flat, taken))
    for parameter, slot in zip(parameters, layout.slots, strict=True):
        if store_of(parameter) is None:
            _lay(whole, layout, slot, parameter.detach())
    if any((store := store_of(parameter)) is None or store.layout.is_whole for parameter in parameters):
        broadcast_from_first(job, [whole])
    return whole


def _whole_parts(source: Store, layout: Bucket, held: Held, taken: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The whole parts with these numbers, of a bucket or one entry of its state. A collective where split."""
    whole = _whole(source.job, layout, held)
    for index in taken:
        slot = layout.slots[index]
        yield index, from_rows(whole[..., slot.offset : slot.offset + slot.numel], slot)


def _lay_all(whole: Tensor, layout: Bucket, slots: Sequence[Slot], parts: Iterable[tuple[int, Tensor]]) -> None:
    """Lay parts into their slots. A function of its own, so that no part of one source lives while the next is made."""
    for slot, (_, part) in zip(slots, parts, strict=True):
        _lay(whole, layout, slot, part)


def _lay(whole: Tensor, layout: Bucket, slot: Slot, part: Tensor) -> None:
    # State that an optimizer made for a global tensor is one too.
    part = part.full_tensor() if isinstance(part, DTensor) else part
    whole[..., slot.offset : slot.offset + slot.numel] = to_rows(part, slot, layout.rows)


def _part(job: Job, layout: Bucket, whole: Tensor) -> Tensor:
    return whole if layout.is_whole else _at_home(_piece(job, layout, whole), layout)


def _piece(job: Job, layout: Bucket, whole: Tensor) -> Tensor:
    """This rank's part where it is."""
    return whole[local_part(whole.shape, layout.sbp, job.mesh)]


def _at_home(shard: Tensor, layout: Bucket) -> Tensor:
    """A copy where the layout rests."""
    found = shard.to(layout.storage_device, copy=True)
    return found.pin_memory() if layout.storage_device != layout.device and layout.storage.pinned else found


def begin(spec: StateSpec) -> float:
    """The value of an entry before the first update; the sign of a zero counts."""
    return 0.0 if spec.initial is None else spec.initial


def _initial(store: Store, name: str, spec: StateSpec, held: Sequence[Mapping[str, Any]], place: Extent | None) -> Held:
    """One entry of a new store's state. A collective unless nobody has one yet."""
    layout = store.layouts.get(name)
    if layout is None:
        value = held[0][name] if held and name in held[0] else begin(spec)
        value = in_memory(value.state[name]) if isinstance(value, Store) else value
        return torch.as_tensor(value).to(device="cpu", dtype=spec.dtype).clone()
    if not any(name in one for one in held):
        if place is not None:
            rest = store.layout.storage.state
            fill(place, begin(spec), fast=rest is not None and rest.fast)
            return place
        shape = local_shape(layout.shape, layout.sbp, store.job.mesh)
        return torch.full(shape, begin(spec), dtype=layout.dtype, device=layout.storage_device)
    whole = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    by_parameter = {id(p): slot for p, slot in zip(store.parameters, layout.slots, strict=True)}
    values = [one[name] for one in held]
    for source in dict.fromkeys(value for value in values if isinstance(value, Store)):
        taken = [index for index, one in enumerate(source.parameters) if id(one) in by_parameter]
        slots = [by_parameter[id(source.parameters[index])] for index in taken]
        _lay_all(whole, layout, slots, _state_parts(source, name, taken))
    for slot, value in zip(layout.slots, values, strict=True):
        if not isinstance(value, Store):
            _lay(whole, layout, slot, torch.as_tensor(value))
    if any(not isinstance(value, Store) or value.layout.is_whole for value in values):
        broadcast_from_first(store.job, [whole])
    return _rest(_part(store.job, layout, whole), place)


def _state_parts(source: Store, name: str, taken: Sequence[int]) -> Iterable[tuple[int, Tensor]]:
    """The whole parts with these numbers of an entry of the state. A collective where split."""
    layout = source.layouts.get(name)
    if layout is None:
        # A step count that all have in common.
        return [(index, in_memory(source.state[name])) for index in taken]
    return _whole_parts(source, layout, source.state[name], taken)


def lend(store: Store) -> None:
    """Put the parameters into the form that they have between steps: hidden where split, else views."""
    if store.layout.is_whole:
        for parameter, part in zip(store.parameters, _parts(store.layout, in_memory(store.flat)), strict=True):
            show(parameter, part)
    else:
        for parameter in store.parameters:
            hide(parameter)
    store.opened = False


def open_whole(store: Store) -> None:
    """Give split parameters their whole values, for the user to look at or change. A collective."""
    if store.layout.is_whole:
        return
    whole = _whole(store.job, store.layout, store.flat)
    for parameter, part in zip(store.parameters, _parts(store.layout, whole), strict=True):
        show(parameter, part)
    store.opened = True


def close_whole(store: Store) -> None:
    """Take back what :func:`open_whole` lent, changes included; each rank keeps its own part."""
    if store.opened:
        load_parameters(store, [parameter.detach() for parameter in store.parameters])
        lend(store)


def dissolve(store: Store) -> None:
    """Make the parameters that the store has plain again and give their state back to the optimizer. A collective."""
    _give_back(store, store.parameters)
    left = [index for index, one in enumerate(store.parameters) if store_of(one) is store]
    for index, part in _whole_parts(store, store.layout, store.flat, left):
        show(store.parameters[index], part.clone())
        del store.parameters[index]._zerograph_store  # type: ignore[attr-defined]
    _end_if_empty(store)


def _give_back(store: Store, parameters: Sequence[nn.Parameter]) -> None:
    """Let the optimizer whose state the store has hold what of it is the parameters', plainly. A collective."""
    if store.keeper is None or store.fresh:
        return
    for parameter, state in zip(store.parameters, plain_states(store), strict=True):
        if store_of(parameter) is store and any(parameter is one for one in parameters):
            store.keeper.state[parameter] = state


def plain_parameters(store: Store) -> list[Tensor]:
    """The whole value of each parameter, in memory of its own. A collective where split."""
    whole = _whole(store.job, store.layout, store.flat)
    return [part.clone() for part in _parts(store.layout, whole)]


def plain_states(store: Store) -> list[PlainState]:
    """For each parameter the state that a plain optimizer would hold. A collective where split."""
    states: list[PlainState] = [{} for _ in store.parameters]
    if store.fresh:
        return states
    for name, spec in store.specs.items():
        layout = store.layouts.get(name)
        if layout is None:
            values = [in_memory(store.state[name]) for _ in states]
        else:
            values = _parts(layout, _whole(store.job, layout, store.state[name]))
        for state, value in zip(states, values, strict=True):
            state[name] = value.to(spec.plain_dtype, copy=True)
    return states


def load_parameters(store: Store, values: Sequence[Tensor | None]) -> None:
    """Overwrite the parameters for which a whole value is given. No collective: each rank takes its own part."""
    _load(store.job, store.layout, store.flat, values)


def move(store: Store, layout: Bucket, places: Places) -> Store:
    """The store with its tensors where the layout says that they rest; the one that was there is over. No collective.

    Raises:
        OffloadError: a file could not be read or written.
    """
    moved = replace(store, layout=layout, serial=next(_serials))
    before = store.layout.storage
    if layout.storage.gather_buffer and not before.gather_buffer:
        moved.room = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
        moved.flat = _piece(store.job, layout, moved.room).copy_(in_memory(store.flat))
    elif (layout.storage.parameters, layout.storage.gather_buffer) != (before.parameters, before.gather_buffer):
        moved.flat, moved.room = _rest(_at_home(in_memory(store.flat), layout), places.get("")), None
    # Entry by entry, and what has been moved is no longer held: a copy of all of it may fit nowhere.
    moved.state = store.state
    if layout.storage.state != before.state:
        for name in store.layouts:
            moved.state[name] = _rest(in_memory(store.state[name]), places.get(name))
    store.dissolved = True
    for parameter in store.parameters:
        parameter._zerograph_store = moved  # type: ignore[attr-defined]
    return moved


def load_states(store: Store, states: Sequence[Mapping[str, Any]]) -> None:
    """Overwrite the optimizer state with what a plain optimizer held for each parameter; nothing held: start anew."""
    store.fresh = not any(states)
    for name, spec in store.specs.items():
        layout = store.layouts.get(name)
        held = store.state[name]
        if layout is not None and not store.fresh:
            _load(store.job, layout, held, [state.get(name) for state in states])
            continue
        value = states[0][name] if layout is None and states[0] else begin(spec)
        if isinstance(held, Extent):
            fill(held, value)
        else:
            held.fill_(value)


def _load(job: Job, layout: Bucket, held: Held, values: Sequence[Any]) -> None:
    whole = all(value is not None for value in values)
    shard = read_to_overwrite(held, whole=whole) if isinstance(held, Extent) else held
    *rows, own = local_part(layout.shape, layout.sbp, job.mesh)
    with torch.no_grad():
        for slot, value in zip(layout.slots, values, strict=True):
            low, high = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
            if value is not None and low < high:
                laid = to_rows(torch.as_tensor(value), slot, layout.rows)[tuple(rows)]
                part = laid[..., low - slot.offset : high - slot.offset]
                shard[..., low - own.start : high - own.start] = part.to(shard)
    if isinstance(held, Extent):
        write(held, shard)


def bytes_at_rest(stores: Iterable[Store]) -> int:
    """Bytes of parameters and optimizer state that this rank holds in memory in ``stores``, rooms included."""
    held: list[Held] = []
    for store in stores:
        # The shard lies in the room.
        held += [store.flat if store.room is None else store.room, *store.state.values()]
    return sum(nbytes(tensor) for tensor in held if isinstance(tensor, Tensor))


def extents(store: Store) -> dict[str, Extent]:
    """What of the store rests in files, by name in its state; the shard under the name ""."""
    held = {"": store.flat, **store.state}
    return {name: one for name, one in held.items() if isinstance(one, Extent)}


def holds_state_of(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state lives in stores rather than in the optimizer."""
    stores = (store_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return any(store is not None and store.keeper is optimizer for store in stores)
