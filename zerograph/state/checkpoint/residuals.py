"""Error feedback in a checkpoint: residuals with a row for each rank, and the weights that all ranks have."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zerograph.compiler.members import Members
from zerograph.runtime.checkpoint.index import DTYPES
from zerograph.runtime.checkpoint.pieces import Pieces
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.runtime.feedback import RECEIVED, pending_residuals
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.state import stores_of
from zerograph.state.checkpoint.load import read_pieces

_PREFIX, _RECEIVED_PREFIX = "residuals", "received"


def pieces_of_residuals(members: Members, job: Job) -> dict[str, Pieces]:
    """Return this rank's row of each parameter's residual, and its part of the weights that all ranks have.

    They are ``residuals.<mesh dimension>.<parameter>`` and ``received.<parameter>``. Only residuals of gradients
    that no two ranks share are saved. On a grid of ranks those of the second reduction begin anew: it adds sums that
    several ranks have. Residuals that were loaded and that no step has read are saved as they are.
    """
    pieces: dict[str, Pieces] = {}
    names = members.names()
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
                        pieces[name].add(0, slot.numel, functools.partial(_flat, copy), slot.offset)
    for name, parameter in members.parameters.items():
        for dim, residual in pending_residuals(parameter).items():
            pieces.setdefault(f"{_PREFIX}.{dim}.{name}", _row(job, residual, 0, residual.numel()))
    return pieces


def _row(job: Job, residual: Tensor, offset: int, numel: int) -> Pieces:
    """Return this rank's row of a tensor with a row for each rank."""
    row = Pieces((job.size, numel), residual.dtype)
    start = job.rank * numel
    row.add(start, start + numel, functools.partial(_flat, residual), offset)
    return row


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1)


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
                pieces[name].add(row * numel, (row + 1) * numel, functools.partial(_flat, rows[name]), 0)
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
