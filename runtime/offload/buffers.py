"""Memory for direct I/O: whole pages, reused by the next transfer while any of them are in use."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import torch
from torch import Tensor

# Bytes. Direct I/O moves whole blocks at block boundaries; a page is a multiple of every disk's block.
BLOCK = mmap.PAGESIZE

# A free buffer is reused for a request of at least this part of its size: buckets are of nearly equal size.
_MIN_USED = 3 / 4


def whole_blocks(count: int) -> int:
    """Return ``count`` bytes rounded up to whole blocks, at least one."""
    return max(-(-count // BLOCK), 1) * BLOCK


class Buffers:
    """A pool of buffers. Freed buffers are reused; when none is in use, all memory returns to the system.

    The kernel thus creates and zeroes pages for a few buckets per step, not for all. There are none between steps.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._in_use = 0
        # Reentrant: a tensor may be freed in this thread during an allocation here, or in another thread.
        self._lock = threading.RLock()

    def take(self, count: int) -> Tensor:
        """Return an uninitialised 1-D uint8 tensor of ``count`` bytes rounded up to whole blocks.

        Its memory returns to the pool when the tensor's storage is freed.
        """
        size = whole_blocks(count)
        with self._lock:
            fitting = [memory for memory in self._free if size <= len(memory) and len(memory) * _MIN_USED <= size]
            if fitting:
                memory = min(fitting, key=len)
                self._free.remove(memory)
            else:
                # Free buffers of other sizes are not needed soon: a step uses its buckets in order.
                self._free.clear()
                memory = mmap.mmap(-1, size)
            self._in_use += 1
        # The tensor's storage holds the only reference to this object: both are freed together.
        owner = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(owner, self._reclaim, memory).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _reclaim(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._in_use -= 1
            self._free.append(memory)
            if not self._in_use:
                self._free.clear()
