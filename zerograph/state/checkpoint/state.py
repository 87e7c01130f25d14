"""Collect everything that a checkpoint of a graph holds, and restore it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.compiler.members import Members, Optimizers
from zerograph.config import Config
from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint.index import DTYPES, check_text
from zerograph.runtime.checkpoint.pieces import Pieces, flat_of
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.runtime.feedback import RECEIVED, pending_residuals, set_residuals
from zerograph.runtime.job.process_group import Job, agreeing
from zerograph.runtime.state import stores_of
from zerograph.state.checkpoint.contents import names_of, pieces_of_plain, pieces_of_store, plain_tensors
from zerograph.state.checkpoint.document import encode
from zerograph.state.checkpoint.load import (
    check_names,
    load,
    open_checkpoint,
    plain_optimizer_state,
    plain_shapes,
    read_pieces,
)
from zerograph.state.checkpoint.pretrained import configurations
from zerograph.state.checkpoint.written import Call, Counts, Written, written
from zerograph.state.checks import check_state
from zerograph.state.state_dict import kept_on_error, load_groups, load_schedulers, numbered_groups, with_extra_state


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a graph that a checkpoint holds.

    Attributes:
        counts: updates done, forward passes done, and the seed of random numbers.
        calls: the calls of a loop that are graphs; None for a graph. A load replaces them by those of the checkpoint.
    """

    members: Members
    optimizers: Optimizers
    schedulers: Sequence[LRScheduler | None]
    config: Config
    counts: Counts
    job: Job
    calls: list[Call] | None = None


def state_of(parts: Parts, configuration: str, position: Mapping[str, Any]) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """Return this rank's pieces of each tensor, and a document of everything else.

    Args:
        configuration: text of the graph's configuration, for readers.
        position: further entries of the document, such as where a loop is.

    Raises:
        ConfigError: a checkpoint cannot hold a part of the state.
    """
    members, job = parts.members, parts.job
    named = names_of(members, parts.optimizers)
    pieces: dict[str, Pieces] = {}
    for store in stores_of(members.parameters.values()):
        pieces |= pieces_of_store(store, named)
    pieces |= pieces_of_plain(plain_tensors(members, parts.optimizers, named).items(), job.rank, job.size)
    pieces |= pieces_of_residuals(members, job)
    pieces |= _generators(job)
    for name, piece in pieces.items():
        if piece.dtype not in DTYPES.values():
            raise ConfigError(f"{name} is of {piece.dtype}, which a checkpoint cannot hold")
    steps, passes, seed = parts.counts
    unsaved = _torch.unsaved_buffers(members.root)
    document = {
        **{name: encode(value, name) for name, value in position.items()},
        "versions": {"zerograph": sys.modules["zerograph"].__version__, "torch": torch.__version__},
        "configuration": configuration,
        "ranks": job.size,
        "steps_done": steps,
        "passes_done": passes,
        "seed": seed,
        "aliases": {alias: name for alias, name in members.aliases.items() if name not in unsaved},
        "pretrained": {
            name: files for name, module in members.root.named_children() if (files := configurations(module))
        },
        "extra_state": {
            name: encode(module.get_extra_state(), f"what get_extra_state() of {name} returns")
            for name, module in with_extra_state(members).items()
        },
        "calls": [list(one) for one in parts.calls or ()],
        "grad_scaler": None if parts.config.scaler is None else encode(parts.config.scaler.state_dict(), "grad_scaler"),
        "lr_schedulers": [
            None if scheduler is None else encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}")
            for scheduler in parts.schedulers
        ],
        "optimizers": [
            [encode(group, f"{type(optimizer).__name__}.param_groups") for group in numbered_groups(optimizer)]
            for optimizer in parts.optimizers
        ],
    }
    try:
        check_text([list(pieces), document])
    except ValueError as error:
        raise ConfigError(f"a checkpoint cannot hold the graph's names and hyperparameters: {error}") from error
    return pieces, document


def restore(job: Job, path: str | os.PathLike[str] | Reader, parts: Parts) -> Counts:
    """Load a checkpoint, or what a reader of one reads, into a graph and return its counts.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: it is of another model or of other optimizers. Nothing is changed then.
    """
    # A file that one rank cannot read is an error on all ranks.
    with agreeing(job, "loading a checkpoint"):
        reader = path if isinstance(path, Reader) else open_checkpoint(path)
        saved = written(reader)
        _check_fits(reader, saved, parts)
        # Those of a loop are equal on all ranks.
        has_own = saved.ranks == job.size or parts.calls is not None
        generators = _read_generators(reader, job.rank if parts.calls is None else 0) if has_own else {}
    groups = saved.groups
    residuals = read_residuals(job, reader, parts.members)
    # The user's code, which may fail, comes before what cannot be undone.
    with kept_on_error(parts.members, parts.schedulers, parts.config.scaler), agreeing(job, "loading a checkpoint"):
        for name, module in with_extra_state(parts.members).items():
            if name in saved.extra_state:
                module.set_extra_state(saved.extra_state[name])
        load_schedulers(parts.schedulers, parts.config.scaler, saved.state)
    load(job, reader, parts.members, parts.optimizers, groups, parts.config)
    for optimizer, optimizer_groups in zip(parts.optimizers, groups, strict=True):
        load_groups(optimizer, optimizer_groups)
    for kind, state in generators.items():
        (torch if kind == "cpu" else torch.cuda).set_rng_state(state)
    set_residuals(parts.members.parameters.values(), residuals)
    if parts.calls is not None:
        parts.calls[:] = saved.calls
    return saved.counts


def _check_fits(reader: Reader, saved: Written, parts: Parts) -> None:
    """Check that the graph can load all of the checkpoint.

    Raises:
        ConfigError: it is of another model or of other optimizers.
        CheckpointError: it is damaged.
    """
    check_names(reader.index, parts.members)
    _check_extra_state(saved, parts.members)
    shapes = dict(enumerate(map(plain_shapes, parts.optimizers, saved.groups)))
    optimizers = [
        plain_optimizer_state(reader, number, groups, shapes.get(number), read=False)
        for number, groups in enumerate(saved.groups)
    ]
    state = {**saved.state, "optimizers": optimizers}
    check_state(parts.optimizers, parts.schedulers, parts.config.scaler, state, CheckpointError)


def _check_extra_state(document: Written, members: Members) -> None:
    """Check that the checkpoint has the extra state of the same modules; those of earlier versions have none.

    Raises:
        ConfigError: it has not.
    """
    own = with_extra_state(members)
    # Earlier versions wrote one name of a module that has several.
    there_is = {id(module) for name, module in own.items() if name in document.extra_state}
    lacking = {name for name, module in own.items() if id(module) not in there_is}
    if document.extra_state and (different := sorted(lacking | (document.extra_state.keys() - own.keys()))):
        there = different[0] in document.extra_state
        raise ConfigError(
            f"the checkpoint is of another model: {'it has' if there else 'it lacks'} the extra state of "
            f"{different[0]}{', which the graph has not' if there else ''}"
        )


def _kinds_of_generators() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _generators(job: Job) -> dict[str, Pieces]:
    """Return the pieces of each rank's state of torch's default generators, which data samplers draw from."""
    pieces = {}
    for kind in _kinds_of_generators():
        state = (torch if kind == "cpu" else torch.cuda).get_rng_state()
        for rank in range(job.size):
            pieces[f"generators.{rank}.{kind}"] = piece = Pieces(tuple(state.shape), state.dtype)
            if rank == job.rank:
                piece.add(0, state.numel(), flat_of(state), 0)
    return pieces


def _read_generators(reader: Reader, rank: int) -> dict[str, Tensor]:
    """Return a rank's saved states of those generators that this process has, by kind.

    Raises:
        CheckpointError: a generator refuses a state.
    """
    states = {}
    for kind in _kinds_of_generators():
        name = f"generators.{rank}.{kind}"
        if name in reader.index.tensors:
            states[kind] = reader.whole(name)
            try:
                torch.Generator(kind).set_state(states[kind])
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"{reader.folder} is damaged: {name} is not a state of a generator: {error}"
                ) from error
    return states


_PREFIX, _RECEIVED_PREFIX = "residuals", "received"


def pieces_of_residuals(members: Members, job: Job) -> dict[str, Pieces]:
    """Return this rank's row of each parameter's residual, and its part of the weights that all ranks have.

    They are ``residuals.<mesh dimension>.<parameter>`` and ``received.<parameter>``. Only residuals of gradients
    that no two ranks share are saved. On a grid of ranks those of the second reduction begin anew: it adds sums that
    several ranks have. Residuals that were loaded and that no step has read are saved as they are.
    """
    pieces: dict[str, Pieces] = {}
    names = members.names
    for store in stores_of(members.parameters.values()):
        for dim, residual in store.residuals.items():
            if dim != store.own_residual or tuple(residual.shape) != (store.layout.padded,):
                continue
            for parameter, slot in store.slots():
                if id(parameter) in names and slot.numel:
                    name = f"{_PREFIX}.{dim}.{names[id(parameter)]}"
                    pieces[name] = _row(job, residual, slot.offset, slot.numel)
        copy = store.received
        if copy is not None and tuple(copy.shape) == (store.layout.padded,):
            for number, (parameter, slot) in enumerate(store.slots()):
                if id(parameter) in names and slot.numel:
                    name = f"{_RECEIVED_PREFIX}.{names[id(parameter)]}"
                    pieces[name] = Pieces((slot.numel,), copy.dtype)
                    if number % job.size == job.rank:
                        pieces[name].add(0, slot.numel, flat_of(copy), slot.offset)
    for name, parameter in members.parameters.items():
        for dim, residual in pending_residuals(parameter).items():
            pieces.setdefault(f"{_PREFIX}.{dim}.{name}", _row(job, residual, 0, residual.numel()))
    return pieces


def _row(job: Job, residual: Tensor, offset: int, numel: int) -> Pieces:
    """Return this rank's row of a tensor with a row for each rank."""
    row = Pieces((job.size, numel), residual.dtype)
    start = job.rank * numel
    row.add(start, start + numel, flat_of(residual), offset)
    return row


def read_residuals(job: Job, reader: Reader, members: Members) -> dict[int, dict[int, Tensor]]:
    """Return this rank's residuals of a checkpoint, by ``id`` of the parameter and mesh dimension. A collective.

    On another number of ranks row i goes to rank i modulo their number, and rows of one rank are added: all ranks
    together owe what they owed.

    Raises:
        CheckpointError: a file is damaged.
    """
    residuals: dict[int, dict[int, Tensor]] = {}
    rows: dict[str, Tensor] = {}
    saved = [name for name in reader.index.tensors if name.startswith(f"{_PREFIX}.")]
    ranks = max((reader.index.tensors[name].shape[0] for name in saved), default=0)
    totals: dict[str, Tensor] = {}
    for first in range(0, ranks, job.size):
        pieces: dict[str, Pieces] = {}
        for name in saved:
            entry = reader.index.tensors[name]
            count, numel = entry.shape
            row = first + job.rank
            if row < count:
                rows[name] = torch.empty(numel, dtype=DTYPES[entry.dtype])
                pieces[name] = Pieces((count, numel), DTYPES[entry.dtype])
                pieces[name].add(row * numel, (row + 1) * numel, flat_of(rows[name]), 0)
        read_pieces(job, reader, pieces)
        for name in pieces:
            totals[name] = totals[name] + rows[name].float() if name in totals else rows[name]
    for name in saved:
        entry = reader.index.tensors[name]
        total = totals.get(name, torch.zeros(entry.shape[1])).to(DTYPES[entry.dtype])
        _, dim, parameter = name.split(".", 2)
        if parameter in members.parameters and total.numel() == members.parameters[parameter].numel():
            residuals.setdefault(id(members.parameters[parameter]), {})[int(dim)] = total
    for parameter, tensor in members.parameters.items():
        name = f"{_RECEIVED_PREFIX}.{parameter}"
        if name in reader.index.tensors and reader.index.tensors[name].shape == (tensor.numel(),):
            residuals.setdefault(id(tensor), {})[RECEIVED] = reader.whole(name)
    return residuals
