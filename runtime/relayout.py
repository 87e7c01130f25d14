"""Change which store holds a parameter and where its tensors are: create, move and release stores.

Values travel one bucket at a time, so about one bucket of each kind is whole at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.ir.buckets import Bucket, Parameter, plan_buckets
from zerograph.ir.mesh import local_part, local_shape
from zerograph.ir.sbp import NdSbp, Split, broadcast, is_dtensor
from zerograph.ir.slots import Slot, to_rows
from zerograph.ir.update_program import StateSpec
from zerograph.runtime.job.exchange import broadcast_from_first
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import fill, write
from zerograph.runtime.optimizer_state import guard_state, own_state
from zerograph.runtime.parameters import show
from zerograph.runtime.state import (
    Extents,
    ShardedState,
    Store,
    TensorOrExtent,
    accumulated_gradients,
    bind_parameters,
    coded_entry,
    gather_parts,
    in_memory,
    initial_entry,
    initial_value,
    load_accumulated,
    load_part,
    plain_entry,
    plain_states,
    store_of,
    stores_of,
)


def create_store(
    job: Job,
    layout: Bucket,
    parameters: Sequence[nn.Parameter],
    specs: Mapping[str, StateSpec],
    layouts: Mapping[str, Bucket],
    first_differs: bool,
    optimizer: torch.optim.Optimizer | None,
    extents: Extents,
) -> Store:
    """Move parameters, and their state in ``optimizer``, into a new store. A collective.

    Plain parameters take rank 0's values. Other stores that hold some of the parameters lose them: a store that has
    lost all is released, and optimizers other than ``optimizer`` get their state back. Takes memory for one whole
    bucket, and for one whole source bucket, beside what is there already.

    Args:
        layout: the new bucket; the slots are those of ``parameters``, in order.
        specs: the entries of the optimizer state.
        layouts: by name the layout of each entry that is not 0-d.
        first_differs: the first update is another program than later ones.
        extents: where tensors go that are offloaded to files.

    Raises:
        OffloadError: a file could not be written.
    """
    sources = stores_of(parameters)
    for source in sources:
        if source.optimizer is not optimizer:
            _return_state(source, parameters)
    states = [_state_in(optimizer, parameter) for parameter in parameters]
    with torch.no_grad():
        whole = _gather_parameters(job, layout, parameters)
        in_buffer = layout.storage.gather_buffer
        shard = _view_of_part(job, layout, whole) if in_buffer else _own_part(job, layout, whole)
        store = Store(
            job,
            layout,
            tuple(parameters),
            _stored(shard, extents.get("")),
            specs=specs,
            layouts=layouts,
            fresh=not any(states),
            first_differs=first_differs,
            optimizer=optimizer,
            gather_buffer=whole if in_buffer else None,
        )
        del whole, shard
        for name, spec in specs.items():
            store.state[name] = _create_entry(store, name, spec, states, extents.get(name))
        for parameter in parameters:
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


def _state_in(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Any]:
    """Return the optimizer state of the parameter, by name: a tensor, or the store that holds it."""
    store = store_of(parameter)
    if store is not None and store.optimizer is optimizer and not store.fresh:
        return dict.fromkeys(store.specs, store)
    return {} if optimizer is None else own_state(optimizer).get(parameter, {})


def _gather_parameters(job: Job, layout: Bucket, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a new whole bucket of the parameters, plain or in other stores. A collective."""
    whole = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    for source in stores_of(parameters):
        _copy_parts(whole, layout, parameters, source)
    for parameter, slot in zip(parameters, layout.slots, strict=True):
        if store_of(parameter) is None:
            _write_slot(whole, layout, slot, parameter.detach())
    if any((store := store_of(parameter)) is None or store.layout.is_whole for parameter in parameters):
        broadcast_from_first(job, [whole])
    return whole


def _copy_parts(
    whole: Tensor,
    layout: Bucket,
    parameters: Sequence[nn.Parameter],
    source: Store,
    name: str = "",
    convert: Callable[[Tensor, nn.Parameter], Tensor] | None = None,
) -> None:
    """Copy parameters, or their parts of the state entry ``name``, from another store. A collective if that is split.

    ``convert`` changes a part from the form that the source stores to that of ``layout``.

    A function of its own: no part of one source stays alive while the next source is gathered.
    """
    slots = {id(parameter): slot for parameter, slot in zip(parameters, layout.slots, strict=True)}
    indices = [index for index, parameter in enumerate(source.parameters) if id(parameter) in slots]
    for index, part in gather_parts(source, indices, name):
        slot = slots[id(source.parameters[index])]
        _write_slot(whole, layout, slot, part if convert is None else convert(part, source.parameters[index]))


def _write_slot(whole: Tensor, layout: Bucket, slot: Slot, part: Tensor) -> None:
    # An optimizer's state of a global tensor is a global tensor too.
    part = part.full_tensor() if is_dtensor(part) else part
    whole[..., slot.offset : slot.offset + slot.numel] = to_rows(part, slot)


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
        if extent is not None and spec.codec is not None:
            return _stored(initial_entry(store, name), extent)
        if extent is not None:
            folder = store.layout.storage.state
            fill(extent, initial_value(spec), fast=folder is not None and folder.fast)
            return extent
        return initial_entry(store, name)
    whole = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    values = [state[name] for state in states]
    for source in dict.fromkeys(value for value in values if isinstance(value, Store)):
        convert = functools.partial(_entry_from, store, name, source)
        _copy_parts(whole, layout, store.parameters, source, name, convert)
    for slot, value in zip(layout.slots, values, strict=True):
        if not isinstance(value, Store):
            plain = torch.as_tensor(value)
            plain = plain.full_tensor() if is_dtensor(plain) else plain
            _write_slot(whole, layout, slot, coded_entry(store, name, plain))
    if any(not isinstance(value, Store) or value.layout.is_whole for value in values):
        broadcast_from_first(store.job, [whole])
    return _stored(_own_part(store.job, layout, whole), extent)


def _entry_from(store: Store, name: str, source: Store, part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's entry of another store in the form that ``store`` keeps it in."""
    if source.specs[name].codec == store.specs[name].codec:
        return part
    slot = next(slot for other, slot in source.slots() if other is parameter)
    return coded_entry(store, name, plain_entry(source, name, part, slot))


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
    shard = torch.zeros(local_shape(layout.shape, layout.sbp, job.mesh), dtype=piece.dtype, device=piece.device)
    shard[0, : piece.numel()] = piece.reshape(-1)
    create_provisional_store(job, layout, parameter, shard)


def provisional_layout(job: Job, parameter: Tensor) -> Bucket:
    """Return the layout of a bucket of this parameter alone, split along the last mesh dimension."""
    mesh = job.mesh
    with _torch.plain_tensors():
        ranks, numel = mesh.shape[-1], parameter.numel()
        sbp: NdSbp = (*(broadcast for _ in mesh.shape[:-1]), Split(0))
        slot = Slot("parameter", tuple(parameter.shape), 0, numel)
        kind = parameter.dtype, parameter.device, sbp
    return Bucket("parameter", (slot,), numel, -(-numel // ranks) * ranks, *kind, None, ranks, (mesh.dims - 1,))


def create_provisional_store(job: Job, layout: Bucket, parameter: nn.Parameter, shard: Tensor) -> Store:
    """Create a provisional store of one parameter and drop the parameter's data.

    Args:
        layout: a split bucket of this parameter alone.
        shard: this rank's part of the bucket, [padded / ranks] or [1, padded / ranks].
    """
    store = Store(job, layout, (parameter,), shard, sharded_state=ShardedState.PROVISIONAL)
    parameter._zerograph_store = store  # type: ignore[attr-defined]
    bind_parameters(store)
    return store


def split_part(job: Job, layout: Bucket, value: Tensor) -> Tensor:
    """Return this rank's part of a bucket of one parameter, from the whole value. No collective.

    Args:
        value: the parameter's value, equal on all ranks.
    """
    part = torch.zeros(local_shape(layout.shape, layout.sbp, job.mesh), dtype=layout.dtype, device=layout.device)
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
        moved.accumulated = store.accumulated.to(layout.storage_device)
    store.sharded_state = ShardedState.RELEASED
    for parameter in store.parameters:
        parameter._zerograph_store = moved  # type: ignore[attr-defined]
    return moved


def release(store: Store) -> None:
    """Make the store's parameters plain, and return their state to the optimizer. A collective."""
    _return_state(store, store.parameters)
    indices = [index for index, parameter in enumerate(store.parameters) if store_of(parameter) is store]
    for index, part in gather_parts(store, indices):
        show(store.parameters[index], part.clone())
        del store.parameters[index]._zerograph_store  # type: ignore[attr-defined]
    _release_if_empty(store)


def abandon(store: Store) -> None:
    """Release the store without its values, parts of which are lost with their ranks. Parameters become plain zeros."""
    for parameter, slot in store.slots():
        if store_of(parameter) is store:
            show(parameter, torch.zeros(slot.shape, dtype=store.layout.dtype, device=store.layout.device))
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
