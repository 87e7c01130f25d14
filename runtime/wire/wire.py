"""What moves a tensor best between these ranks: measured once per machine, remembered on disk, decided by rank 0.

Over gloo a gather is always an exchange, measured or not: with several of ``_c10d_functional``'s gathers in flight
torch 2.13 writes into memory that is free already (twenty thousand small ones on two ranks end in glibc's "unaligned
tcache chunk" or a segmentation fault; its reductions do not, nor does one gather at a time).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph._torch import OpOverload
from zerograph.base import cache
from zerograph.runtime.job.process_group import Job, explained
from zerograph.runtime.wire import collectives, direct

c10d = torch.ops._c10d_functional

# Bytes of the whole tensor: a small bucket, and a large one.
_SIZES = 2**20, 2**23
_TIMES = 4

_ALWAYS: dict[str, OpOverload] = {
    "all-gather": collectives.gather_pieces,
    "all-gather into room": collectives.gather_into,
}
# Where ranks read each other's memory.
_NEAR: dict[str, OpOverload] = {
    "all-reduce": collectives.sum_ranks,
    "all-reduce in place": collectives.sum_ranks_,
}
# There too, and where it is measured faster.
_RIVALS: dict[str, OpOverload] = {"reduce-scatter": collectives.exchange_pieces}


def exchanges(job: Job) -> Mapping[str, OpOverload]:
    """The exchanges to be used for torch's collectives between the ranks of the job, by kind. Every rank must call it.

    Only gloo's collectives have rivals; NCCL knows the wire better.

    Raises:
        CommunicationError: the ranks could not measure.
    """
    if job.size == 1 or any(group.name() != "gloo" for group in job.lines):
        return {}
    # Not this rank's lines alone: where hosts have parts of the mesh of different form, other ranks have others.
    if direct.everywhere(job):
        return _ALWAYS | _NEAR | _RIVALS
    with explained(job, "measuring the wire"):
        kinds = _decided(job)
    return _ALWAYS | {kind: _RIVALS[kind] for kind in kinds}


# By job: several graphs of a process share it. Weakly: a job that is over lets go of its groups, and of their threads.
_known: WeakKeyDictionary[Job, list[str]] = WeakKeyDictionary()


def _decided(job: Job) -> list[str]:
    if job not in _known:
        file = _file(job)
        found: list[list[str] | None] = [_read(file) if job.rank == 0 else None]
        dist.broadcast_object_list(found, group_src=0, group=job.control)
        if found[0] is None:
            found = [_measure(job)]
            dist.broadcast_object_list(found, group_src=0, group=job.control)
            if job.rank == 0:
                cache.write(file, json.dumps(found[0]))
        assert found[0] is not None
        _known[job] = found[0]
    return _known[job]


def _file(job: Job) -> Path:
    shape = "x".join(map(str, job.mesh.shape))
    return cache.folder("wire") / f"{platform.node()}-gloo-{shape}-torch{torch.__version__}.json"


def _read(file: Path) -> list[str] | None:
    """The kinds remembered; None for nothing, or what nobody can read: it is measured again."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(kind in list(_RIVALS) for kind in found) else None


def _measure(job: Job) -> list[str]:
    """The kinds for which the exchange took less time on this rank, in the mesh's longest line."""
    dim = max(range(job.mesh.dims), key=lambda dim: job.mesh.shape[dim])
    ranks, group = job.mesh.shape[dim], job.mesh.groups[dim]
    rivals: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "reduce-scatter": (
            lambda whole: c10d.reduce_scatter_tensor(whole, "sum", ranks, group),
            lambda whole: collectives.exchange_pieces(whole, ranks, group),
        ),
    }
    faster = []
    for kind, (collective, exchange) in rivals.items():
        seconds = [0.0, 0.0]
        for size in _SIZES:
            whole = torch.ones(size // 4 // ranks * ranks)
            for which, run in enumerate((collective, exchange)):
                seconds[which] += _fastest(job, run, whole)
        if seconds[1] < seconds[0]:
            faster.append(kind)
    return faster


def _fastest(job: Job, run: Callable[[Tensor], Tensor], whole: Tensor) -> float:
    """Seconds of the fastest of some tries, the first not counted."""
    seconds = []
    for _ in range(1 + _TIMES):
        dist.barrier(job.control)
        began = time.perf_counter()
        c10d.wait_tensor(run(whole))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
