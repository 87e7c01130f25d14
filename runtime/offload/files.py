"""A file of offloaded tensors per rank, and its extents, which hold one tensor each.

All space is allocated before a step needs it, so the disk cannot fill up during training. Reads and writes bypass the
page cache (``O_DIRECT``), which would keep a second copy in the memory that offloading is to free. On a file system
without ``O_DIRECT`` they go through the cache, and the kernel is advised to drop the pages at once; a file system in
memory, like tmpfs, keeps them all the same.
"""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from zerograph.errors import OffloadError
from zerograph.runtime.offload.buffers import whole_blocks

_numbers = count(1)
_direct = getattr(os, "O_DIRECT", 0)
_ADVICE = (
    "Load the last checkpoint into this graph, with load() or load_state_dict(), or build module, optimizer and graph "
    "again and load it there."
)


@dataclass(eq=False)
class StateFile:
    """An open file, whose space is allocated and freed in extents. The file is closed with this object.

    Attributes:
        path: the file.
        descriptor: its open descriptor.
        direct: reads and writes bypass the page cache.
        broken: why the contents of the file are lost; empty while they are valid.
        rank, keep: the arguments of :func:`open_file`.
    """

    path: Path
    descriptor: int
    direct: bool
    broken: str = ""
    rank: int = 0
    keep: bool = False
    _size: int = 0
    # (offset, size) of free space within the file, by offset.
    _free: list[tuple[int, int]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, size: int) -> tuple[int, bool]:
        """Allocate space in the file.

        Args:
            size: bytes, in whole blocks.

        Returns:
            The offset, and whether the bytes there are all zero.

        Raises:
            OffloadError: the disk is full.
        """
        with self._lock:
            for index, (offset, length) in enumerate(self._free):
                if size <= length:
                    self._free[index : index + 1] = [(offset + size, length - size)] if size < length else []
                    return offset, False
            self._grow(size)
            self._size += size
            return self._size - size, True

    def free(self, offset: int, size: int) -> None:
        """Free space that :meth:`take` allocated."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for start, length in sorted([*self._free, (offset, size)]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = merged[-1][0], merged[-1][1] + length
                else:
                    merged.append((start, length))
            self._free = merged

    def _grow(self, size: int) -> None:
        space = os.fstatvfs(self.descriptor)
        try:
            # posix_fallocate alone would fill the disk before it fails.
            if space.f_bavail * space.f_frsize < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.descriptor, self._size, size)
        except OSError as error:
            os.ftruncate(self.descriptor, self._size)
            left = space.f_bavail * space.f_frsize
            raise OffloadError(
                f"{self.path} cannot grow by {size:,} bytes: {error.strerror}, {left:,} bytes are left\n"
                "Free some, or give another directory as nvme_path."
            ) from error

    def check(self) -> None:
        """Raise if the contents of the file are lost.

        Raises:
            OffloadError: it was deleted or truncated, or reading or writing has failed.
        """
        if self.is_lost():
            raise OffloadError(f"{self.path} {self.broken}: the state in it is lost\n{_ADVICE}")

    def is_lost(self) -> bool:
        """Return whether the contents of the file are lost; ``broken`` says why."""
        status = os.fstat(self.descriptor)
        if not self.broken and not status.st_nlink:
            self.broken = "was deleted"
        if not self.broken and status.st_size < self._size:
            self.broken = f"was truncated to {status.st_size:,} of {self._size:,} bytes"
        return bool(self.broken)

    def failed(self, doing: str, offset: int, error: OSError | None) -> OffloadError:
        """Return the error of a failed transfer; from now on :meth:`check` raises.

        Args:
            doing: ``"read"`` or ``"written"``.
            offset: bytes.
            error: None if the file ended there.
        """
        why = "the file ends there: it was truncated" if error is None else error.strerror
        self.broken = f"could not be {doing} at byte {offset:,} ({why})"
        return OffloadError(f"{self.path} {self.broken}\n{_ADVICE}")


# By process, folder, rank and ``keep``: the graphs of a process share a file, a forked child has its own.
_files: weakref.WeakValueDictionary[tuple[int, str, int, bool], StateFile] = weakref.WeakValueDictionary()


def open_file(folder: str, rank: int, *, keep: bool) -> StateFile:
    """Return this rank's file in ``folder``; create it if this process has none there.

    The file is removed with its last extent, or at exit.

    Args:
        folder: an existing directory.
        rank: this rank, for the file's name.
        keep: do not remove the file.

    Raises:
        OffloadError: the directory does not exist, or no file can be created in it.
    """
    key = os.getpid(), os.path.realpath(folder), rank, keep
    file = _files.get(key)
    if file is None or file.broken:
        _files[key] = file = _create(Path(folder), rank, keep)
    return file


def _create(folder: Path, rank: int, keep: bool) -> StateFile:
    if not folder.is_dir():
        raise OffloadError(f"nvme_path {str(folder)!r} is no directory\nCreate it on every machine, on a fast disk.")
    # Drawn: jobs in containers have the process numbers of earlier ones, which may have left files.
    path = folder / f"zerograph-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}-rank{rank}.state"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor, direct = _open(path, flags)
    except OSError as error:
        raise OffloadError(
            f"{path} cannot be created: {error.strerror}\nGive a writable directory as nvme_path."
        ) from error
    file = StateFile(path, descriptor, direct, rank=rank, keep=keep)
    # A finalizer's own way of running at exit is lost in processes that Python 3.13 forks.
    atexit.register(weakref.finalize(file, _close, descriptor, None if keep else path, os.getpid()))
    return file


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Open the file, with ``O_DIRECT`` if the file system has it; return the descriptor and whether it does."""
    if _direct:
        try:
            return os.open(path, flags | _direct, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The kernel creates the file before it rejects the flag.
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


def _close(descriptor: int, path: Path | None, process: int) -> None:
    # The copy of a forked child leaves the file alone.
    if os.getpid() == process:
        os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)


@dataclass(eq=False)
class Extent:
    """The space of one tensor in a file, freed with this object. Only :func:`renew` changes it.

    Attributes:
        file: the file.
        offset: bytes from its start.
        shape, dtype: of the tensor.
        zero: its bytes were zero when it was allocated.
        handle: names the extent in a graph.
    """

    file: StateFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: bool
    handle: Tensor  # [], int64

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# By the number in the handle.
_extents: weakref.WeakValueDictionary[int, Extent] = weakref.WeakValueDictionary()


def reserve(file: StateFile, shape: Sequence[int], dtype: torch.dtype) -> Extent:
    """Allocate an extent for a tensor.

    Raises:
        OffloadError: the disk is full.
    """
    number = next(_numbers)
    extent = _extents[number] = Extent(file, 0, tuple(shape), dtype, False, torch.tensor(number))
    _allocate(extent, file)
    return extent


def _allocate(extent: Extent, file: StateFile) -> None:
    size = whole_blocks(extent.nbytes)
    extent.offset, extent.zero = file.take(size)
    extent.file = file
    # At exit the whole file is removed.
    weakref.finalize(extent, file.free, extent.offset, size).atexit = False


def renew(extent: Extent) -> None:
    """Move the extent to a new file if its own is lost. Its contents are then undefined until all of it is written.

    Raises:
        OffloadError: the directory is gone, or the disk is full.
    """
    if not extent.file.is_lost():
        return
    _allocate(extent, open_file(str(extent.file.path.parent), extent.file.rank, keep=extent.file.keep))


def extent_of(handle: Tensor) -> Extent:
    """Return the extent that a graph's handle names."""
    return _extents[int(handle)]
