"""Read and write offloaded tensors while a step computes: threads over ``preadv`` and ``pwritev``, and operators.

Why no library: kvikio needs CUDA and cuFile; tensornvme (ColossalAI's) and DeepSpeed's DeepNVMe are C++ extensions over
libaio or liburing, built at installation; liburing's bindings need io_uring, which many containers forbid; aiofile and
caio support neither aligned memory nor tensors. A few large requests in flight, from threads that hold no lock in the
kernel, keep a disk as busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from zerograph.errors import OffloadError
from zerograph.ops.definition import implement
from zerograph.ops.offload import FETCH, WAIT_TRANSFER, WRITE_BACK
from zerograph.runtime.offload.buffers import Buffers, whole_blocks
from zerograph.runtime.offload.files import Extent, StateFile, extent_of, renew

# Bytes per request: enough for a disk's full speed, and small enough to split a tensor between the threads.
_REQUEST = 2**22
# Requests in flight.
_THREADS = 4

# Waits until a transfer is complete.
Wait = Callable[[], object]

buffers = Buffers()
_threads: dict[int, ThreadPoolExecutor] = {}


def _workers() -> ThreadPoolExecutor:
    """Return this process's threads; a forked child has none of its parent's."""
    if os.getpid() not in _threads:
        _threads[os.getpid()] = ThreadPoolExecutor(_THREADS, "zerograph-offload")
    return _threads[os.getpid()]


def _start(extent: Extent, memory: Tensor, *, write: bool, offset: int = 0) -> Wait:
    """Start to move all of ``memory``, a uint8 tensor of whole blocks, to or from the extent at ``offset`` bytes.

    Returns:
        A function that waits for the requests in flight, which keep the memory alive. It raises an OffloadError if one
        has failed; none is in flight then either.
    """
    begin = extent.offset + offset
    requests = [
        _workers().submit(_move, extent.file, memory[start : start + _REQUEST], begin + start, write)
        for start in range(0, len(memory), _REQUEST)
    ]

    def wait_for_all() -> None:
        wait(requests)
        for request in requests:
            request.result()

    return wait_for_all


def _move(file: StateFile, memory: Tensor, offset: int, write: bool) -> None:
    """Move one request's bytes between memory and the file at ``offset``."""
    size = len(memory)
    view = memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")
    done = 0
    try:
        while done < size:
            move = os.pwritev if write else os.preadv
            moved = move(file.descriptor, [view[done:]], offset + done)
            if not moved:
                raise file.failed("read", offset + done, None)
            done += moved
        if not file.direct:
            if write:
                # Dirty pages cannot leave the cache.
                os.fdatasync(file.descriptor)
            os.posix_fadvise(file.descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise file.failed("written" if write else "read", offset + done, error) from error


def read(extent: Extent) -> Tensor:
    """Return the extent's tensor, in memory of its own.

    Raises:
        OffloadError: the file cannot be read.
    """
    check([extent.file])
    memory = buffers.take(extent.nbytes)
    _start(extent, memory, write=False)()
    return _as_tensor(memory, extent.shape, extent.dtype).clone()


def read_to_overwrite(extent: Extent, *, whole: bool) -> Tensor:
    """Read the extent's tensor, of which a part or, if ``whole``, all is about to be overwritten.

    Returns:
        The tensor; zeros if all of it will be overwritten and the file is lost.

    Raises:
        OffloadError: the file cannot be read.
    """
    if whole and extent.file.is_lost():
        return torch.zeros(extent.shape, dtype=extent.dtype, device="cpu")
    return read(extent)


def write(extent: Extent, value: Tensor) -> None:
    """Write a tensor of the extent's shape and dtype; into a new file if the extent's own is lost.

    Raises:
        OffloadError: the file cannot be written.
    """
    check([])
    renew(extent)
    memory = buffers.take(extent.nbytes)
    _as_tensor(memory, extent.shape, extent.dtype).copy_(value)
    _start(extent, memory, write=True)()


def fill(extent: Extent, value: float, *, fast: bool = False) -> None:
    """Fill the extent with a constant, using the memory of one request only.

    Args:
        extent: the extent.
        value: the constant.
        fast: do not write zeros over the zeros of a new file.

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
        _start(extent, memory[: count - start], write=True, offset=start)()


def check(files: Iterable[StateFile]) -> None:
    """Wait for the transfers in flight, then check the files. To be called before a step, and before files are read.

    Raises:
        OffloadError: a file was deleted or truncated, or a transfer of it has failed.
    """
    # A step that raised may have left transfers. If one failed, its file is marked as broken.
    for key in list(_in_flight):
        with contextlib.suppress(OffloadError):
            _in_flight.pop(key)()
    for file in files:
        file.check()


# Waits for a transfer in flight, by the address of a running step's tensor.
_in_flight: dict[int, Wait] = {}


def note_transfer(value: Tensor, transfer: Wait) -> None:
    """Let ``wait_transfer(value)`` wait for the transfer."""
    if value.numel():
        _in_flight[value.data_ptr()] = transfer


def _wait_transfer(value: Tensor) -> None:
    if value.numel():
        _in_flight.pop(value.data_ptr())()


def _as_tensor(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return memory.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _fetch(handle: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    extent = extent_of(handle)
    memory = buffers.take(extent.nbytes)
    note_transfer(memory, _start(extent, memory, write=False))
    return _as_tensor(memory, size, dtype)


def _write_back(handle: Tensor, value: Tensor) -> None:
    extent = extent_of(handle)
    # The buffer that ``fetch`` took has whole blocks; the tensor in it may be shorter.
    memory = value.view(-1).view(torch.uint8).as_strided((whole_blocks(extent.nbytes),), (1,))
    note_transfer(value, _start(extent, memory, write=True))


implement(FETCH, _fetch)
implement(WRITE_BACK, _write_back)
implement(WAIT_TRANSFER, _wait_transfer)
