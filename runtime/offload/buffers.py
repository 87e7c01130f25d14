"""Memory that direct I/O can use: whole pages, kept for the next transfer as long as some of it is in use."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import torch
from torch import Tensor

# Direct I/O moves whole blocks from and to where one begins: a page is a multiple of every disk's block.
BLOCK = mmap.PAGESIZE

# A free buffer serves for what needs this part of it or more: buckets are of nearly equal size.
_LEAST_USED = 3 / 4


def whole_blocks(count: int) -> int:
    """``count`` bytes in whole blocks, one at least."""
    return max(-(-count // BLOCK), 1) * BLOCK


class Buffers:
    """Lends memory; what comes back is lent again. When all has come back, all is given back to the system.

    So a step has its pages made (and zeroed by the kernel) for a few buckets, not for all, and between steps there are
    none.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lent = 0
        # A tensor may die while another thread holds the lock, and in this one too, within an allocation.
        self._lock = threading.RLock()

    def take(self, count: int) -> Tensor:
        """A tensor of ``count`` bytes in whole blocks, of undefined values; its memory comes back when it dies."""
        size = whole_blocks(count)
        with self._lock:
            fitting = [one for one in self._free if size <= len(one) and len(one) * _LEAST_USED <= size]
            if fitting:
                memory = min(fitting, key=len)
                self._free.remove(memory)
            else:
                # Of other sizes than are needed now: a step goes through its buckets in order.
                self._free.clear()
                memory = mmap.mmap(-1, size)
            self._lent += 1
        # Of the tensor's storage this object alone holds on to the memory: its death is the storage's.
        lent = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(lent, self._come_back, memory).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)

    def _come_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._lent -= 1
            self._free.append(memory)
            if not self._lent:
                self._free.clear()
