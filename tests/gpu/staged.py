"""A process group for several ranks on one device: each collective goes through the CPU and gloo.

For numbers, not for times. NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

NAME = "staged"


class Staged(dist.ProcessGroup):
    """Gloo's collectives on copies in the CPU's memory."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, ranks)
        self._rank, self._ranks, self._store = rank, ranks, store
        self._gloo = dist.ProcessGroupGloo(store, rank, ranks, timeout)

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def pg_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run(lambda: self._gloo.barrier().wait(), ())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = opts.rootRank if opts is not None else 0

        def send() -> None:
            for tensor in tensors:
                copy = _on_cpu(tensor)
                self._gloo.broadcast([copy], options).wait()
                tensor.copy_(copy)

        return self._run(send, tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def reduce() -> None:
            for tensor in tensors:
                tensor.copy_(self._reduced(tensor, opts))

        return self._run(reduce, tensors)

    allreduce_coalesced = allreduce

    def allgather(self, wholes: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def gather() -> None:
            for whole, part in zip(wholes, parts, strict=True):
                for place, piece in zip(whole, self._gathered(part), strict=True):
                    place.copy_(piece)

        return self._run(gather, parts)

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([whole], [part])

    def all_gather_single_coalesced(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def gather() -> None:
            for whole, part in zip(wholes, parts, strict=True):
                whole.copy_(torch.cat([piece.flatten() for piece in self._gathered(part)]).view(whole.shape))

        return self._run(gather, [*wholes, *parts])

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([part], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, parts: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def reduce() -> None:
            for part, whole in zip(parts, wholes, strict=True):
                part.copy_(self._reduced(whole, opts).reshape(self._ranks, -1)[self._rank].view(part.shape))

        return self._run(reduce, [*parts, *wholes])

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        def exchange() -> None:
            own = list(input_sizes or [len(tensor) // self._ranks] * self._ranks)
            sizes = self._gathered(torch.tensor(own))
            # Gloo gathers equal shapes.
            padded = torch.zeros(max(int(each.sum()) for each in sizes), *tensor.shape[1:], dtype=tensor.dtype)
            padded[: len(tensor)] = _on_cpu(tensor)
            pieces = []
            for rows, sent in zip(self._gathered(padded), sizes, strict=True):
                begin = int(sent[: self._rank].sum())
                pieces.append(rows[begin : begin + int(sent[self._rank])])
            output.copy_(torch.cat(pieces).view(output.shape))

        return self._run(exchange, [output, tensor])

    # As torch before 2.13 calls them.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _gathered(self, part: Tensor) -> list[Tensor]:
        copy = _on_cpu(part)
        pieces = [torch.empty_like(copy) for _ in range(self._ranks)]
        self._gloo.allgather([pieces], [copy]).wait()
        return pieces

    def _reduced(self, tensor: Tensor, opts: Any) -> Tensor:
        """Return the reduction over the ranks; gloo has no mean."""
        copy = _on_cpu(tensor)
        options = dist.AllreduceOptions()
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if opts is None or mean else opts.reduceOp
        self._gloo.allreduce([copy], options).wait()
        return copy / self._ranks if mean else copy

    def _run(self, collective: Callable[[], object], tensors: Sequence[Tensor]) -> dist.Work:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device] if device else None)
        # As a real group's kernels: autograd neither records them nor sees that they write.
        with torch._C._AutoDispatchBelowAutograd():
            collective()
        future.set_result(list(tensors))
        return _create_work_from_future(future)


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _create(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> Staged:
    return Staged(store, rank, ranks, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
