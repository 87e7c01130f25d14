"""Read and write the memory of another process with Linux's cross memory attach (process_vm_readv(2)).

Both processes must belong to one user, and kernel and container must permit it. Only an attempt tells.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

# Bytes per call; the kernel moves less than two GiB.
_CHUNK = 2**30

_bytes_read = 0


class _Iovec(ctypes.Structure):
    """``struct iovec`` of <sys/uio.h>."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read(pid: int, address: int, into: int, count: int) -> None:
    """Copy bytes from another process.

    Args:
        pid: the other process.
        address: the source there.
        into: the address of the destination here.
        count: bytes.

    Raises:
        RuntimeError: the memory cannot be read.
    """
    for begin in range(0, count, _CHUNK):
        chunk = min(_CHUNK, count - begin)
        local, remote = _Iovec(into + begin, chunk), _Iovec(address + begin, chunk)
        moved = _calls()[0](pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        _check(moved, chunk, pid, "read")
    count_read(count)


def bytes_read() -> int:
    """Return how many bytes this process has received through memory so far."""
    return _bytes_read


def count_read(count: int) -> None:
    """Add to :func:`bytes_read` what another process wrote into this one's mailbox."""
    global _bytes_read
    _bytes_read += count


def write(pid: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Copy pieces to another process in one call, in order: a reader that sees one piece sees the earlier ones too.

    Args:
        pid: the other process.
        pieces: (address there, address here, bytes) of each.

    Raises:
        RuntimeError: the memory cannot be written.
    """
    local = (_Iovec * len(pieces))(*(_Iovec(here, count) for _, here, count in pieces))
    remote = (_Iovec * len(pieces))(*(_Iovec(there, count) for there, _, count in pieces))
    moved = _calls()[1](pid, local, len(pieces), remote, len(pieces), 0)
    _check(moved, sum(count for _, _, count in pieces), pid, "written")


def _check(moved: int, count: int, pid: int, done: str) -> None:
    if moved != count:
        reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {count} bytes"
        raise RuntimeError(f"the memory of process {pid} cannot be {done}: {reason}")


@functools.cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return the C library's process_vm_readv and process_vm_writev."""
    library = ctypes.CDLL(None, use_errno=True)
    number, iovec = ctypes.c_ulong, ctypes.POINTER(_Iovec)
    for call in (library.process_vm_readv, library.process_vm_writev):
        call.argtypes = (ctypes.c_int, iovec, number, iovec, number, number)
        call.restype = ctypes.c_ssize_t
    return library.process_vm_readv, library.process_vm_writev
