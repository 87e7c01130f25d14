"""Folders of object stores and other remote file systems, through ``fsspec``, as far as checkpoints need ``pathlib``.

An object store writes an object as a whole or not at all, and lists it once it is written. It cannot rename, append or
lock. So what replaces a file is one upload, and a lock is an object that only one process can create.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerograph.base import cache
from zerograph.errors import CheckpointError

# Protocols of fsspec whose files others can see half written.
_NOT_ATOMIC = ("arrow_hdfs", "dbfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav", "webhdfs")
# Protocols that open another file system or a file: what they write is elsewhere, or nowhere.
_NO_FOLDERS = (
    "zip",
    "blockcache",
    "cached",
    "data",
    "dir",
    "filecache",
    "libarchive",
    "reference",
    "simplecache",
    "tar",
)
# Entries of ``info()`` that change whenever an object is replaced.
_VERSIONS = ("ETag", "etag", "generation", "content_md5")


@dataclass(frozen=True)
class RemotePath:
    """A file or folder at a URL. Every error of the file system is an ``OSError`` with ``strerror``.

    Attributes:
        scheme: protocol of the URL, for messages.
        path: the URL without its protocol.
        system: the ``fsspec`` file system.
    """

    scheme: str
    path: str
    system: Any

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path.lstrip('/')}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, f"{self.path.rstrip('/')}/{name}", self.system)

    def joinpath(self, *names: str) -> RemotePath:
        """Return the path of these names below this folder."""
        return self / "/".join(names) if names else self

    @property
    def name(self) -> str:
        """Return the last component."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Return the folder that the file or folder is in."""
        return RemotePath(self.scheme, self.path.rstrip("/").rpartition("/")[0], self.system)

    def absolute(self) -> RemotePath:
        """Return the path: it is absolute."""
        return self

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists if an object is in it."""

    def rmdir(self) -> None:
        """Do nothing: an empty folder does not exist."""

    def stat(self) -> os.stat_result:
        """Return kind, size, and as ``st_ino`` a number that differs whenever the file is replaced."""
        with _as_os_errors(self):
            info = self.system.info(self.path)
        is_file = info["type"] != "directory"
        version = next((info[key] for key in _VERSIONS if info.get(key)), uuid.uuid4().hex) if is_file else ""
        mode, size = (stat.S_IFREG, int(info["size"])) if is_file else (stat.S_IFDIR, 0)
        return os.stat_result((mode, hash(version), 0, 1, 0, 0, size, 0, 0, 0))

    def exists(self) -> bool:
        """Return whether there is a file or folder."""
        return self._kind() != 0

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return self._kind() == stat.S_IFREG

    def is_dir(self) -> bool:
        """Return whether there is a folder with an object in it."""
        return self._kind() == stat.S_IFDIR

    def _kind(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file and folder in the folder, by name; {} if there is no folder."""
        try:
            with _as_os_errors(self):
                entries = self.system.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names = {entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in entries}
        # Some stores list an object for the folder itself.
        names.pop(self.name if "" in names else "", None)
        return names

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders in the folder."""
        for name in sorted(self.sizes()):
            yield self / name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files and folders in the folder whose name matches the pattern."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the file's bytes, or those from ``start`` to ``end``."""
        with _as_os_errors(self):
            content: bytes = self.system.cat_file(self.path, start=start, end=end)
        return content

    def write_bytes(self, content: bytes) -> None:
        """Write the file as a whole, in place of one that is there."""
        with _as_os_errors(self):
            self.system.pipe_file(self.path, content)

    def create(self, content: bytes) -> None:
        """Write the file unless it exists, in one operation.

        Raises:
            FileExistsError: it exists.
            NotImplementedError: the file system has no such operation.
        """
        with _as_os_errors(self):
            self.system.pipe_file(self.path, content, mode="create")

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        with contextlib.suppress(*((FileNotFoundError,) if missing_ok else ())), _as_os_errors(self):
            self.system.rm_file(self.path)

    def remove_tree(self) -> None:
        """Remove the folder and all in it."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors(self):
            self.system.rm(self.path, recursive=True)


Folder = Path | RemotePath


def read(path: Folder) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    return path.read_bytes() if isinstance(path, RemotePath) else cache.read(path)


@contextlib.contextmanager
def _as_os_errors(path: RemotePath) -> Iterator[None]:
    """Raise every error inside as an ``OSError`` that has a ``strerror``."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        code = next(number for kind, number in _CODES.items() if isinstance(error, kind))
        raise type(error)(code, os.strerror(code), str(path)) from error
    except NotImplementedError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}".removesuffix(": "), str(path)) from error


_CODES: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}


def folder_of(path: object) -> Folder:
    """Return the user's path or URL of a checkpoint.

    Raises:
        CheckpointError: it is neither, or no checkpoint can be at such a URL.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{path!r:.60} is not a path of a checkpoint: give the path of a folder, or a URL")
    if wrong := re.match(r"([a-z][a-z0-9+]+):/(?!/)(.*)", text):
        raise CheckpointError(f"{text} was a URL before it became a path: give the string '{wrong[1]}://{wrong[2]}'")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+._-]*)(?:::.*)?://", text)
    if scheme is None:
        return Path(text)
    return _remote(text, scheme[1].lower())


def _remote(url: str, scheme: str) -> Folder:
    import fsspec

    if "::" in url:
        raise CheckpointError(f"{url} is a chain of URLs: give that of the folder alone")
    if scheme in _NO_FOLDERS:
        raise CheckpointError(f"{url} cannot hold a checkpoint: {scheme} opens other files\nGive the URL of a folder.")
    if scheme in _NOT_ATOMIC:
        raise CheckpointError(
            f"{url} cannot hold a checkpoint: over {scheme} others can see files that are half written\n"
            "Mount it as a folder, or give the URL of an object store."
        )
    try:
        # Other ranks write into the folder: a listing from before would lack their files.
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except Exception as error:
        # Each file system has errors of its own for a bad URL, settings and credentials that are missing.
        raise CheckpointError(f"{url} cannot be opened: {str(error) or type(error).__name__}") from error
    if "file" in ((system.protocol,) if isinstance(system.protocol, str) else system.protocol):
        return Path(path)
    if not path.strip("/"):
        raise CheckpointError(f"{url} names no folder: give the URL of a folder, such as {scheme}://bucket/run")
    return RemotePath(scheme, path.rstrip("/"), system)
