"""Lock a folder for one save at a time, and say who holds the lock.

The lock is flock(2) on a file in the folder: the kernel ends it with its process, so nothing is left to clear away
after a kill. (``filelock`` replaces it by a file's mere existence where a file system has no locks. That outlives a
kill.) The file holds the identity of the process that saves, for the message of the one that is refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerograph.base import source
from zerograph.errors import CheckpointError

NAME = ".saving.lock"

# Seconds to wait for a holder of which this host cannot tell whether it lives: a file server may notice a death late.
_PATIENCE = 10.0
_POLL = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """A process that saves.

    Attributes:
        boot, namespace: between which processes a number means the same process; empty where the system does not say.
        started: the process's start in clock ticks since boot; -1 where the system does not say.
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
        return replace(self, job="", since="") == replace(other, job="", since="")

    def alive(self) -> bool | None:
        """Return whether the process runs; None if it is not one of this host and namespace."""
        here = this_process()
        if not here.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return None
        return _started(self.process) == self.started


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
    """Return the owner that ``asdict`` was given, or None for anything else."""
    kinds = {"host": str, "boot": str, "namespace": str, "process": int, "started": int, "job": str, "since": str}
    if not isinstance(value, Mapping) or value.keys() != kinds.keys():
        return None
    return Owner(**value) if all(type(value[key]) is kind for key, kind in kinds.items()) else None


class FolderLock:
    """A lock that this process holds; without a descriptor the file system has no locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path, self._descriptor = path, descriptor
        if descriptor is not None:
            _held.add(descriptor)

    def release(self) -> None:
        """Remove the file and end the lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor not in _held:
            return
        with contextlib.suppress(OSError):
            # While it is locked: nobody else can have locked this file by then.
            if _is_at(descriptor, self._path):
                self._path.unlink()
        _held.discard(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()


# Descriptors of locks that this process holds. A forked child must not keep them when this process is killed.
_held: set[int] = set()


def _forget_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def lock(folder: Path, timeout: float) -> FolderLock:
    """Lock the folder for a save.

    A save of this process is waited for up to ``timeout`` seconds. Another process that is known to live is not.

    Raises:
        CheckpointError: another process holds the lock (it is named), or the file cannot be made.
    """
    path, began = folder / NAME, time.monotonic()
    while True:
        try:
            descriptor = _attempt(path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{path} cannot be made: {error.strerror}") from error
            warnings.warn(
                f"the file system of {folder} has no locks ({error.strerror}): let no two jobs save into it",
                stacklevel=source.levels_to_user(),
            )
            return FolderLock(path, None)
        if descriptor is not None:
            held = FolderLock(path, descriptor)
            _sign(descriptor)
            return held
        owner = _owner(path)
        own = owner is not None and owner.same_process(this_process())
        known = owner is not None and not own and owner.alive()
        if known or time.monotonic() - began > (timeout if own else _PATIENCE):
            raise CheckpointError(_refused(folder, owner))
        time.sleep(_POLL)


def _attempt(path: Path) -> int | None:
    """Return a descriptor of the file once it is locked; None: somebody else has it."""
    # Windows has no such module, and saves nothing: its folders cannot be synced.
    import fcntl

    flags = os.O_CLOEXEC | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags | os.O_RDWR, 0o666)
    except PermissionError:
        # Left by a save of another user that was killed.
        descriptor = os.open(path, flags & ~os.O_CREAT | os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one before may have removed it in between.
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


def _sign(descriptor: int) -> None:
    """Write this process's identity; a lock without one is a lock, too (the disk may be full)."""
    text = json.dumps(asdict(replace(this_process(), since=time.strftime("%Y-%m-%d %H:%M:%S %z"))))
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _owner(path: Path) -> Owner | None:
    try:
        return owner_of(json.loads(path.read_bytes()[:4096]))
    except (OSError, ValueError, RecursionError):
        return None


def _refused(folder: Path, owner: Owner | None) -> str:
    who = "another process" if owner is None else str(owner)
    if owner is not None and owner.same_process(this_process()):
        return f"an earlier save of this process into {folder} does not end ({owner})"
    if owner is not None and owner.alive() is False:
        who += " (it has ended, but a child of it still has the lock)"
    return (
        f"another job is saving into {folder}: {who}\n"
        "Two jobs in one folder would remove each other's files: end that one, or give this job a folder of its own."
    )
