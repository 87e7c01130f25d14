"""Reading and writing behind the step: a few threads over ``preadv`` and ``pwritev``, and the operators that use them.

Libraries that were looked at first: kvikio needs CUDA and cuFile; tensornvme (ColossalAI's) and DeepSpeed's DeepNVMe
are C++ extensions over libaio or liburing, built when they are installed; liburing's bindings need io_uring, which many
containers forbid; aiofile and caio know neither aligned memory nor tensors. A few large requests in flight, from
threads that hold no lock while the kernel works, keep a disk as busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zerograph.errors import OffloadError
from zerograph.ir import offload_operators
from zerograph.runtime.offload.buffers import Buffers, whole_blocks
from zerograph.runtime.offload.files import Extent, StateFile, extent_of, renew

# Bytes of one request: large enough for a disk's full speed, and small enough to split a tensor between the threads.
_REQUEST = 2**22
# Requests that are with the kernel at once.
_THREADS = 4

buffers = Buffers()
_threads: dict[int, ThreadPoolExecutor] = {}


def _workers() -> ThreadPoolExecutor:
    """This process's; a forked child has none of its parent's threads."""
    if os.getpid() not in _threads:
        _threads[os.getpid()] = ThreadPoolExecutor(_THREADS, "zerograph-offload")
    return _threads[os.getpid()]


@dataclass(frozen=True, eq=False)
class _Transfer:
    """Requests under way between a tensor's memory, which they keep alive, and its place in a file."""

    requests: Sequence[Future[None]]

    def wait(self) -> None:
        """Until all are done.

        Raises:
            OffloadError: one failed; none is under way then, either.
        """
        wait(self.requests)
        for request in self.requests:
            request.result()


def _start(extent: Extent, memory: Tensor, *, write: bool, offset: int = 0) -> _Transfer:
    """Move whole blocks between ``memory``, bytes, all of it, and the extent from ``offset`` on."""
    begin = extent.offset + offset
    return _Transfer(
        [
            _workers().submit(_move, extent.file, memory[start : start + _REQUEST], begin + start, write)
            for start in range(0, len(memory), _REQUEST)
        ]
    )


def _move(file: StateFile, memory: Tensor, offset: int, write: bool) -> None:
    size = len(memory)
    piece = memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")
    done = 0
    try:
        while done < size:
            move = os.pwritev if write else os.preadv
            moved = move(file.descriptor, [piece[done:]], offset + done)
            if not moved:
                raise file.failed("read", offset + done, None)
            done += moved
        if not file.direct:
            if write:
                # What is not on the disk yet cannot leave the cache.
                os.fdatasync(file.descriptor)
            os.posix_fadvise(file.descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise file.failed("written" if write else "read", offset + done, error) from error


def read(extent: Extent) -> Tensor:
    """The tensor that rests there, in memory of its own.

    Raises:
        OffloadError: the file cannot be read.
    """
    check([extent.file])
    memory = buffers.take(extent.nbytes)
    _start(extent, memory, write=False).wait()
    return _as_tensor(memory, extent.shape, extent.dtype).clone()


def read_to_overwrite(extent: Extent, *, whole: bool) -> Tensor:
    """Read the tensor that rests there. Where its file is lost and the ``whole`` of it is written next: zeros.

    Raises:
        OffloadError: the file cannot be read.
    """
    if whole and extent.file.is_lost():
        return torch.zeros(extent.shape, dtype=extent.dtype, device="cpu")
    return read(extent)


def write(extent: Extent, value: Tensor) -> None:
    """Let the tensor, of the extent's shape and dtype, rest there; in a new file if that one is lost.

    Raises:
        OffloadError: the file cannot be written.
    """
    check([])
    renew(extent)
    memory = buffers.take(extent.nbytes)
    _as_tensor(memory, extent.shape, extent.dtype).copy_(value)
    _start(extent, memory, write=True).wait()


def fill(extent: Extent, value: float, *, fast: bool = False) -> None:
    """Let a constant rest there, in memory for one request only; ``fast``: a new file's zeros need not be written.

    Raises:
        OffloadError: the file cannot be written.
    """
    check([])
    renew(extent)
    if fast and extent.zero and not value and math.copysign(1.0, value) > 0:
        return
    count = whole_blocks(extent.nbytes)
    memory = buffers.take(min(count, _REQUEST))
    memory.view(extent.dtype).fill_(value)
    for start in range(0, count, _REQUEST):
        _start(extent, memory[: count - start], write=True, offset=start).wait()


def check(files: Iterable[StateFile]) -> None:
    """What must hold before a step begins, or anybody looks at the files: nothing is under way, and they are whole.

    Raises:
        OffloadError: a file was deleted or truncated, or a transfer of it has failed.
    """
    # A step that raised may have left some. What became of it its file knows.
    for key in list(_under_way):
        with contextlib.suppress(OffloadError):
            _under_way.pop(key).wait()
    for file in files:
        file.check()


class UnderWay(Protocol):
    """What ``wait_transfer`` waits for."""

    def wait(self) -> None: ...


# By where the memory of a running step's tensor begins.
_under_way: dict[int, UnderWay] = {}


def note(value: Tensor, transfer: UnderWay) -> None:
    """``wait_transfer(value)`` will wait for the transfer."""
    if value.numel():
        _under_way[value.data_ptr()] = transfer


def _wait_transfer(value: Tensor) -> None:
    if value.numel():
        _under_way.pop(value.data_ptr()).wait()


def _as_tensor(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return memory.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _fetch(handle: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    extent = extent_of(handle)
    memory = buffers.take(extent.nbytes)
    note(memory, _start(extent, memory, write=False))
    return _as_tensor(memory, size, dtype)


def _write_back(handle: Tensor, value: Tensor) -> None:
    extent = extent_of(handle)
    # The buffer that ``fetch`` took: it has whole blocks, the tensor in it perhaps not.
    memory = value.view(-1).view(torch.uint8).as_strided((whole_blocks(extent.nbytes),), (1,))
    note(value, _start(extent, memory, write=True))


for _name, _run in (("fetch", _fetch), ("write_back", _write_back), ("wait_transfer", _wait_transfer)):
    offload_operators.library.impl(_name, _run, "CompositeExplicitAutograd")
