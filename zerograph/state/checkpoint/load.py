"""Load a checkpoint into a graph under any layout; check all of it before changing anything."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.compiler.layout import stays_whole
from zerograph.compiler.members import Members, Optimizers
from zerograph.config import Config
from zerograph.errors import CheckpointError, ConfigError
from zerograph.ir.coded_state import decode_saved, plain_name, saved_codec, saved_name
from zerograph.ir.update_program import StateSpec
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.index import Index
from zerograph.runtime.checkpoint.pieces import Pieces
from zerograph.runtime.checkpoint.remote import folder_of
from zerograph.runtime.checkpoint.storage import NamedChunk, Reader
from zerograph.runtime.job.differences import SHOWN_WITH
from zerograph.runtime.job.process_group import Job, agreeing, explaining_failures
from zerograph.runtime.parameters import SplitParameter, parameters_of
from zerograph.runtime.state import Store, fill_in, load_states, own_state, plan_provisional_store, store_of, stores_of
from zerograph.state import state_dict
from zerograph.state.checkpoint.contents import Named, names_of, pieces_to_fill, plain_members
from zerograph.state.checkpoint.folder import holds_checkpoints, latest
from zerograph.state.checkpoint.save import reason_of
from zerograph.state.checks import convert_state


def open_checkpoint(path: str | os.PathLike[str]) -> Reader:
    """Open the checkpoint in a folder, or the latest checkpoint of a folder of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint, its index is damaged, or the folder or store cannot be read.
    """
    folder = folder_of(path)
    try:
        if holds_checkpoints(folder):
            folder = latest(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return Reader(folder, index.read(folder))


@dataclass
class _LoadPlan:
    """How the tensors of a checkpoint are loaded.

    Attributes:
        stores: stores that are filled in place, each with whether its optimizer state is filled too.
        new: those of them that do not exist yet: of parameters that no step trains yet.
        optimizers: numbers of the optimizers whose state is read whole, since it does not fit the stores' layouts.
    """

    stores: list[tuple[Store, bool]]
    new: list[Store]
    optimizers: list[int]


def load(
    job: Job,
    reader: Reader,
    members: Members,
    optimizers: Optimizers,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    config: Config,
) -> None:
    """Load parameters, buffers and optimizer state from a checkpoint that fits the graph. Every rank calls it.

    Each rank reads only its parts of what ZeRO splits. Parameters that no step trains yet are in provisional stores
    then, with their optimizer state.

    Args:
        groups: saved parameter groups of each optimizer, with parameter numbers.

    Raises:
        CheckpointError: a file is missing or damaged. No rank has changed anything then.
    """
    named = names_of(members, optimizers)
    with agreeing(job, "loading a checkpoint") as facts:
        facts |= {"the checkpoint": reader.index.data, f"the checkpoint{SHOWN_WITH}": f" in {reader.folder}"}
        plan = _plan(job, reader, members, optimizers, groups, named, config)
        facts["how it is loaded"] = f"{len(plan.stores)} {plan.optimizers}"
        reader.verify(_boxes(reader, plan, members, named))
    for store in plan.new:
        fill_in(store)
    for store, _ in plan.stores:
        for optimizer, parameter in itertools.product(optimizers, store.parameters):
            # What is read whole replaces it below.
            own_state(optimizer).pop(parameter, None)
    existing = len(plan.stores) - len(plan.new)
    # One by one those that may be in files.
    for together in (*([one] for one in plan.stores[:existing]), plan.stores[existing:]):
        if together:
            _fill(job, reader, together, named)
    with torch.no_grad():
        for name, tensor in plain_members(members).items():
            tensor.copy_(reader.whole(name))
    for number in plan.optimizers:
        shapes = plain_shapes(optimizers[number], groups[number])
        state_dict.load_optimizer(optimizers[number], plain_optimizer_state(reader, number, groups[number], shapes))


def check_names(checkpoint: Index, members: Members) -> None:
    """Check that the checkpoint has exactly the members' tensors, with their shapes and compatible dtypes.

    Raises:
        ConfigError: it has not.
    """
    skipped = _torch.unsaved_buffers(members.root)
    tensors = {**members.parameters, **{n: b for n, b in members.buffers.items() if n not in skipped}}
    shapes = {f"modules.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    saved_shapes = {name: entry.shape for name, entry in checkpoint.tensors.items() if name.startswith("modules.")}
    differences = [f"it lacks {name}" for name in shapes if name not in saved_shapes]
    differences += [f"it has {name}, which the graph has not" for name in saved_shapes if name not in shapes]
    differences += [
        f"{name} is {saved_shapes[name]} there and {shape} here"
        for name, shape in shapes.items()
        if saved_shapes.get(name, shape) != shape
    ]
    differences += [
        f"{name} is of {dtype} there and of {str(tensor.dtype).removeprefix('torch.')} here"
        for name, tensor in tensors.items()
        if (entry := checkpoint.tensors.get(f"modules.{name}")) is not None
        and not _converts(dtype := entry.dtype, tensor.dtype)
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(f"the checkpoint is of another model: {'; '.join(differences[:3])}{more}")


def _converts(saved: str, dtype: torch.dtype) -> bool:
    """Return whether values of the saved dtype can be loaded as ``dtype``: only floating ones are converted."""
    source = index.DTYPES[saved]
    return source == dtype or (source.is_floating_point and dtype.is_floating_point)


def _without_values(name: str, entry: index.Entry, shape: Sequence[int] | None) -> Tensor:
    """Return an entry of a parameter's state on the meta device, in the shape that a plain optimizer keeps.

    Args:
        shape: shape of the parameter; None: the optimizer has no such parameter.

    Raises:
        CheckpointError: a code has another number of blocks than the parameter.
    """
    codec = saved_codec(name)
    if codec is None or shape is None:
        shape = entry.shape
    elif entry.shape[0] != -(-math.prod(shape) // codec.block):
        raise CheckpointError(f"the checkpoint is damaged: {name} of a parameter of {tuple(shape)} has other blocks")
    return torch.empty(tuple(shape), dtype=index.DTYPES[entry.dtype], device="meta")


def _saved_states(checkpoint: Index, number: int) -> dict[int, dict[str, str]]:
    """Return the names of the tensors of an optimizer's saved state, by the number of the parameter and the entry."""
    start = f"optimizers.{number}.state."
    states: dict[int, dict[str, str]] = {}
    for name in checkpoint.tensors:
        if name.startswith(start):
            parameter, _, entry = name.removeprefix(start).partition(".")
            states.setdefault(int(parameter), {})[entry] = name
    return states


def _plan(
    job: Job,
    reader: Reader,
    members: Members,
    optimizers: Optimizers,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    named: Named,
    config: Config,
) -> _LoadPlan:
    """Choose how to load each store and each optimizer. Changes nothing."""
    parameters = members.parameters.values()
    stores = [store for store in stores_of(parameters) if not store.is_provisional]
    splits = bool(optimizers) and config.policy.split and job.mesh.shape[-1] > 1
    # Else a rank has the others whole, before the first call and after it, unless their values went with lost ranks.
    takes_plain = splits or any(isinstance(one, SplitParameter) and store_of(one) is None for one in parameters)

    def is_loose(parameter: nn.Parameter) -> bool:
        store = store_of(parameter)
        return takes_plain and not parameter.is_meta if store is None else store.is_provisional

    def is_split(parameter: nn.Parameter) -> bool:
        store = store_of(parameter)
        if store is not None:
            return not store.layout.is_whole
        return splits and bool(parameter.numel()) and not stays_whole(parameter, config)

    loose = {id(one): one for one in parameters if is_loose(one)}
    keepers: dict[int, tuple[torch.optim.Optimizer, dict[str, tuple[StateSpec, tuple[int, ...]]]]] = {}
    whole = []
    for number, optimizer in enumerate(optimizers):
        saved, start = _saved_states(reader.index, number), f"optimizers.{number}.state."
        own = [store for store in stores if store.optimizer is optimizer]
        elsewhere = any(
            not named.states[id(parameter)].startswith(start)
            if id(parameter) in loose
            else (store := store_of(parameter)) is None
            or store.is_provisional
            # One that no step has trained keeps no state.
            or (store.optimizer is not optimizer and (store.optimizer is not None or key in saved))
            for key, parameter in enumerate(parameters_of(optimizer))
        )
        if (
            elsewhere
            or not all(_fits(reader, store, optimizer, saved) for store in own)
            or (loose and _is_converted(reader, optimizer, number, groups[number]))
        ):
            whole.append(number)
            continue
        for key, parameter in enumerate(parameters_of(optimizer)):
            keepers[id(parameter)] = optimizer, _entries(reader.index, saved.get(key, {}))
    new = [
        plan_provisional_store(job, parameter, *keepers.get(key, (None, {})), split=is_split(parameter))
        for key, parameter in loose.items()
    ]
    kept = [optimizer for number, optimizer in enumerate(optimizers) if number not in whole]
    filled = [(store, store.optimizer in kept) for store in stores] + [(store, bool(store.specs)) for store in new]
    return _LoadPlan(filled, new, whole)


def _entries(checkpoint: Index, state: Mapping[str, str]) -> dict[str, tuple[StateSpec, tuple[int, ...]]]:
    """Return what the saved entries of a parameter's state are, and their shapes, by name."""
    entries = {}
    for name, tensor in sorted(state.items()):
        saved, codec = checkpoint.tensors[tensor], saved_codec(name)
        dtype = index.DTYPES[saved.dtype] if codec is None else torch.float32
        entries[plain_name(name)] = StateSpec(not saved.shape, dtype, None, dtype, codec), saved.shape
    return entries


def _is_converted(
    reader: Reader, optimizer: torch.optim.Optimizer, number: int, groups: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether the optimizer's class adds to the saved state when it is loaded, or changes it."""
    shapes = plain_shapes(optimizer, groups)
    states = plain_optimizer_state(reader, number, groups, shapes, read=False)["state"]
    saved = {one: states.get(key, {}) for one, key in zip(parameters_of(optimizer), shapes, strict=True)}
    _, loaded = convert_state(optimizer, groups, saved)
    return any(
        state.keys() != loaded.get(one, {}).keys()
        or any(loaded[one][name] is not value for name, value in state.items())
        for one, state in saved.items()
    )


def _fits(
    reader: Reader, store: Store, optimizer: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, str]]
) -> bool:
    """Return whether the store can hold the saved state: all entries, in its shapes, with equal step counts."""
    numbers = {id(parameter): position for position, parameter in enumerate(parameters_of(optimizer))}
    if not all(id(parameter) in numbers for parameter in store.parameters):
        return False
    states = [saved.get(numbers[id(parameter)], {}) for parameter in store.parameters]
    if not any(states):
        return True
    entries = {saved_name(name, spec.codec): name for name, spec in store.specs.items()}
    if any(state.keys() != entries.keys() for state in states):
        return False
    for entry, name in entries.items():
        tensors, layout = [state[entry] for state in states], store.layouts.get(name)
        shapes = [()] * len(states) if layout is None else [slot.shape for slot in layout.slots]
        if shapes != [reader.index.tensors[tensor].shape for tensor in tensors]:
            return False
        if layout is None and len({float(reader.whole(tensor)) for tensor in tensors}) > 1:
            return False
    return True


def _boxes(reader: Reader, plan: _LoadPlan, members: Members, named: Named) -> dict[NamedChunk, None]:
    """Return every box that this rank will read."""
    boxes: dict[NamedChunk, None] = {}
    for store, states in plan.stores:
        pieces, _ = pieces_to_fill(store, named, states=states and _has_state(reader, store, named), read=False)
        boxes.update(((read.name, read.chunk), None) for read in reader.reads(pieces))
    states_read = tuple(f"optimizers.{number}.state." for number in plan.optimizers)
    whole = [name for name in reader.index.tensors if name.startswith(states_read)]
    in_new = {id(parameter) for store in plan.new for parameter in store.parameters}
    plain = [name for name, tensor in plain_members(members).items() if id(tensor) not in in_new]
    for name in (*plain, *whole):
        boxes.update(((name, chunk), None) for chunk in reader.index.tensors[name].chunks)
    return boxes


def _has_state(reader: Reader, store: Store, named: Named) -> bool:
    """Return whether the checkpoint has optimizer state for the store."""
    start = named.states[id(store.parameters[0])]
    entries = (saved_name(name, spec.codec) for name, spec in store.specs.items())
    return any(start + entry in reader.index.tensors for entry in entries)


def _fill(job: Job, reader: Reader, stores: Sequence[tuple[Store, bool]], named: Named) -> None:
    """Fill stores in place; where they say so also their optimizer state, which is cleared if none was saved."""
    pieces: dict[str, Pieces] = {}
    finishes = []
    for store, states in stores:
        own, finish = pieces_to_fill(store, named, states=states and _has_state(reader, store, named))
        pieces |= own
        finishes.append(finish)
    read_pieces(job, reader, pieces)
    for finish in finishes:
        finish()
    for store in (store for store, states in stores if states):
        if not _has_state(reader, store, named):
            load_states(store, [{} for _ in store.parameters])
            continue
        store.fresh = False
        for name in store.specs:
            if name not in store.layouts:
                scalar = store.state[name]
                assert isinstance(scalar, Tensor)
                scalar.fill_(reader.whole(named.states[id(store.parameters[0])] + name).item())


def read_pieces(job: Job, reader: Reader, pieces: Mapping[str, Pieces]) -> None:
    """Read the pieces from the checkpoint's files into memory. Every rank calls it.

    Raises:
        CheckpointError: a rank could not read; the same error on all ranks.
        BaseException: the interrupt of this rank, unchanged.
    """
    problem: BaseException | None = None
    with explaining_failures(job, "loading a checkpoint"):
        try:
            reader.fill(pieces)
        except BaseException as error:
            problem = error
        reasons = job.channel.share(reason_of(problem))
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(f"{reader.folder} could not be read, rank {rank}: {reason}") from problem


def plain_shapes(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> dict[Any, torch.Size]:
    """Return the shape of each parameter of an optimizer, by its number in saved groups."""
    numbers = [number for group in groups for number in group["params"]]
    return {number: parameter.shape for number, parameter in zip(numbers, parameters_of(optimizer), strict=False)}


def plain_optimizer_state(
    reader: Reader,
    number: int,
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[Any, Sequence[int]] | None = None,
    *,
    read: bool = True,
) -> dict[str, Any]:
    """Return what ``state_dict()`` of the plain optimizer would return.

    Args:
        number: number of the optimizer.
        groups: its saved groups.
        shapes: shape of each parameter, by number in the groups: coded entries are decoded; None: they stay codes.
        read: False: the tensors are on the meta device.
    """

    def entry(key: int, name: str, tensor: str) -> tuple[str, Tensor]:
        if not read:
            return plain_name(name), _without_values(name, reader.index.tensors[tensor], (shapes or {}).get(key))
        value = reader.whole(tensor)
        return (name, value) if shapes is None else (plain_name(name), decode_saved(name, value, shapes[key]))

    states = {
        key: dict(entry(key, *one) for one in sorted(state.items()))
        for key, state in sorted(_saved_states(reader.index, number).items())
    }
    return {"state": states, "param_groups": groups}
