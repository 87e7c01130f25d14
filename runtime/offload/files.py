"""A file in which a rank keeps what does not rest in memory, and the parts of it that one tensor each rests in.

All space is asked for before a step needs it, so that no disk fills up in the middle of training. Reads and writes go
past the page cache (``O_DIRECT``), which would only hold a second copy of what was moved to disk to be out of memory.
Where a file system refuses that, they go through the cache and are advised out of it at once; on one that lives in
memory, like tmpfs, they stay there whatever is advised.
"""

from __future__ import annotations

import errno
import os
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
    "anew and load it there."
)


@dataclass(eq=False)
class StateFile:
    """One open file: parts of it are taken and come back; the file goes when this object does.

    Attributes:
        direct: reads and writes go past the page cache.
        broken: why what the file holds is not to be trusted any more; empty while it is.
        rank, keep: as :func:`open_file` was given them.
    """

    path: Path
    descriptor: int
    direct: bool
    broken: str = ""
    rank: int = 0
    keep: bool = False
    _size: int = 0
    # (offset, size) of what was taken and came back, in order.
    _free: list[tuple[int, int]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, size: int) -> tuple[int, bool]:
        """Offset of ``size`` bytes, whole blocks, that are this file's from now on, and whether they are all zero.

        Raises:
            OffloadError: the disk has not as much left.
        """
        with self._lock:
            for index, (offset, there) in enumerate(self._free):
                if size <= there:
                    self._free[index : index + 1] = [(offset + size, there - size)] if size < there else []
                    return offset, False
            self._grow(size)
            self._size += size
            return self._size - size, True

    def give_back(self, offset: int, size: int) -> None:
        """What was taken is free again."""
        with self._lock:
            joined: list[tuple[int, int]] = []
            for start, length in sorted([*self._free, (offset, size)]):
                if joined and sum(joined[-1]) == start:
                    joined[-1] = joined[-1][0], joined[-1][1] + length
                else:
                    joined.append((start, length))
            self._free = joined

    def _grow(self, size: int) -> None:
        space = os.fstatvfs(self.descriptor)
        try:
            # posix_fallocate alone would fill the disk before it says so.
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
        """Raise if the file is no longer what was written.

        Raises:
            OffloadError: it was deleted or truncated, or reading or writing has failed.
        """
        if self.is_lost():
            raise OffloadError(f"{self.path} {self.broken}: the state that rested in it is lost\n{_ADVICE}")

    def is_lost(self) -> bool:
        """Return whether the file is no longer what was written; ``broken`` says why."""
        found = os.fstat(self.descriptor)
        if not self.broken and not found.st_nlink:
            self.broken = "was deleted"
        if not self.broken and found.st_size < self._size:
            self.broken = f"was truncated to {found.st_size:,} of {self._size:,} bytes"
        return bool(self.broken)

    def failed(self, doing: str, offset: int, error: OSError | None) -> OffloadError:
        """The error of a transfer that did not work; from now on ``check`` raises."""
        why = "the file ends there: it was truncated" if error is None else error.strerror
        self.broken = f"could not be {doing} at byte {offset:,} ({why})"
        return OffloadError(f"{self.path} {self.broken}\n{_ADVICE}")


# By folder, rank and whether they are kept: graphs of one process share a file.
_files: weakref.WeakValueDictionary[tuple[str, int, bool], StateFile] = weakref.WeakValueDictionary()


def open_file(folder: str, rank: int, *, keep: bool) -> StateFile:
    """This rank's file in ``folder``, made if this process has none there; removed at exit, or with its last part.

    Args:
        keep: do not remove it.

    Raises:
        OffloadError: there is no such directory, or no file can be made in it.
    """
    key = os.path.realpath(folder), rank, keep
    file = _files.get(key)
    if file is None or file.broken:
        _files[key] = file = _made(Path(folder), rank, keep)
    return file


def _made(folder: Path, rank: int, keep: bool) -> StateFile:
    if not folder.is_dir():
        raise OffloadError(
            f"nvme_path {str(folder)!r} is no directory\nMake it on every machine, on a disk that is fast."
        )
    path = folder / f"zerograph-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}-rank{rank}.state"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor, direct = _opened(path, flags)
    except OSError as error:
        raise OffloadError(
            f"{path} cannot be made: {error.strerror}\nGive a directory that can be written to as nvme_path."
        ) from error
    file = StateFile(path, descriptor, direct, rank=rank, keep=keep)
    weakref.finalize(file, _close, descriptor, None if keep else path, os.getpid())
    return file


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    if _direct:
        try:
            return os.open(path, flags | _direct, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Refused only after it was made.
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


def _close(descriptor: int, path: Path | None, process: int) -> None:
    # A forked child's copy goes without taking the file along.
    if os.getpid() == process:
        os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)


@dataclass(eq=False)
class Extent:
    """The part of a file that one tensor rests in; it comes back to the file when this object dies.

    Only :func:`renew` changes one.

    Attributes:
        handle: 0-d int64 tensor by which a graph names it.
        zero: its bytes were zero when it was taken.
    """

    file: StateFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: bool
    handle: Tensor

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# By the number in their handle.
_extents: weakref.WeakValueDictionary[int, Extent] = weakref.WeakValueDictionary()


def reserve(file: StateFile, shape: Sequence[int], dtype: torch.dtype) -> Extent:
    """Room for a tensor in the file.

    Raises:
        OffloadError: the disk has not as much left.
    """
    number = next(_numbers)
    size = whole_blocks(torch.Size(shape).numel() * dtype.itemsize)
    offset, zero = file.take(size)
    found = Extent(file, offset, tuple(shape), dtype, zero, torch.tensor(number))
    _extents[number] = found
    # At exit the file goes whole.
    weakref.finalize(found, file.give_back, offset, size).atexit = False
    return found


def renew(extent: Extent) -> None:
    """Move the extent to a new file if its own is lost. What it holds then is undefined: all of it must be written.

    Raises:
        OffloadError: there is no such directory any more, or the disk has not as much left.
    """
    if not extent.file.is_lost():
        return
    file = open_file(str(extent.file.path.parent), extent.file.rank, keep=extent.file.keep)
    size = whole_blocks(extent.nbytes)
    extent.offset, extent.zero = file.take(size)
    extent.file = file
    weakref.finalize(extent, file.give_back, extent.offset, size).atexit = False


def extent_of(handle: Tensor) -> Extent:
    """The part of a file that a graph's handle names."""
    return _extents[int(handle)]
