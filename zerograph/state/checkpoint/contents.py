"""List the tensors of a graph's state that this rank holds, under their names in a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.compiler.layout import plain_state
from zerograph.compiler.members import Members, Optimizers
from zerograph.errors import ConfigError
from zerograph.ir.buckets import Bucket, spans
from zerograph.ir.coded_state import saved_name
from zerograph.ir.mesh import Mesh, local_part
from zerograph.ir.sbp import Split, is_dtensor
from zerograph.ir.slots import Slot
from zerograph.runtime.checkpoint.pieces import Pieces, flat_of
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import read_to_overwrite, write
from zerograph.runtime.parameters import parameters_of
from zerograph.runtime.state import Store, TensorOrExtent, in_memory, store_of

Flat = Callable[[], Tensor]


@dataclass(frozen=True)
class Named:
    """Names in a checkpoint.

    Attributes:
        parameters: name of each parameter, by ``id``.
        states: prefix of the names of a parameter's optimizer state, by ``id``: ``"optimizers.0.state.12."``.
        optimizers: the optimizers that own this state.
    """

    parameters: Mapping[int, str]
    states: Mapping[int, str]
    optimizers: Optimizers

    def state_names(self, store: Store, entry: str) -> list[str | None]:
        """Return the name of one optimizer state entry for each parameter of the store; None where it has no name."""
        prefixes = (self.states.get(id(parameter)) for parameter in store.parameters)
        name = saved_name(entry, store.specs[entry].codec)
        return [None if prefix is None else prefix + name for prefix in prefixes]


def names_of(members: Members, optimizers: Optimizers) -> Named:
    """Name parameters ``modules.model.0.weight`` and state ``optimizers.0.state.12.exp_avg``.

    The plain optimizer's ``state_dict()`` numbers the parameters in the same way.
    """
    states = {
        id(parameter): f"optimizers.{number}.state.{index}."
        for number, optimizer in enumerate(optimizers)
        for index, parameter in enumerate(parameters_of(optimizer))
    }
    return Named({key: f"modules.{name}" for key, name in members.names.items()}, states, optimizers)


def pieces_of_store(store: Store, named: Named) -> dict[str, Pieces]:
    """Return the pieces of a store that this rank writes: of parameters and of optimizer state.

    State is left out if there is none yet or if it belongs to another graph's optimizer. If several ranks hold the same
    tensor, one of them writes it; ranks alternate.
    """
    # Of tensors in files the last one is kept: its boxes are asked for in sequence.
    elements = functools.lru_cache(maxsize=1)(lambda data: in_memory(data).detach().reshape(-1))
    pieces: dict[str, Pieces] = {}
    mesh = store.job.mesh
    parameters = [named.parameters.get(id(parameter)) for parameter in store.parameters]
    _add_slots(pieces, store.layout, parameters, store.layout.dtype, functools.partial(elements, store.flat), mesh)
    if store.fresh or store.optimizer not in named.optimizers:
        return pieces
    for name, spec in store.specs.items():
        state = store.state[name]
        entries = named.state_names(store, name)
        layout = store.layouts.get(name)
        if layout is not None:
            dtype = spec.plain_dtype if spec.codec is None else layout.dtype
            _add_slots(pieces, layout, entries, dtype, functools.partial(elements, state), mesh)
            continue
        assert isinstance(state, Tensor)
        # Wider where the optimizer's own dtype would round, such as NAdam's product: training goes on bit by bit.
        dtype = spec.plain_dtype if state.to(spec.plain_dtype) == state else spec.dtype
        for number, entry in enumerate(entries):
            if entry is not None:
                pieces[entry] = Pieces((), dtype)
                if number % mesh.size == store.job.rank:
                    pieces[entry].add(0, 1, functools.partial(elements, state), 0)
    return pieces


def pieces_of_plain(tensors: Iterable[tuple[str, Tensor]], rank: int, ranks: int) -> dict[str, Pieces]:
    """Return the pieces that this rank writes of tensors that every rank holds whole; ranks alternate."""
    pieces = {}
    for number, (name, tensor) in enumerate(tensors):
        pieces[name] = Pieces(tuple(tensor.shape), tensor.dtype)
        if number % ranks == rank:
            pieces[name].parts[(0,) * tensor.dim()] = (tuple(tensor.shape), flat_of(tensor.contiguous()), 0)
    return pieces


def plain_tensors(members: Members, optimizers: Optimizers, named: Named) -> dict[str, Tensor]:
    """Return the tensors that are in no store: persistent buffers, parameters, and state in the optimizers themselves.

    Raises:
        ConfigError: an entry of an optimizer's state is neither a tensor nor a number.
    """
    tensors = plain_members(members)
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            for name, value in plain_state(optimizer, parameter).items():
                if not isinstance(value, (Tensor, int, float)):
                    raise ConfigError(
                        f"{type(optimizer).__name__} has state {name!r} = {value!r:.40}, which is not a tensor and "
                        "cannot be saved in a checkpoint"
                    )
                # The state of a DTensor parameter is a DTensor too.
                whole = value.full_tensor() if is_dtensor(value) else torch.as_tensor(value)
                tensors[named.states[id(parameter)] + name] = whole
    return tensors


def plain_members(members: Members) -> dict[str, Tensor]:
    """Return persistent buffers, and parameters that are in no store, by their names in a checkpoint."""
    skipped = _torch.unsaved_buffers(members.root)
    tensors = {f"modules.{name}": buffer for name, buffer in members.buffers.items() if name not in skipped}
    for name, parameter in members.parameters.items():
        if store_of(parameter) is None:
            tensors[f"modules.{name}"] = parameter
    return tensors


def pieces_to_fill(
    store: Store, named: Named, *, states: bool, read: bool = True
) -> tuple[dict[str, Pieces], Callable[[], None]]:
    """Return this rank's pieces of a store to load into, and a function to call after they are filled.

    Tensors that are offloaded to files are read into memory here, and that function writes them back.

    Args:
        states: include the optimizer's state.
        read: False leaves the files unread, for a caller that only asks which pieces there are.
    """
    pieces: dict[str, Pieces] = {}
    copies: list[tuple[Extent, Tensor]] = []

    def flat(data: TensorOrExtent, names: Sequence[str | None]) -> Flat:
        if isinstance(data, Tensor):
            return flat_of(data)
        if not read:
            return lambda: in_memory(data)
        copies.append((data, read_to_overwrite(data, whole=None not in names)))
        return flat_of(copies[-1][1])

    mesh = store.job.mesh
    parameters = [named.parameters.get(id(parameter)) for parameter in store.parameters]
    _add_slots(pieces, store.layout, parameters, store.layout.dtype, flat(store.flat, parameters), mesh, every=True)
    for name, layout in store.layouts.items() if states else ():
        entries = named.state_names(store, name)
        _add_slots(pieces, layout, entries, layout.dtype, flat(store.state[name], entries), mesh, every=True)

    def finish() -> None:
        for extent, tensor in copies:
            write(extent, tensor)

    return pieces, finish


def _add_slots(
    pieces: dict[str, Pieces],
    layout: Bucket,
    names: Sequence[str | None],
    dtype: torch.dtype,
    flat: Flat,
    mesh: Mesh,
    *,
    every: bool = False,
) -> None:
    """Add this rank's part of each named slot; with ``every`` also of slots that another rank writes."""
    own = local_part(layout.shape, layout.sbp, mesh)[-1]
    replicas, replica = _replicas(layout, mesh)
    to_fill: dict[Slot, Pieces] = {}
    for number, (name, slot) in enumerate(zip(names, layout.slots, strict=True)):
        if name is None:
            continue
        pieces[name] = piece = Pieces(slot.shape, dtype)
        if not every and number % replicas != replica:
            continue
        to_fill[slot] = piece
        if not slot.numel and own.start == 0:
            piece.parts[(0,) * len(slot.shape)] = (slot.shape, flat, 0)
    for span in spans(layout, mesh):
        if span.slot in to_fill:
            slot, at = span.slot, (span.row or 0) * (own.stop - own.start) + span.start
            end = span.low + span.stop - span.start
            to_fill[slot].add(span.low, end, flat, at, (slot.start(span.piece), slot.piece))


def _replicas(layout: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Return how many ranks hold the same part as this rank, and this rank's index among them."""
    replicas, replica = 1, 0
    for sbp, ranks, position in zip(layout.sbp, mesh.shape, mesh.position, strict=True):
        if not isinstance(sbp, Split):
            replica = replica * ranks + position
            replicas *= ranks
    return replicas, replica
