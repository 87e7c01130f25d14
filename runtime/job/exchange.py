"""Exchange tensors between the ranks of a job outside of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.ir.sbp import NdSbp, Split
from zerograph.runtime.job.channel import hang_up
from zerograph.runtime.job.process_group import Job, explaining_failures
from zerograph.runtime.tensor_hash import bytes_of
from zerograph.runtime.wire import collectives, direct

c10d = torch.ops._c10d_functional

_GATHERING = "gathering state outside a step"
# A wait that ends when rank 0 answers or is lost, and not before.
_UNLIMITED = timedelta(days=365)
# The pause between two looks at whether rank 0 has answered: a share of the time waited, and at most these seconds.
_NAP, _MOST_NAP = 0.05, 0.02


def broadcast_number(job: Job, number: int) -> int:
    """Return rank 0's 64-bit number on every rank."""
    shared = torch.tensor([number], device="cpu")
    broadcast_from(job, [shared], what="seed")
    return int(shared)


def broadcast_when_ready(job: Job, number: int, doing: str) -> tuple[int, BaseException | None]:
    """Return rank 0's 64-bit number on every rank. The others wait until rank 0 calls this, for as long as it lives.

    An interrupt of a rank that waits is caught, and returned with the number: rank 0 may send more after it. A second
    one is raised.

    Args:
        job: the ranks.
        number: rank 0's; on a simulated job this rank's.
        doing: what the others wait for, for messages.

    Raises:
        CommunicationError: rank 0 is lost.
    """
    if job.size == 1:
        return number, None
    shared, interrupt = torch.tensor([number], device="cpu"), None
    options = dist.BroadcastOptions()
    options.timeout = _UNLIMITED
    with explaining_failures(job, doing):
        work = job.channel.group.broadcast([shared], options)
        began = asked = time.monotonic()
        while not work.is_completed():
            try:
                now = time.monotonic()
                time.sleep(min(_NAP * (now - began), _MOST_NAP))
                if now - asked > job.timeout:
                    _check_first(job)
                    asked = now
            except Exception:
                hang_up(job.channel.group)
                raise
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
        work.wait()
    return int(shared), interrupt


def _check_first(job: Job) -> None:
    """Raise a RuntimeError unless rank 0 lives, and has not failed."""
    report: Any = job.liveness.ask().reports.get(0)
    if job.rank and (report is None or report.failed is not None):
        raise RuntimeError(f"rank 0 has not answered for {job.timeout:g} seconds")


def gather_whole(job: Job, part: Tensor, sbp: NdSbp) -> Tensor:
    """Return on every rank the whole of a tensor of which each rank has a part, in memory of its own.

    Args:
        job: the ranks.
        part: this rank's part.
        sbp: how the tensor is split, one entry for each mesh dimension.
    """
    whole = part
    for dim, placement in reversed(_splits(job, sbp)):
        whole = _start_along(job, whole, dim, placement)()
    return part.clone() if whole is part else whole


def start_gather(job: Job, part: Tensor, sbp: NdSbp) -> Callable[[], Tensor]:
    """Start :func:`gather_whole`, and return the function that waits for its result.

    All ranks start and end their gathers in the same order. A tensor that is split along several mesh dimensions is
    gathered when it is waited for.
    """
    splits = _splits(job, sbp)
    if len(splits) != 1:
        return lambda: gather_whole(job, part, sbp)
    return _start_along(job, part, *splits[0])


def _splits(job: Job, sbp: NdSbp) -> list[tuple[int, Split]]:
    """Return the mesh dimensions that a tensor is split over, and its dimension."""
    return [
        (dim, placement)
        for dim, (placement, ranks) in enumerate(zip(sbp, job.mesh.shape, strict=True))
        if isinstance(placement, Split) and ranks > 1
    ]


def _start_along(job: Job, part: Tensor, dim: int, placement: Split) -> Callable[[], Tensor]:
    """Start to gather along one mesh dimension as a step does: over gloo by exchanges, copied once within a host."""
    over_gloo = job.groups[dim].name() == "gloo" and part.device.type == "cpu"
    start = collectives.gather_pieces if over_gloo else c10d.all_gather_into_tensor
    with explaining_failures(job, _GATHERING):
        if over_gloo:
            # Finds out which ranks share a host.
            direct.hosts(job)
        pieces = start(part.contiguous().unsqueeze(0), job.mesh.shape[dim], job.mesh.groups[dim])

    def finish() -> Tensor:
        with explaining_failures(job, _GATHERING):
            parts = c10d.wait_tensor(pieces)  # [ranks, *part]
        return parts.flatten(0, 1) if placement.dim == 0 else torch.cat(list(parts), placement.dim)

    return finish


def broadcast_from(job: Job, tensors: Sequence[Tensor], rank: int = 0, what: str = "parameters and buffers") -> None:
    """Overwrite tensors with those of a rank, on every rank.

    Args:
        job: the ranks.
        tensors: equal in shape and dtype on all ranks.
        rank: whose.
        what: what they are, for messages.
    """
    if job.size == 1:
        return
    with explaining_failures(job, f"taking over rank {rank}'s {what}"):
        for tensor in tensors:
            # All backends send bytes, and few every dtype. A group of NCCL alone takes no tensors of the CPU.
            content = bytes_of(tensor)
            group = job.channel.group if content.device.type == "cpu" else job.data
            dist.broadcast(content, group_src=rank, group=group)
            if content.data_ptr() != tensor.data_ptr():
                tensor.copy_(content.view(tensor.dtype).view(tensor.shape))
