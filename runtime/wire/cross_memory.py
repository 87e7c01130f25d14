"""One process reads and writes another's memory: Linux's cross memory attach (process_vm_readv(2)).

The two must be of one user, and kernel and container must allow it: who wants to know tries.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

# One call moves less than two GiB.
_PIECE = 2**30

_bytes_read = 0


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read(pid: int, address: int, into: int, count: int) -> None:
    """Copy so many bytes from an address in another process to one in this.

    Raises:
        RuntimeError: they cannot be read.
    """
    for begin in range(0, count, _PIECE):
        piece = min(_PIECE, count - begin)
        near, far = _Extent(into + begin, piece), _Extent(address + begin, piece)
        moved = _calls()[0](pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
        _check(moved, piece, pid, "read")
    count_read(count)


def bytes_read() -> int:
    """Return the number of bytes that this process has got so far from the memory of others."""
    return _bytes_read


def count_read(count: int) -> None:
    """Count bytes that another process wrote into this one's memory and that have been used."""
    global _bytes_read
    _bytes_read += count


def write(pid: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Copy pieces to another process in one call; who sees a later piece there sees the earlier ones too.

    Args:
        pieces: for each the address there, the address here, and the number of bytes.

    Raises:
        RuntimeError: they cannot be written.
    """
    near = (_Extent * len(pieces))(*(_Extent(here, count) for _, here, count in pieces))
    far = (_Extent * len(pieces))(*(_Extent(there, count) for there, _, count in pieces))
    moved = _calls()[1](pid, near, len(pieces), far, len(pieces), 0)
    _check(moved, sum(count for _, _, count in pieces), pid, "written")


def _check(moved: int, count: int, pid: int, done: str) -> None:
    if moved != count:
        reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {count} bytes"
        raise RuntimeError(f"the memory of process {pid} cannot be {done}: {reason}")


@functools.cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]]:
    """The C library's process_vm_readv and process_vm_writev."""
    library = ctypes.CDLL(None, use_errno=True)
    number, extent = ctypes.c_ulong, ctypes.POINTER(_Extent)
    for call in (library.process_vm_readv, library.process_vm_writev):
        call.argtypes = (ctypes.c_int, extent, number, extent, number, number)
        call.restype = ctypes.c_ssize_t
    return library.process_vm_readv, library.process_vm_writev
