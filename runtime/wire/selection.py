"""Choose between torch's collectives and our exchanges: measured once per machine, cached on disk, decided by rank 0.

Over gloo a gather is always an exchange. With several of ``_c10d_functional``'s all-gathers in flight torch 2.13 writes
into freed memory: twenty thousand small ones on two ranks end in glibc's "unaligned tcache chunk" or a segmentation
fault. Its reductions do not, nor does one gather at a time.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph._torch import OpOverload
from zerograph.base import cache
from zerograph.errors import ConfigError
from zerograph.ir.hosts import HostLayout, hosts_of_equal_size
from zerograph.ir.mesh import Mesh
from zerograph.runtime.job.exchange import broadcast_number
from zerograph.runtime.job.process_group import Job, explaining_failures
from zerograph.runtime.wire import collectives, direct

c10d = torch.ops._c10d_functional

# Bytes of the whole tensor: a small bucket and a large one.
_SIZES = 2**20, 2**23
# Measured repetitions.
_REPETITIONS = 4

# Used over gloo in any case.
_ALWAYS: dict[str, OpOverload] = {
    "all-gather": collectives.gather_pieces,
    "all-gather into gather buffer": collectives.gather_into,
}
# Used where ranks read each other's memory.
_DIRECT: dict[str, OpOverload] = {
    "all-reduce": collectives.sum_ranks,
    "all-reduce in place": collectives.sum_ranks_,
}
# Used where each of several hosts has several ranks.
_ACROSS_HOSTS: dict[str, OpOverload] = {
    "reduce-scatter, summed": collectives.reduce_pieces,
    "reduce-scatter, coded": collectives.reduce_coded,
}
# Used on one host too, and elsewhere if measured faster.
_MEASURED: dict[str, OpOverload] = {"reduce-scatter": collectives.exchange_pieces}


@dataclass(frozen=True)
class Transport:
    """How ranks exchange tensors.

    Attributes:
        exchanges: the operators that replace torch's collectives, by collective.
        hosts: which ranks share a host; None: unknown.
    """

    exchanges: Mapping[str, OpOverload]
    hosts: HostLayout | None = None


def transport_of(job: Job) -> Transport:
    """Return the transport of a job. Every rank must call it.

    Raises:
        CommunicationError: measuring failed.
    """
    return Transport(select_exchanges(job), direct.layout(job))


def named_transport(name: str, mesh: Mesh) -> Transport:
    """Return the transport of that name between the ranks of a mesh; see :meth:`zerograph.ZeroGraph.prepare`.

    The transports are ``"torch"``; ``"gloo"``; ``"host"``, gloo where all ranks read each other's memory; and
    ``"hosts"``, gloo where each of two hosts has several ranks, which read each other's memory, or ``"hosts:3"``.

    Raises:
        ConfigError: there is no such transport, or not on this mesh: that many hosts cannot have several ranks each,
            equally many.
    """
    transports = {
        "torch": Transport({}),
        "gloo": Transport(_ALWAYS, hosts_of_equal_size(mesh.size, 1)),
        "host": Transport(_ALWAYS | _DIRECT | _MEASURED, hosts_of_equal_size(mesh.size, mesh.size)),
    }
    if name in transports:
        return transports[name]
    number = re.fullmatch(r"hosts(?::(\d{1,6}))?", name)
    if number is None:
        raise ConfigError(f"there is no transport {name!r:.60}: choose {', '.join(transports)}, hosts, or hosts:3")
    hosts = int(number[1] or 2)
    if mesh.dims > 1 or mesh.size % hosts or not 1 < hosts < mesh.size:
        raise ConfigError(f"transport {name!r}: {mesh.shape} ranks are not several on each of {hosts} hosts")
    return Transport(_ALWAYS | _DIRECT | _ACROSS_HOSTS, hosts_of_equal_size(mesh.size, mesh.size // hosts))


def select_exchanges(job: Job) -> Mapping[str, OpOverload]:
    """Return the exchanges that replace torch's collectives in this job, by kind. Every rank must call it.

    Only gloo's collectives are replaced; NCCL uses the wire better.

    Raises:
        CommunicationError: measuring failed.
    """
    if job.size == 1 or any(group.name() != "gloo" for group in job.groups):
        return {}
    hosts = direct.hosts(job)
    # All ranks' groups count: if hosts have differently shaped parts of the mesh, other ranks have other groups.
    if hosts.everywhere:
        return _ALWAYS | _DIRECT | _MEASURED
    if hosts.spanning is not None:
        return _ALWAYS | _DIRECT | _ACROSS_HOSTS
    return _ALWAYS | (_MEASURED if _exchange_is_faster(job) else {})


# Shared by the graphs of a process. Weak: a job that has ended frees its groups and their threads.
_faster_by_job: WeakKeyDictionary[Job, bool] = WeakKeyDictionary()


def _exchange_is_faster(job: Job) -> bool:
    """Return whether our reduce-scatter is faster than torch's, from rank 0's cache file or measured now."""
    if job not in _faster_by_job:
        file = _cache_file(job)
        faster = broadcast_number(job, _read(file) if job.rank == 0 else _UNKNOWN)
        if faster == _UNKNOWN:
            with explaining_failures(job, "measuring the wire"):
                measured = _measure(job)
            faster = broadcast_number(job, int(measured))
            if job.rank == 0:
                cache.write(file, json.dumps(bool(faster)))
        _faster_by_job[job] = bool(faster)
    return _faster_by_job[job]


_UNKNOWN = -1


def _cache_file(job: Job) -> Path:
    shape = "x".join(map(str, job.mesh.shape))
    return cache.folder("wire") / f"{platform.node()}-gloo-{shape}-torch{torch.__version__}.json"


def _read(file: Path) -> int:
    """Return the cached answer as 0 or 1; ``_UNKNOWN`` if there is no file or it is not readable."""
    try:
        faster = json.loads(cache.read(file))
    except (OSError, ValueError, RecursionError):
        return _UNKNOWN
    return int(faster) if isinstance(faster, bool) else _UNKNOWN


def _measure(job: Job) -> bool:
    """Return whether our reduce-scatter took less time on this rank, along the longest mesh dimension."""
    dim = max(range(job.mesh.dims), key=lambda dim: job.mesh.shape[dim])
    ranks, group = job.mesh.shape[dim], job.mesh.groups[dim]
    torchs = exchange = 0.0
    for size in _SIZES:
        whole = torch.ones(size // 4 // ranks * ranks)
        torchs += _fastest(job, lambda whole: c10d.reduce_scatter_tensor(whole, "sum", ranks, group), whole)
        exchange += _fastest(job, lambda whole: collectives.exchange_pieces(whole, ranks, group), whole)
    return exchange < torchs


def _fastest(job: Job, run: Callable[[Tensor], Tensor], whole: Tensor) -> float:
    """Return the seconds of the fastest of some runs, after one that is not counted."""
    seconds = []
    for _ in range(1 + _REPETITIONS):
        dist.barrier(job.channel.group)
        began = time.perf_counter()
        c10d.wait_tensor(run(whole))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
