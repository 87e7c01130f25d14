"""The fake process group with a CUDA stream of its own for collectives, as NCCL has: for traces.

torch's own copies on the stream that it is called on, so that nothing could be seen to overlap. On other devices the
two are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

# It begins as torch's does: zerograph asks none of its other ranks for a real answer.
NAME = "fake-streams"


class Streams(dist.ProcessGroup):
    """Rank ``rank`` of ``size`` simulated ones."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._ranks = rank, size
        self._stream: torch.cuda.Stream | None = None

    def size(self) -> int:
        return self._ranks

    @property
    def pg_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run(lambda: None, ())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._run(lambda: None, tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._run(lambda: None, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors)

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([whole], [part])

    def all_gather_single_coalesced(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def copy() -> None:
            for whole, part in zip(wholes, parts, strict=True):
                for piece in whole.chunk(self._ranks):
                    piece.copy_(part)

        return self._run(copy, [*wholes, *parts])

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([part], [whole])

    def reduce_scatter_single_coalesced(
        self, parts: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def copy() -> None:
            for part, whole in zip(parts, wholes, strict=True):
                part.copy_(whole.chunk(self._ranks)[self._rank])

        return self._run(copy, [*parts, *wholes])

    # As torch before 2.13 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _run(self, collective: Callable[[], object], tensors: Sequence[Tensor]) -> dist.Work:
        device = tensors[0].device if tensors else torch.device("cpu")
        on_cuda = device.type == "cuda"
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device] if on_cuda else None)
        with self._aside(device) if on_cuda else contextlib.nullcontext():
            # As a real group's kernels: autograd neither records them nor sees that they write.
            with torch._C._AutoDispatchBelowAutograd():
                collective()
            # Notes where the stream stands, for waiting streams; holds the tensors until then.
            future.set_result(list(tensors))
        return _create_work_from_future(future)

    def _aside(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Streams:
    return Streams(rank, size)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
