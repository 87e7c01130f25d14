"""Threads of what the CPU computes for an accelerator: the updates of offloaded shards.

Launchers give a rank one thread (torchrun sets ``OMP_NUM_THREADS=1``). An update is bound by the CPU's memory, and a
core reaches only a part of its bandwidth: with few threads a step mostly waits for updates. The number of threads
changes no number of an elementwise update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from zerograph.ops.offload import TRANSFER
from zerograph.runtime.job.launchers import number_of

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that this process may use: of its affinity, and at most of its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = map(int, " ".join((_CGROUP / file).read_text() for file in files).split())
        except (OSError, ValueError):
            # There is no such file, or no quota.
            continue
        if quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def update_threads() -> int:
    """Return the threads for this rank's updates: its share of the cores, and at least those that torch uses now."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return max(torch.get_num_threads(), usable_cores() // number_of("LOCAL_WORLD_SIZE", ranks, least=1))


def offloads(graph: fx.Graph) -> bool:
    """Return whether the graph copies tensors between an accelerator and the CPU."""
    return any(node.target is TRANSFER for node in graph.nodes)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
