"""Process groups and collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Gather shards into ``whole``, one after the other: torch 2.13 renamed the function and warns of the old name.

    Args:
        whole: receives the shards [ranks * numel].
        shard: this rank's part [numel].
        async_op: return a ``Work`` to wait for.
    """
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(whole, shard, group=group, async_op=async_op)


def lazy_nccl(backend: str, timeout: timedelta | None = None, device: int | None = None) -> dict[str, Any]:
    """Return arguments for a new group, with which NCCL connects at the first collective, as before torch 2.15.

    By default it connects when the group is created, on the GPU of LOCAL_RANK. Ranks that train on CPUs may outnumber
    GPUs, and NCCL refuses two ranks on one GPU. The option is not in torch's documentation.

    Args:
        backend: of the group, such as ``"cpu:gloo,cuda:nccl"``.
        timeout: of the group; None: torch's.
        device: index of the GPU, for the default group; None: torch's choice.
    """
    # With this variable "nccl" is the implementation of older versions.
    if "nccl" not in backend or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return {}
    # Missing in builds without CUDA.
    options: Any = dist.ProcessGroupNCCL.Options() if hasattr(dist, "ProcessGroupNCCL") else None
    if not hasattr(options, "lazy_init"):
        return {}
    options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout
    place = {} if device is None else {"device_id": torch.device("cuda", device)}
    return {"pg_options": options, **place}


def replaced_object_collectives(refuse: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace the function that every collective of Python objects calls first: their own names may be imported."""
    return patch.object(distributed_c10d, "_object_to_tensor", refuse)


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group that a graph's operators refer to by name, as torch's own collectives look it up."""
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


class _Works(dist.Work):
    """Works for one tensor, in order."""

    def __init__(self, tensor: Tensor, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self.tensor, self.works = tensor, works

    def wait(self, timeout: object = None) -> bool:
        _awaited.pop(self, None)
        for work in self.works:
            work.wait()
        return True


# Linux's state of a connection that the other side has not answered.
_SYN_SENT = 2
# Those that nothing has waited for, in the order in which they began.
_awaited: dict[_Works, None] = {}


def register_works(tensor: Tensor, works: Sequence[dist.Work]) -> None:
    """Make ``_c10d_functional.wait_tensor(tensor)`` wait for ``works``, in order; the public API is C++ only."""
    _awaited[registered := _Works(tensor, works)] = None
    torch._C._distributed_c10d._register_work(tensor, registered)


def end_works(*, drops: bool = False) -> None:
    """Wait for the works that a step has broken off before it waited for them: torch would keep what they hold.

    Args:
        drops: drop them instead. Else all ranks have broken off at one place.
    """
    for works in _awaited if drops else ():
        works.works = ()
    for works in [*_awaited]:
        # Takes all that are registered for the tensor out of torch's registry.
        torch.ops._c10d_functional.wait_tensor(works.tensor)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives from now on: torch has no public way for a group that has connected."""
    set_of_group: Callable[[timedelta, dist.ProcessGroup], None] = vars(distributed_c10d)["_set_pg_timeout"]
    set_of_group(timeout, group)


def end_connecting(one: socket.socket, size: int) -> None:
    """End what gloo waits for at a socket while it connects a group: nothing else does in this process.

    Where it listens for ranks that do not connect, connections end that, which are closed at once. One that it makes
    itself to a rank that does not answer gets an error; gloo tries three times more.

    Args:
        one: a socket that has been opened meanwhile.
        size: the number of pairs of ranks. A connection begins with the number of the pair that it is for.
    """
    if one.type != socket.SOCK_STREAM or not one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
        # Gloo sets that, and other clients do not.
        return
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        for number in range(size):
            with contextlib.suppress(OSError), socket.create_connection(one.getsockname()[:2], 1.0) as connection:
                connection.sendall(struct.pack("n", number))
    elif one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT:
        one.shutdown(socket.SHUT_RDWR)


def restart_group_names() -> None:
    """Name the next groups from 0 on: torch goes on counting after a default group that has not connected."""
    vars(distributed_c10d)["_world"].group_count = 0


def single_process_store() -> Any:
    """Return a store without a socket: one process needs no address and no free port (untyped in torch)."""
    return dist.HashStore()  # type: ignore[attr-defined]
