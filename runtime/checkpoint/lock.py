"""Lock a folder for one save at a time, and say who holds the lock.

The lock is flock(2) on a file in the folder. The kernel ends it with its process, so a killed process leaves nothing to
clear away. (On a file system without locks ``filelock`` uses the existence of a file, which outlives a kill.) The file
holds the identity of the saving process, for the error message of another one.

An object store has no such locks. There the lock is an object that one process creates and removes. One that outlived
its process is taken over, and a process checks that the lock is still its own before it writes the index.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zerograph.base.source import warn_user
from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint.remote import Folder, RemotePath, read

NAME = ".saving.lock"

# Seconds to wait for an owner on another host: a file server may notice late that it has ended.
_REMOTE_TIMEOUT = 10.0
_POLL = 0.05
# Seconds after which the lock of an object store belongs to nobody, if nothing else says that its process has ended.
_STALE = 3600.0
_TIME = "%Y-%m-%d %H:%M:%S %z"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """A process that saves.

    Attributes:
        host: the machine's name.
        boot, namespace: the boot and PID namespace that ``process`` is a number of; empty if unknown.
        process: the process id.
        started: the process's start in clock ticks since boot; -1 if unknown.
        job: the launcher's name of the job; empty if it has none.
        since: when it began to save, as text.
    """

    host: str
    boot: str
    namespace: str
    process: int
    started: int
    job: str
    since: str = ""

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        since = f", since {self.since}" if self.since else ""
        return f"process {self.process} on host {self.host}{job}{since}"

    def same_process(self, other: Owner) -> bool:
        """Return whether both are the same process."""
        return replace(self, job="", since="") == replace(other, job="", since="")

    def alive(self) -> bool | None:
        """Return whether the process is running; None if it is of another host or namespace."""
        here = this_process()
        if not here.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return None
        return _started(self.process) == self.started

    def has_ended(self) -> bool:
        """Return whether the process has ended, its job was restarted as this one, or its lock is an hour old."""
        if (alive := self.alive()) is not None:
            return not alive
        job, own = (owner.job.partition(" (restart ")[0] for owner in (self, this_process()))
        return (job != "" and job == own) or _is_old(self.since)


def _is_old(since: str) -> bool:
    try:
        return time.time() - datetime.strptime(since, _TIME).timestamp() > _STALE
    except ValueError:
        return False


def this_process() -> Owner:
    """Return the identity of this process."""
    return _identity(os.getpid())


@functools.cache
def _identity(process: int) -> Owner:
    launcher, restart = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = launcher if launcher != "none" else ""
    job = (job or os.environ.get("SLURM_JOB_ID", "")) + (f" (restart {restart})" if restart not in ("", "0") else "")
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Owner(platform.node(), boot, namespace, process, _started(process), job.strip())


def _started(process: int) -> int:
    """Return field 22 of /proc/<pid>/stat, -1 if there is no such process."""
    try:
        # The command's name, in parentheses, may have spaces in it.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


def owner_of(value: Any) -> Owner | None:
    """Return the owner of a dict that ``asdict`` created, or None for any other value."""
    kinds = {"host": str, "boot": str, "namespace": str, "process": int, "started": int, "job": str, "since": str}
    if not isinstance(value, Mapping) or value.keys() != kinds.keys():
        return None
    return Owner(**value) if all(type(value[key]) is kind for key, kind in kinds.items()) else None


class FolderLock:
    """A lock that this process holds. The descriptor is None on a file system without locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path, self._descriptor = path, descriptor
        if descriptor is not None:
            _descriptors.add(descriptor)

    def check(self) -> None:
        """Do nothing: nobody takes this lock over."""

    def release(self) -> None:
        """Remove the file and end the lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor not in _descriptors:
            return
        with contextlib.suppress(OSError):
            # Before the lock ends: no other process can have locked this file.
            if _is_at(descriptor, self._path):
                self._path.unlink()
        _descriptors.discard(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()


# Of the locks that this process holds. A forked child closes its copies: they would outlive a kill of this process.
_descriptors: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_close_in_child)


def lock(folder: Folder, timeout: float) -> FolderLock | ObjectLock:
    """Lock the folder for a save.

    Args:
        folder: an existing folder.
        timeout: seconds to wait for another save of this process. A living process of this host is not waited for.

    Raises:
        CheckpointError: another process holds the lock (the message names it), or the file cannot be created.
    """
    path, began = folder / NAME, time.monotonic()
    content = _own_identity() + f" {uuid.uuid4().hex}".encode()
    while True:
        try:
            held = _lock_object(path, content) if isinstance(path, RemotePath) else _lock_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be created: {error.strerror}") from error
        if held is not None:
            return held
        owner = _owner(path)
        is_own = owner is not None and owner.same_process(this_process())
        is_alive = owner is not None and not is_own and owner.alive()
        if is_alive or time.monotonic() - began > (timeout if is_own else _REMOTE_TIMEOUT):
            advice = f"\nIf that one has ended already, remove {path}." if isinstance(path, RemotePath) else ""
            raise CheckpointError(_locked_message(folder, owner) + advice)
        time.sleep(_POLL)


def _lock_file(path: Path) -> FolderLock | None:
    """Return the lock of a folder on disk; None if another save has it."""
    try:
        descriptor = _attempt(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn_user(f"the file system of {path.parent} has no locks ({error.strerror}): let no two jobs save into it")
        return FolderLock(path, None)
    if descriptor is None:
        return None
    held = FolderLock(path, descriptor)
    _write_identity(descriptor)
    return held


def _attempt(path: Path) -> int | None:
    """Return a locked descriptor of the file; None if another save has the lock."""
    # Windows has no such module. It cannot save either: its folders cannot be synced.
    import fcntl

    flags = os.O_CLOEXEC | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags | os.O_RDWR, 0o666)
    except PermissionError:
        # The file of another user's save that was killed.
        descriptor = os.open(path, flags & ~os.O_CREAT | os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous owner may have removed it in between.
        if _is_at(descriptor, path):
            return descriptor
    except (BlockingIOError, PermissionError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write_identity(descriptor: int) -> None:
    """Write this process's identity into the file. On a full disk the lock holds without it."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_identity(), 0)


def _own_identity() -> bytes:
    return json.dumps(asdict(replace(this_process(), since=time.strftime(_TIME)))).encode()


class ObjectLock:
    """A lock of an object store that this process holds: an object with this content."""

    def __init__(self, path: RemotePath, content: bytes) -> None:
        self._path, self._content, self._released = path, content, False

    def check(self) -> None:
        """Check that the lock is still this process's own.

        Raises:
            CheckpointError: another process has taken it over.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        if content != self._content:
            owner = _owner(self._path)
            holder = "another process" if owner is None else str(owner)
            raise CheckpointError(f"another job saves into {self._path.parent} now, and took the lock over: {holder}")

    def release(self) -> None:
        """Remove the object if it is still this process's own. A second call does nothing."""
        if not self._released:
            self._released = True
            with contextlib.suppress(OSError, CheckpointError):
                self.check()
                self._path.unlink()


def _lock_object(path: RemotePath, content: bytes) -> ObjectLock | None:
    """Return the lock of a folder in an object store, also that of an owner that has ended; None if it is held."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.create(content)
            return ObjectLock(path, content)
        owner = _owner(path)
        if owner is None or not owner.has_ended():
            return None
        path.unlink(missing_ok=True)


def _owner(path: Folder) -> Owner | None:
    try:
        # The identity comes first; a lock of an object store has a token after it.
        return owner_of(json.JSONDecoder().raw_decode(read(path)[:4096].decode())[0])
    except (OSError, ValueError, RecursionError):
        return None


def _locked_message(folder: Folder, owner: Owner | None) -> str:
    holder = "another process" if owner is None else str(owner)
    if owner is not None and owner.same_process(this_process()):
        return f"an earlier save of this process into {folder} does not end ({owner})"
    if owner is not None and owner.alive() is False:
        holder += " (it has ended, but a child of it still has the lock)"
    return (
        f"another job is saving into {folder}: {holder}\n"
        "Two jobs in one folder would remove each other's files: end that one, or give this job a folder of its own."
    )
