"""The comparison of replicas: bitwise by hash, with a search for the first difference where hashes differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compiler.layout import plain_state
from zerograph.compiler.members import Members, Optimizers
from zerograph.compiler.plain_inputs import replica_groups
from zerograph.errors import ReplicaError
from zerograph.ir.buckets import Bucket, element_name, spans
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split, all_broadcast, is_dtensor
from zerograph.ir.slots import unravel
from zerograph.runtime.job.differences import first_difference
from zerograph.runtime.job.process_group import Job, digest, explaining_failures
from zerograph.runtime.parameters import parameters_of
from zerograph.runtime.state import TensorOrExtent, in_memory, store_of, stores_of, text_of
from zerograph.runtime.tensor_hash import bytes_of, hash_bits

# Bytes of each rank that the search for a difference exchanges at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Replica:
    """A tensor of which several ranks have the same part.

    Attributes:
        name: qualified name of a plain tensor; suffix of the names of a bucket's parameters: ``".exp_avg"``.
        part: this rank's part.
        sbp: its placement.
        layout: layout of the bucket; None for a plain tensor, which every rank has whole.
    """

    name: str
    part: TensorOrExtent
    sbp: NdSbp
    layout: Bucket | None = None


def check(job: Job, replicas: Sequence[Replica], facts: Callable[[], Mapping[str, str]], doing: str) -> None:
    """Check that replicas are equal on all ranks. A collective, with the same replicas in the same order.

    If they are equal, one exchange of eight bytes for each replica shows it.

    Args:
        facts: returns what must be equal on the host, as text by name.
        doing: names the next step in messages.

    Raises:
        ReplicaError: on every rank, if replicas or facts differ; names the first difference and the ranks.
        CommunicationError: a rank did not answer.
    """
    if job.size == 1:
        return
    host = dict(facts())
    hashes = [digest(host), *_hashes([replica.part for replica in replicas])]
    sent = torch.tensor(hashes, dtype=torch.int64, device="cpu")
    with explaining_failures(job, f"comparing what all ranks hold before {doing}"):
        table = job.channel.gather(sent)  # [ranks, 1 + replicas]
        if bool((table[:, 0] != table[0, 0]).any()):
            raise ReplicaError(first_difference(job.channel.share(host), doing))
        for number, replica in enumerate(replicas, start=1):
            groups = [
                ranks for ranks in replica_groups(job.grid, replica.sbp) if len(table[ranks, number].unique()) > 1
            ]
            message = _search(job, replica, groups) if groups else None
            if message is not None:
                raise ReplicaError(
                    f"ranks differ before {doing}, first in {message}\n"
                    "Replicas must be equal bit by bit: one rank has faulty memory, or code outside of the graph "
                    "changed its replica. Continue from a checkpoint."
                )


def _hashes(parts: Sequence[TensorOrExtent]) -> list[int]:
    """Return the hash of each part, with one transfer from each device."""
    hashes = [hash_bits(in_memory(part)) for part in parts]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(hashes):
        by_device.setdefault(value.device, []).append(index)
    on_host: dict[int, int] = {}
    for indices in by_device.values():
        on_host |= zip(indices, torch.stack([hashes[index] for index in indices]).tolist(), strict=True)
    return [on_host[index] for index in range(len(hashes))]


def _position(job: Job, rank: int) -> tuple[int, ...]:
    """Return the position of a rank on the mesh."""
    return tuple((torch.tensor(job.grid, device="cpu") == rank).nonzero()[0].tolist())


def _search(job: Job, replica: Replica, groups: Sequence[Sequence[int]]) -> str | None:
    """Return a description of the first element that differs within a group. A collective.

    None if only padding differs.
    """
    tensor = in_memory(replica.part)
    content, size = bytes_of(tensor), tensor.element_size()
    namers = [_namer(replica, tensor, replace(job.mesh, position=_position(job, ranks[0]))) for ranks in groups]
    for start in range(0, len(content), _CHUNK):
        chunk = content[start : start + _CHUNK].cpu()
        table = job.channel.gather(chunk)  # [ranks, bytes]
        for ranks, name_of in zip(groups, namers, strict=True):
            differing = (table[list(ranks)] != table[ranks[0]]).any(0).nonzero().flatten()
            for element in torch.unique_consecutive(differing // size).tolist():
                name = name_of(start // size + element)
                if name is not None:
                    bits = table[:, element * size : (element + 1) * size]
                    return "\n  ".join([f"{name}:", *_values(bits, ranks, tensor.dtype)])
    return None


def _namer(replica: Replica, tensor: Tensor, mesh: Mesh) -> Callable[[int], str | None]:
    """Return a function that returns the name of an element of a rank's part, by its index; None for padding."""
    shape = tuple(tensor.shape)
    if replica.layout is None:
        return lambda element: element_name(replica.name, unravel(element, shape))
    width = shape[-1]
    slot_spans = list(spans(replica.layout, mesh))

    def name(element: int) -> str | None:
        row, column = divmod(element, width)
        for span in slot_spans:
            if (span.row or 0) == row and span.start <= column < span.stop:
                return element_name(span.slot.name + replica.name, span.element(column - span.start))
        return None

    return name


def _values(bits: Tensor, ranks: Sequence[int], dtype: torch.dtype) -> Iterator[str]:
    """Yield a line for each value of an element, with the ranks that have it.

    Args:
        bits: the bytes of the element on each rank [ranks, element size].
    """
    by_bits = sorted((tuple(bits[rank].tolist()), rank) for rank in ranks)
    groups = [(key, [rank for _, rank in pairs]) for key, pairs in itertools.groupby(by_bits, lambda pair: pair[0])]
    for key, same in sorted(groups, key=lambda group: group[1]):
        value = torch.tensor(key, dtype=torch.uint8, device="cpu").view(dtype)[0]
        plain = value.float() if value.is_floating_point() and value.element_size() == 1 else value
        number = "".join(f"{byte:02x}" for byte in reversed(key))
        yield f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}: {plain.item()} (bits 0x{number})"


def replicas_of(members: Members, optimizers: Optimizers, mesh: Mesh) -> list[Replica]:
    """Return the tensors of which several ranks have the same part, in equal order.

    They are parameters, also as gathers of differences have left them, optimizer state and buffers.
    """
    whole = all_broadcast(mesh.dims)
    replicas: list[Replica] = []
    for store in stores_of(members.parameters.values()):
        replicas.append(Replica("", store.flat, store.layout.sbp, store.layout))
        for name, part in store.state.items():
            layout = store.layouts.get(name)
            suffix = store.layout.slots[0].name + "." + name if layout is None else "." + name
            replicas.append(Replica(suffix, part, whole if layout is None else layout.sbp, layout))
        if store.received is not None:
            gathered = replace(store.layout, sbp=store.layout.gathered)
            replicas.append(Replica(" (as received)", store.received, gathered.sbp, gathered))
    for name, parameter in members.parameters.items():
        if store_of(parameter) is None:
            replicas.append(Replica(name, parameter.detach(), whole))
    names = members.names
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            for name, value in plain_state(optimizer, parameter).items():
                if isinstance(value, Tensor) and not is_dtensor(value):
                    replicas.append(Replica(f"{names[id(parameter)]}.{name}", value, whole))
    replicas += [Replica(name, buffer, whole) for name, buffer in members.buffers.items()]
    return [replica for replica in replicas if any(size > 1 for size in _copies(replica.sbp, mesh))]


def _copies(sbp: NdSbp, mesh: Mesh) -> Iterator[int]:
    return (size for entry, size in zip(sbp, mesh.shape, strict=True) if not isinstance(entry, Split))


def host_facts(
    counts: Mapping[str, str],
    optimizers: Optimizers,
    schedulers: Sequence[LRScheduler | None],
    scaler: GradScaler | None,
) -> dict[str, str]:
    """Return what must be equal on the host, as text by name.

    That is the ``counts``, hyperparameters, and the state of schedulers and of the scaler.
    """
    facts = dict(counts)
    for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
        name = f"{type(optimizer).__name__}{f' {number}' if len(optimizers) > 1 else ''}"
        for index, group in enumerate(optimizer.param_groups):
            facts |= {f"{key} of group {index} of {name}": text_of(v) for key, v in group.items() if key != "params"}
        if scheduler is not None:
            states = scheduler.state_dict().items()
            facts |= {f"{key} of {type(scheduler).__name__} of {name}": text_of(value) for key, value in states}
    if scaler is not None:
        facts |= {f"{key} of {type(scaler).__name__}": text_of(value) for key, value in scaler.state_dict().items()}
    return facts
