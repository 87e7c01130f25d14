"""Write a checkpoint: each rank its own files, then rank 0 the index.

The files get new names, so an earlier checkpoint in the folder is valid until the new index replaces its index.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerograph.errors import CheckpointError, ConfigError, ZeroGraphError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.lock import FolderLock, ObjectLock, lock
from zerograph.runtime.checkpoint.pieces import Pieces, flat_of
from zerograph.runtime.checkpoint.remote import Folder, folder_of
from zerograph.runtime.checkpoint.storage import NamedChunk, Writer
from zerograph.runtime.job.liveness import mark_reported, on_interrupt
from zerograph.runtime.job.process_group import Job, agreeing, explaining_failures, new_group, reporting_failures
from zerograph.state.checkpoint.folder import check_kind, next_number, numbered, point, prune, remove_tree, tidy

T = TypeVar("T")


@dataclass(eq=False)
class Saver:
    """Run the saves of one graph one at a time, in a process group of their own."""

    _group: dist.ProcessGroup | None = None
    # Destroys the group.
    _finalizer: Callable[[], object] | None = None
    _world: Any = None
    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)
    # By folder: number of the last checkpoint that this graph saved there; on rank 0 only.
    _numbers: dict[Folder, int] = field(default_factory=dict)

    def save(
        self,
        job: Job,
        path: str | os.PathLike[str],
        contents: Callable[[], tuple[Mapping[str, Pieces], Mapping[str, Any]]],
        *,
        asynchronous: bool,
        keep: int | None,
        steps_done: int,
    ) -> None:
        """Write this rank's tensors, and on rank 0 the index. Every rank calls it.

        Args:
            path: folder of the checkpoint; with ``keep`` the folder that holds the checkpoints.
            contents: returns this rank's tensors and the document; an error that it raises is raised on every rank.
            asynchronous: copy the tensors to CPU memory and write them in a background thread.
            keep: number of checkpoints to keep in the folder, or None.
            steps_done: updates done, part of the checkpoint's name with ``keep``.

        Raises:
            CheckpointError: the save failed, on every rank. Earlier checkpoints are unchanged.
        """
        self.wait()
        with agreeing(job, "saving a checkpoint") as facts:
            facts |= {"the path of the checkpoint": str(path), "keep": str(keep)}
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise ConfigError(f"keep = {keep!r}: give a number of checkpoints, 1 or more, or None")
            target = folder_of(path).absolute()
            try:
                check_kind(target, keep)
                target = target if keep is None else target / f"step-{steps_done:08d}"
                target.mkdir(parents=True, exist_ok=True)
                if isinstance(target, Path) and not os.access(target, os.W_OK):
                    raise CheckpointError(f"{target} cannot be written to: no permission")
                pieces, document = contents()
            except OSError as error:
                raise CheckpointError(f"{target} cannot be created: {error.strerror}") from error
        with self._cleanup_on_error(job):
            self._renew_group(job)
        root = target if keep is None else target.parent
        save = _Save(target, root, keep)
        # An interrupt from here on breaks off the save's collectives, not those of the step.
        with self._cleanup_on_error(job, save):
            own = explaining_failures(job, "beginning to save a checkpoint", breaks_off=False)
            with own, on_interrupt(mark_reported):
                save.begin(job, self._group, self._numbers.get(root))
            save.writer = Writer(
                target, save.data, numbered(document, save.number), job.rank, save.check_lock, save.tidy
            )
            with reporting_failures(job, "saving a checkpoint"), on_interrupt(mark_reported):
                pieces = _copied(pieces) if asynchronous else pieces
            if asynchronous:
                self._thread = threading.Thread(
                    target=self._in_background, args=(job, pieces, save), name="zerograph checkpoint", daemon=False
                )
                self._thread.start()
                return
            self._write(job, pieces, save)

    def wait(self) -> None:
        """Wait until the last save has ended.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def forget(self) -> None:
        """Forget the last checkpoint numbers: after a load, the checkpoints in a folder are not another job's."""
        self._numbers.clear()

    def _in_background(self, job: Job, pieces: Mapping[str, Pieces], save: _Save) -> None:
        try:
            with self._cleanup_on_error(job, save):
                self._write(job, pieces, save)
        except BaseException as error:
            self._errors.append(error)
            why = str(error)
            if job.size > 1 and not dist.is_initialized():
                why = "dist.destroy_process_group() was called before its end: call wait_for_save() of the graph first"
            # At once: a program that ends without another save would not learn of it.
            print(
                f"zerograph: rank {job.rank}: a save in the background has failed: {why}", file=sys.stderr, flush=True
            )

    def _write(self, job: Job, pieces: Mapping[str, Pieces], save: _Save) -> None:
        _write(job, pieces, save.writer, self._group)
        if job.rank == 0:
            self._numbers[save.root] = save.number

    @contextlib.contextmanager
    def _cleanup_on_error(self, job: Job, save: _Save | None = None) -> Iterator[None]:
        """Remove the files of a save that fails or is interrupted inside; reraise the error unchanged.

        If this rank alone leaves a collective (Ctrl-C, ``sys.exit``), the other ranks wait in it. Destroying the group
        closes its connections, which ends their wait; the next save creates a new group.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                # Frames in the traceback may still refer to the group.
                for cause in _chain(error):
                    traceback.clear_frames(cause.__traceback__)
                self._end_group()
            if save is not None:
                save.fail(job)
            if not isinstance(error, Exception):
                job.liveness.report_failure(error)
            raise

    def _renew_group(self, job: Job) -> None:
        """Create the process group of saves if a rank has none: an interrupted save destroys it."""
        if job.size == 1:
            return
        with explaining_failures(job, "beginning to save a checkpoint"):
            has_group = torch.tensor([self._group is not None and self._world is job.world], device="cpu").int()
            if job.channel.gather(has_group).all():
                return
            self._end_group()
            self._group = new_group(job.timeout, "gloo")
            self._world = job.world
            # Destroyed together with the graph: torch would keep its sockets and threads until the job ends.
            finalizer = weakref.finalize(self, _destroy, self._group)
            finalizer.atexit = False
            self._finalizer = finalizer

    def _end_group(self) -> None:
        self._group, finalizer, self._finalizer = None, self._finalizer, None
        if finalizer is not None:
            finalizer()


@dataclass(eq=False)
class _Save:
    """A save in progress.

    Attributes:
        target: folder of the checkpoint.
        root: folder that is locked: with ``keep`` the parent of ``target``, else ``target``.
        keep: number of checkpoints to keep in ``root``, or None.
        data: name of the folder of its tensors, unique to this save and equal on all ranks.
        number: its number among the checkpoints in ``root``; on rank 0 only.
    """

    target: Folder
    root: Folder
    keep: int | None
    data: str = ""
    number: int = 0
    writer: Writer = field(init=False)
    _lock: FolderLock | ObjectLock | None = None

    def begin(self, job: Job, group: dist.ProcessGroup | None, last: int | None) -> None:
        """Lock the folder on rank 0, and broadcast the name of the data folder.

        Raises:
            CheckpointError: another job saves there, or has saved there since this one did. Raised on every rank.
        """
        # The name of the data folder, and the error message.
        message: list[tuple[str, str]] = [("", "")]
        if job.rank == 0:
            self.data = f"data-{uuid.uuid4().hex}"
            try:
                self._lock = lock(self.root, job.timeout)
                self.number = next_number(self.root, last)
                message = [(self.data, "")]
            except CheckpointError as error:
                message = [("", str(error))]
            except OSError as error:
                message = [("", f"{self.root} cannot be read: {error.strerror}")]
        if group is not None:
            dist.broadcast_object_list(message, group=group, group_src=0)
        self.data, problem = message[0]
        if problem:
            raise CheckpointError(problem)

    def check_lock(self) -> None:
        """Check that no other job has taken the lock over, on rank 0."""
        if self._lock is not None:
            self._lock.check()

    def tidy(self) -> None:
        """Remove old files and update ``latest`` after the index is written, on rank 0."""
        tidy(self.target, self.data)
        if self.keep is not None:
            point(self.target)
            prune(self.target, self.keep)
        # The other ranks still wait here, so none returns before the lock file is removed.
        self.end()

    def end(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.release()

    def fail(self, job: Job) -> None:
        """Remove the save's files, on rank 0: other ranks do not know whether the index is written yet."""
        if self.data and job.rank == 0:
            drop(self.target, self.data)
        self.end()
        if job.rank == 0:
            with contextlib.suppress(OSError):
                # Fails if the folder was not created for this save: then it is not empty.
                self.target.rmdir()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and, recursively, its causes and contexts."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is not None and all(cause is not other for other in seen):
            seen.append(cause)
            pending += [cause.__cause__, cause.__context__]
            yield cause


def _destroy(group: dist.ProcessGroup) -> None:
    # The end of the job may have destroyed it already.
    with contextlib.suppress(AssertionError, RuntimeError, ValueError):
        dist.destroy_process_group(group)


def _copied(pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Copy the pieces to CPU memory."""
    copies = {}
    for name, piece in pieces.items():
        copies[name] = copy = Pieces(piece.shape, piece.dtype)
        for offsets, (sizes, flat, start) in piece.parts.items():
            numel = torch.Size(sizes).numel()
            copy.parts[offsets] = (sizes, flat_of(flat()[start : start + numel].to("cpu", piece.dtype, copy=True)), 0)
    return copies


def _write(job: Job, pieces: Mapping[str, Pieces], writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Write the pieces, and on rank 0 the index.

    Raises:
        CheckpointError: a rank could not write; the same error on all ranks.
        BaseException: the interrupt of this rank, unchanged (Ctrl-C, ``sys.exit``).
    """
    problem: BaseException | None = None
    own = explaining_failures(job, "saving a checkpoint", breaks_off=False)
    with own, on_interrupt(mark_reported):
        try:
            written: list[NamedChunk] = []
            try:
                written = writer.write(pieces)
            except BaseException as error:
                problem = error
            everybody = _gathered((written, reason_of(problem)), group)
            reasons = [reason for _, reason in everybody]
            if everybody and not any(reasons):
                try:
                    writer.finish(pieces, itertools.chain.from_iterable(chunks for chunks, _ in everybody))
                except BaseException as error:
                    problem = error
                    reasons[0] = reason_of(error)
            # The first rank that failed, and its reason.
            failure = [next(((rank, reason) for rank, reason in enumerate(reasons) if reason), None)]
            if group is not None:
                dist.broadcast_object_list(failure, group=group, group_src=0)
        finally:
            if problem is not None and not isinstance(problem, Exception):
                # Also where the other ranks cannot be told of it.
                raise problem
        if failure[0] is not None:
            raise CheckpointError(_failure_message(*failure[0], writer)) from problem


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks on the first one, and none on the others."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def reason_of(error: BaseException | None) -> str | None:
    """Return the error of a rank as the others tell it; None for none."""
    if error is None:
        return None
    return str(error) if isinstance(error, ZeroGraphError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def _installed(folder: Folder, data: str) -> bool:
    """Return whether the folder's index names this data folder."""
    try:
        return index.read(folder).data == data
    except CheckpointError:
        return False


def drop(folder: Folder, data: str) -> None:
    """Remove the files of a failed save, unless the index already names them: then the checkpoint is whole."""
    if not _installed(folder, data):
        remove_tree(folder / data)


def _failure_message(rank: int, reason: str, writer: Writer) -> str:
    """Describe the error of the first rank that failed."""
    if _installed(writer.folder, writer.data):
        return f"the checkpoint in {writer.folder} is whole, but what comes after it failed, rank {rank}: {reason}"
    return (
        f"the checkpoint in {writer.folder} could not be written, rank {rank}: {reason}\nWhat was there before is kept."
    )
