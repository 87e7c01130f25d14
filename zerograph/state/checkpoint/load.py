"""Reading a checkpoint into a graph, wherever its state lies by now; nothing is touched before all of it is checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_pieces

from zerograph.compiler.members import Members, Optimizers, parameters_of
from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.index import Chunk, Index
from zerograph.runtime.checkpoint.pieces import PieceLoadPlanner, Pieces
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.runtime.job.process_group import Job, agree, digest, explaining_failures
from zerograph.runtime.state import Store, load_states, store_of, stores_of
from zerograph.state import state_dict
from zerograph.state.checkpoint.contents import Named, in_place, names_of, unsaved_buffers
from zerograph.state.checkpoint.folder import holds_checkpoints, latest
from zerograph.state.checkpoint.save import folder_of, raise_interrupt
from zerograph.state.hyperparameter_checks import check_hyperparameters
from zerograph.state.optimizer_checks import check_entries, check_groups


def open_checkpoint(path: str | os.PathLike[str]) -> Reader:
    """The checkpoint in a folder, or the latest of a folder of checkpoints.

    Raises:
        CheckpointError: there is none, or its index is damaged.
    """
    folder = folder_of(path)
    if holds_checkpoints(folder):
        folder = latest(folder)
    return Reader(folder, index.read(folder))


@dataclass
class Plan:
    """What of a checkpoint goes where.

    Attributes:
        stores: those that take their tensors in place, with whether the optimizer's state comes too.
        optimizers: numbers of those whose state is read whole, as it does not fit where it would lie.
    """

    stores: list[tuple[Store, bool]]
    optimizers: list[int]


def load(
    job: Job,
    reader: Reader,
    members: Members,
    optimizers: Optimizers,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    others: Iterable[str],
) -> None:
    """Parameters, buffers and optimizer state from a checkpoint. Every rank calls it.

    Args:
        groups: the optimizers' saved groups, without parameters.
        others: names of tensors that will be read as well, and so are checked.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: the checkpoint is of another model or of other optimizers. Nothing is changed then, on any rank.
    """
    problem: BaseException | None = None
    named = names_of(members, optimizers)
    plan = Plan([], [])
    try:
        _check_names(reader.index, members)
        _check_optimizers(reader.index, optimizers, groups)
        plan = _plan(reader, members, optimizers)
        _verify(reader, plan, members, named, others)
    except BaseException as error:
        problem = error
    facts = {"the checkpoint": reader.index.data, "how it is loaded": f"{len(plan.stores)} {plan.optimizers}"}
    agree(job, "loading a checkpoint", digest(facts), lambda: facts, problem)
    for store, states in plan.stores:
        _fill(job, reader, store, named, states=states)
    with torch.no_grad():
        for name, tensor in _plain(members).items():
            tensor.copy_(reader.whole(name))
    for number in plan.optimizers:
        state_dict.load_optimizer(optimizers[number], plain_optimizer_state(reader, number, groups[number]))


def _check_names(found: Index, members: Members) -> None:
    skipped = unsaved_buffers(members)
    tensors = {**members.parameters, **{n: b for n, b in members.buffers.items() if n not in skipped}}
    mine = {f"modules.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    theirs = {name: entry.shape for name, entry in found.tensors.items() if name.startswith("modules.")}
    told = [f"it lacks {name}" for name in mine if name not in theirs]
    told += [f"it has {name}, which the graph has not" for name in theirs if name not in mine]
    told += [
        f"{name} is {theirs[name]} there and {shape} here"
        for name, shape in mine.items()
        if theirs.get(name, shape) != shape
    ]
    told += [
        f"{name} is of {kind} there and of {str(tensor.dtype).removeprefix('torch.')} here"
        for name, tensor in tensors.items()
        if (entry := found.tensors.get(f"modules.{name}")) is not None
        and not _converts(kind := entry.dtype, tensor.dtype)
    ]
    if told:
        more = f", and {len(told) - 3} more" if len(told) > 3 else ""
        raise ConfigError(f"the checkpoint is of another model: {'; '.join(told[:3])}{more}")


def _converts(saved: str, dtype: torch.dtype) -> bool:
    """Whether saved values may become those of a tensor: floating ones may be converted, others not."""
    source = index.DTYPES[saved]
    return source == dtype or (source.is_floating_point and dtype.is_floating_point)


def _check_optimizers(found: Index, optimizers: Optimizers, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    if len(groups) != len(optimizers):
        raise ConfigError(f"the graph has {len(optimizers)} optimizers, the checkpoint {len(groups)}")
    for number, (optimizer, saved) in enumerate(zip(optimizers, groups, strict=True)):
        check_groups(optimizer, saved)
        try:
            check_hyperparameters(optimizer, saved)
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from error
        shapes = {
            at: {name: found.tensors[f"optimizers.{number}.state.{at}.{name}"].shape for name in sorted(names)}
            for at, names in _saved_states(found, number).items()
        }
        check_entries(optimizer, saved, shapes)


def _saved_states(found: Index, number: int) -> dict[int, set[str]]:
    """Names of the saved entries of an optimizer's state, by the number of the parameter."""
    start = f"optimizers.{number}.state."
    states: dict[int, set[str]] = {}
    for name in found.tensors:
        if name.startswith(start):
            at, _, entry = name.removeprefix(start).partition(".")
            states.setdefault(int(at), set()).add(entry)
    return states


def _plan(reader: Reader, members: Members, optimizers: Optimizers) -> Plan:
    stores = stores_of(members.parameters.values())
    whole = []
    for number, optimizer in enumerate(optimizers):
        saved = _saved_states(reader.index, number)
        own = [store for store in stores if store.optimizer is optimizer]
        elsewhere = any(
            (found := store_of(one)) is None or found.is_provisional or found.optimizer not in (None, optimizer)
            for one in parameters_of(optimizer)
        )
        if elsewhere or not all(_takes(reader, store, optimizer, number, saved) for store in own):
            whole.append(number)
    kept = [optimizer for number, optimizer in enumerate(optimizers) if number not in whole]
    return Plan([(one, one.optimizer in kept) for one in stores], whole)


def _takes(
    reader: Reader, store: Store, optimizer: torch.optim.Optimizer, number: int, saved: Mapping[int, set[str]]
) -> bool:
    """Whether the store can hold the saved state as it is: all entries, in its shapes, with equal step counts."""
    numbers = {id(parameter): at for at, parameter in enumerate(parameters_of(optimizer))}
    if not all(id(one) in numbers for one in store.parameters):
        return False
    entries = [saved.get(numbers[id(one)], set()) for one in store.parameters]
    if not any(entries):
        return True
    if any(one != set(store.specs) for one in entries):
        return False
    tensors = reader.index.tensors
    for name in store.specs:
        full = [f"optimizers.{number}.state.{numbers[id(one)]}.{name}" for one in store.parameters]
        layout = store.layouts.get(name)
        if layout is None:
            if any(tensors[one].shape != () for one in full) or len({float(reader.whole(one)) for one in full}) > 1:
                return False
        elif any(tensors[one].shape != slot.shape for one, slot in zip(full, layout.slots, strict=True)):
            return False
    return True


def _verify(reader: Reader, plan: Plan, members: Members, named: Named, others: Iterable[str]) -> None:
    """Read everything that this rank will read, and check it, before anything is overwritten."""
    seen: set[tuple[str, Chunk]] = set()

    def check(name: str, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if (name, chunk) not in seen:
                seen.add((name, chunk))
                reader.chunk(name, chunk)

    metadata = reader.read_metadata().state_dict_metadata
    for store, states in plan.stores:
        pieces, _ = in_place(store, named, states=states and _has_state(reader, store, named), read=False)
        for name, one in pieces.items():
            stored: Any = metadata[name]
            entry = reader.index.tensors[name]
            for item in create_read_items_for_chunk_list(name, stored, one.__create_chunk_list__()):
                check(name, [next(c for c in entry.chunks if c.offsets == tuple(item.storage_index.offset or ()))])
    for name in (*_plain(members), *others):
        check(name, reader.index.tensors[name].chunks)
    for number in plan.optimizers:
        for name, entry in reader.index.tensors.items():
            if name.startswith(f"optimizers.{number}.state."):
                check(name, entry.chunks)


def _has_state(reader: Reader, store: Store, named: Named) -> bool:
    start = named.states[id(store.parameters[0])]
    return any(start + name in reader.index.tensors for name in store.specs)


def _fill(job: Job, reader: Reader, store: Store, named: Named, *, states: bool) -> None:
    there = states and _has_state(reader, store, named)
    pieces, finish = in_place(store, named, states=there)
    _read(job, reader, pieces)
    finish()
    if not states:
        return
    if not there:
        load_states(store, [{} for _ in store.parameters])
        return
    store.fresh = False
    for name in store.specs:
        if name not in store.layouts:
            held = store.state[name]
            assert isinstance(held, Tensor)
            held.fill_(reader.whole(named.states[id(store.parameters[0])] + name).item())


def _read(job: Job, reader: Reader, pieces: dict[str, Pieces]) -> None:
    alone = job.size == 1
    with explaining_failures(job, "loading a checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        group: dist.ProcessGroup | None = None if alone else job.control
        try:
            load_pieces(pieces, storage_reader=reader, planner=PieceLoadPlanner(), process_group=group, no_dist=alone)
        # It is none of Exception's.
        except CheckpointException as error:
            raise_interrupt(error, job.rank)
            rank, (cause, *_) = min(error.failures.items())
            raise CheckpointError(f"{reader.folder} could not be read, rank {rank}: {cause}") from error


def _plain(members: Members) -> dict[str, Tensor]:
    """What lies in no store, by its name in the checkpoint."""
    skipped = unsaved_buffers(members)
    found = {f"modules.{name}": buffer for name, buffer in members.buffers.items() if name not in skipped}
    found |= {f"modules.{name}": p.detach() for name, p in members.parameters.items() if store_of(p) is None}
    return found


def plain_optimizer_state(reader: Reader, number: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ``state_dict()`` of the plain optimizer would be."""
    states = {
        at: {name: reader.whole(f"optimizers.{number}.state.{at}.{name}") for name in sorted(names)}
        for at, names in sorted(_saved_states(reader.index, number).items())
    }
    return {"state": states, "param_groups": groups}
