"""What ranks hold alike must be the same, bit by bit: compared by hash, and searched only where hashes differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.compiler.layout import plain_state
from zerograph.compiler.members import Members, Optimizers, parameters_of
from zerograph.errors import ReplicaError
from zerograph.ir.buckets import Bucket, element_name, spans, unravel
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split, all_broadcast
from zerograph.runtime.job.differences import first_difference
from zerograph.runtime.job.process_group import Job, digest, explained
from zerograph.runtime.state import TensorOrExtent, in_memory, store_of, stores_of
from zerograph.runtime.tensor_hash import bytes_of, hash_bits

# Bytes of each rank that are compared at a time, once two are known to differ.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Replica:
    """A tensor of which several ranks hold the same.

    Attributes:
        name: qualified; of a bucket what stands behind the names of its parameters: ``".exp_avg"``.
        held: this rank's part.
        layout: of a bucket; None for a tensor that every rank holds whole.
    """

    name: str
    held: TensorOrExtent
    sbp: NdSbp
    layout: Bucket | None = None


def check(job: Job, replicas: Sequence[Replica], facts: Callable[[], Mapping[str, str]], doing: str) -> None:
    """Return if all ranks hold the same. Every rank calls it, with the same replicas in the same order.

    One exchange of eight bytes for each replica, if they are equal.

    Args:
        facts: what must be equal on the host, by name and in words.
        doing: what the ranks are about to do, for messages.

    Raises:
        ReplicaError: on every rank, if they do not: it names the first tensor, or fact, and the ranks.
        CommunicationError: a rank did not answer.
    """
    if job.size == 1:
        return
    known = dict(facts())
    mine = torch.tensor([digest(known), *_hashes([one.held for one in replicas])], dtype=torch.int64, device="cpu")
    everybodys = torch.empty(job.size * len(mine), dtype=torch.int64, device="cpu")
    with explained(job, f"comparing what all ranks hold before {doing}"):
        _torch.all_gather(everybodys, mine, job.control)
        table = everybodys.view(job.size, -1)
        if bool((table[:, 0] != table[0, 0]).any()):
            reports: list[Any] = [None] * job.size
            dist.all_gather_object(reports, known, group=job.control)
            raise ReplicaError(first_difference(reports, doing))
        for number, one in enumerate(replicas, start=1):
            groups = [ranks for ranks in _alike(job, one.sbp) if len(table[ranks, number].unique()) > 1]
            message = _search(job, one, groups) if groups else None
            if message is not None:
                raise ReplicaError(
                    f"ranks differ before {doing}, first in {message}\n"
                    "What they hold alike must be equal bit by bit: memory of one of them is at fault, or something "
                    "outside the graph changed it on one of them. Go on from a checkpoint."
                )


def _hashes(tensors: Sequence[TensorOrExtent]) -> list[int]:
    """One transfer from each device."""
    found = [hash_bits(in_memory(one)) for one in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(found):
        by_device.setdefault(one.device, []).append(number)
    numbers: dict[int, int] = {}
    for members in by_device.values():
        numbers |= zip(members, torch.stack([found[number] for number in members]).tolist(), strict=True)
    return [numbers[number] for number in range(len(found))]


def _alike(job: Job, sbp: NdSbp) -> Iterator[list[int]]:
    """The groups of ranks that hold the same part, of two ranks or more."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(job.size):
        place = _position(job, rank)
        key = tuple(at for at, one in zip(place, sbp, strict=True) if isinstance(one, Split))
        groups.setdefault(key, []).append(rank)
    return (ranks for ranks in groups.values() if len(ranks) > 1)


def _position(job: Job, rank: int) -> tuple[int, ...]:
    """The place of a rank in the mesh."""
    return tuple((torch.tensor(job.grid, device="cpu") == rank).nonzero()[0].tolist())


def _search(job: Job, one: Replica, groups: Sequence[Sequence[int]]) -> str | None:
    """The first element in which one of the groups differs, in words; None if only padding does. A collective."""
    tensor = in_memory(one.held)
    mine, size = bytes_of(tensor), tensor.element_size()
    places = [_namer(one, tensor, replace(job.mesh, position=_position(job, ranks[0]))) for ranks in groups]
    for start in range(0, len(mine), _CHUNK):
        chunk = mine[start : start + _CHUNK].cpu()
        everybodys = torch.empty(job.size * len(chunk), dtype=torch.uint8, device="cpu")
        _torch.all_gather(everybodys, chunk.contiguous(), job.control)
        table = everybodys.view(job.size, -1)
        for ranks, name in zip(groups, places, strict=True):
            differing = (table[list(ranks)] != table[ranks[0]]).any(0).nonzero().flatten()
            for element in torch.unique_consecutive(differing // size).tolist():
                found = name(start // size + element)
                if found is not None:
                    bits = table[:, element * size : (element + 1) * size]
                    return "\n  ".join([f"{found}:", *_values(bits, ranks, tensor.dtype)])
    return None


def _namer(one: Replica, tensor: Tensor, mesh: Mesh) -> Callable[[int], str | None]:
    """What names an element of a rank's part, by its number; None in padding."""
    shape = tuple(tensor.shape)
    if one.layout is None:
        return lambda element: element_name(one.name, unravel(element, shape))
    rows, width = one.layout.rows, shape[-1]
    parts = list(spans(one.layout, mesh))

    def name(element: int) -> str | None:
        row, at = divmod(element, width)
        for part in parts:
            if (part.row or 0) == row and part.start <= at < part.stop:
                place = part.element(at - part.start, rows)
                # State may be laid out as its parameter is, or in ways of its own.
                return element_name(part.slot.name + one.name, place)
        return None

    return name


def _values(bits: Tensor, ranks: Sequence[int], dtype: torch.dtype) -> Iterator[str]:
    """Which of the ranks have which value."""
    by_bits = sorted((tuple(bits[rank].tolist()), rank) for rank in ranks)
    held = [(key, [rank for _, rank in group]) for key, group in itertools.groupby(by_bits, lambda pair: pair[0])]
    for key, those in sorted(held, key=lambda pair: pair[1]):
        value = torch.tensor(key, dtype=torch.uint8, device="cpu").view(dtype)[0]
        plain = value.float() if value.is_floating_point() and value.element_size() == 1 else value
        number = "".join(f"{byte:02x}" for byte in reversed(key))
        named = ", ".join(map(str, those))
        yield f"rank{'s' if len(those) > 1 else ''} {named}: {plain.item()} (bits 0x{number})"


def replicas_of(members: Members, optimizers: Optimizers, mesh: Mesh) -> list[Replica]:
    """What several ranks hold alike, in the same order on all: parameters, optimizer state, buffers."""
    everywhere = all_broadcast(mesh.dims)
    found: list[Replica] = []
    for store in stores_of(members.parameters.values()):
        found.append(Replica("", store.flat, store.layout.sbp, store.layout))
        for name, held in store.state.items():
            layout = store.layouts.get(name)
            about = store.layout.slots[0].name + "." + name if layout is None else "." + name
            found.append(Replica(about, held, everywhere if layout is None else layout.sbp, layout))
    for name, parameter in members.parameters.items():
        if store_of(parameter) is None:
            found.append(Replica(name, parameter.detach(), everywhere))
    names = members.names()
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            for name, value in plain_state(optimizer, parameter).items():
                if isinstance(value, Tensor) and not isinstance(value, DTensor):
                    found.append(Replica(f"{names[id(parameter)]}.{name}", value, everywhere))
    found += [Replica(name, buffer, everywhere) for name, buffer in members.buffers.items()]
    return [one for one in found if any(size > 1 for size in _copies(one.sbp, mesh))]


def _copies(sbp: NdSbp, mesh: Mesh) -> Iterator[int]:
    return (size for one, size in zip(sbp, mesh.shape, strict=True) if not isinstance(one, Split))


def host_facts(
    counts: Mapping[str, str],
    optimizers: Optimizers,
    schedulers: Sequence[LRScheduler | None],
    scaler: GradScaler | None,
) -> dict[str, str]:
    """What must be equal on the host, by name: counts, hyperparameters, the state of schedulers and of the scaler."""
    found = dict(counts)
    for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
        about = f"{type(optimizer).__name__}{f' {number}' if len(optimizers) > 1 else ''}"
        for index, group in enumerate(optimizer.param_groups):
            found |= {f"{key} of group {index} of {about}": _words(v) for key, v in group.items() if key != "params"}
        if scheduler is not None:
            states = scheduler.state_dict().items()
            found |= {f"{key} of {type(scheduler).__name__} of {about}": _words(value) for key, value in states}
    if scaler is not None:
        found |= {f"{key} of {type(scaler).__name__}": _words(value) for key, value in scaler.state_dict().items()}
    return found


def _words(value: Any) -> str:
    """A value in words that are equal on all ranks for equal ones; of an object no more than its class."""
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() <= 16 else f"bits {int(hash_bits(value)):#x}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_words(key)}: {_words(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_words, value)) + "]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__qualname__
