"""Exchange tensors between the ranks of a job outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch
from zerograph.ir.sbp import NdSbp, Split
from zerograph.runtime.job.process_group import Job, explaining_failures


def broadcast_number(job: Job, number: int) -> int:
    """Return rank 0's 64-bit number on every rank."""
    if job.size == 1:
        return number
    shared = torch.tensor([number], device="cpu")
    with explaining_failures(job, "taking over rank 0's seed"):
        dist.broadcast(shared, group_src=0, group=job.control)
    return int(shared)


def broadcast_small(job: Job, tensors: Sequence[Tensor], name: str) -> None:
    """Overwrite small CPU tensors with rank 0's, on every rank.

    Args:
        job: the ranks.
        tensors: equal in shape and dtype on all ranks.
        name: what they are, for messages.
    """
    if job.size == 1:
        return
    with explaining_failures(job, f"taking over rank 0's {name}"):
        for tensor in tensors:
            dist.broadcast(tensor, group_src=0, group=job.control)


def gather_whole(job: Job, part: Tensor, sbp: NdSbp) -> Tensor:
    """Return on every rank the whole of a tensor of which each rank has a part, in memory of its own.

    Args:
        job: the ranks.
        part: this rank's part.
        sbp: how the tensor is split, one entry for each mesh dimension.
    """
    whole = part
    for dim in reversed(range(job.mesh.dims)):
        placement, ranks = sbp[dim], job.mesh.shape[dim]
        if isinstance(placement, Split) and ranks > 1:
            parts = torch.empty((ranks, *whole.shape), dtype=part.dtype, device=part.device)
            with explaining_failures(job, "gathering state outside a step"):
                _torch.all_gather(parts.view(-1), whole.contiguous().view(-1), job.groups[dim])
            whole = parts.flatten(0, 1) if placement.dim == 0 else torch.cat(list(parts), placement.dim)
    return part.clone() if whole is part else whole


def start_gather(job: Job, part: Tensor, sbp: NdSbp) -> Callable[[], Tensor]:
    """Start :func:`gather_whole`, and return the function that waits for its result.

    Over gloo no other gather may start before that.
    """
    split = [
        dim
        for dim, (placement, ranks) in enumerate(zip(sbp, job.mesh.shape, strict=True))
        if isinstance(placement, Split) and ranks > 1
    ]
    if len(split) != 1 or sbp[split[0]] != Split(0):
        return lambda: gather_whole(job, part, sbp)
    ranks, shard = job.mesh.shape[split[0]], part.contiguous()
    whole = torch.empty((ranks * shard.shape[0], *shard.shape[1:]), dtype=part.dtype, device=part.device)
    with explaining_failures(job, "gathering state outside a step"):
        work = _torch.all_gather(whole.view(-1), shard.view(-1), job.groups[split[0]], async_op=True)

    def finish() -> Tensor:
        with explaining_failures(job, "gathering state outside a step"):
            work.wait()
        # The shard must live as long as the collective.
        assert shard.numel() * ranks == whole.numel()
        return whole

    return finish


def broadcast_from_first(job: Job, tensors: list[Tensor]) -> None:
    """Overwrite tensors with rank 0's, on every rank."""
    if job.size == 1:
        return
    with explaining_failures(job, "taking over rank 0's parameters and buffers"):
        for tensor in tensors:
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, group_src=0, group=job.data)
            if contiguous is not tensor:
                tensor.copy_(contiguous)
