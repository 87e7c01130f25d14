"""Writing a checkpoint: each rank its part, beside what is there; the index at the end makes it the one that counts."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import traceback
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from zerograph import _torch
from zerograph.errors import CheckpointError, ConfigError, ZeroGraphError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.lock import FolderLock, lock
from zerograph.runtime.checkpoint.pieces import Pieces, PieceSavePlanner, constant
from zerograph.runtime.checkpoint.storage import Writer
from zerograph.runtime.job.liveness import mark_reported
from zerograph.runtime.job.process_group import Job, agree, digest, explaining_failures, reporting_failures
from zerograph.state.checkpoint.folder import check_kind, next_number, numbered, point, prune, tidy


@dataclass(eq=False)
class Saver:
    """The saves of one graph, one after another; a save in the background has a process group of its own."""

    _group: dist.ProcessGroup | None = None
    _ending: Callable[[], object] | None = None
    _world: Any = None
    _thread: threading.Thread | None = None
    _failed: list[BaseException] = field(default_factory=list)
    # By folder: the number of the checkpoint that this graph saved there last. Rank 0 has it.
    _numbers: dict[Path, int] = field(default_factory=dict)

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
        """Write the tensors that this rank has, and rank 0 the index. Every rank calls it.

        Args:
            contents: yields this rank's tensors, and the document; what it raises is an error on every rank.

        Raises:
            CheckpointError: on every rank; what was there is still there.
        """
        self.wait()
        problem: BaseException | None = None
        target = Path()
        pieces: Mapping[str, Pieces] = {}
        document: Mapping[str, Any] = {}
        try:
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise ConfigError(f"keep = {keep!r}: give a number of checkpoints, 1 or more, or None")
            target = folder_of(path).absolute()
            check_kind(target, keep)
            target = target if keep is None else target / f"step-{steps_done:08d}"
            target.mkdir(parents=True, exist_ok=True)
            if not os.access(target, os.W_OK):
                raise CheckpointError(f"{target} cannot be written to: no permission")
            pieces, document = contents()
        except OSError as error:
            problem = CheckpointError(f"{target} cannot be made: {error.strerror}")
        except BaseException as error:
            problem = error
        facts = {"the path of the checkpoint": str(path), "keep": str(keep)}
        agree(job, "saving a checkpoint", digest(facts), lambda: facts, problem)
        with self._undisturbed(job):
            self._renew_group(job)
        root = target if keep is None else target.parent
        begun = _Begun(target, root, keep)
        with self._undisturbed(job, begun):
            with explaining_failures(job, "beginning to save a checkpoint"), _own_exchange():
                begun.begin(job, self._group, self._numbers.get(root))
            begun.writer = Writer(target, begun.data, begun.numbered(document), job.rank, begun.tidy)
            with reporting_failures(job, "saving a checkpoint"), _own_exchange():
                kept = _copied(pieces) if asynchronous else pieces
            if asynchronous:
                self._thread = threading.Thread(
                    target=self._in_background, args=(job, kept, begun), name="zerograph checkpoint", daemon=False
                )
                self._thread.start()
                return
            self._write(job, kept, begun)

    def wait(self) -> None:
        """Until the last save is done.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()

    def forget(self) -> None:
        """Take what is in a folder as known: a checkpoint was loaded, and its writer is not another job now."""
        self._numbers.clear()

    def _in_background(self, job: Job, pieces: Mapping[str, Pieces], begun: _Begun) -> None:
        try:
            with self._undisturbed(job, begun):
                self._write(job, pieces, begun)
        except BaseException as error:
            self._failed.append(error)

    def _write(self, job: Job, pieces: Mapping[str, Pieces], begun: _Begun) -> None:
        _write(job, pieces, begun.writer, self._group)
        if job.rank == 0:
            self._numbers[begun.root] = begun.number

    @contextlib.contextmanager
    def _undisturbed(self, job: Job, begun: _Begun | None = None) -> Iterator[None]:
        """Clear away after a save that failed or was interrupted inside; the error passes through as it is.

        An exchange that this rank alone breaks off (Ctrl-C, ``sys.exit``) is one that the others would wait in. They
        are told by the end of the group's connections, so the group is not used again.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                # Frames that have ended may still hold the group.
                for each in _chain(error):
                    traceback.clear_frames(each.__traceback__)
                self._end_group()
            if begun is not None:
                begun.fail(job)
            if not isinstance(error, Exception):
                job.liveness.report_failure(error)
            raise

    def _renew_group(self, job: Job) -> None:
        """Make the group of saves if some rank has none: it ended after an interrupted save."""
        if job.size == 1:
            return
        with explaining_failures(job, "beginning to save a checkpoint"):
            mine = torch.tensor([self._group is not None and self._world is job.world], device="cpu").int()
            everybodys = torch.empty(job.size, dtype=mine.dtype, device="cpu")
            _torch.all_gather(everybodys, mine, job.control)
            if everybodys.all():
                return
            self._end_group()
            self._group = dist.new_group(timeout=timedelta(seconds=job.timeout), backend="gloo")
            self._world = job.world
            # It goes with the graph that saves: torch would keep its sockets and threads until the job ends.
            ending = weakref.finalize(self, _end, self._group)
            ending.atexit = False
            self._ending = ending

    def _end_group(self) -> None:
        self._group, ending, self._ending = None, self._ending, None
        if ending is not None:
            ending()


@dataclass(eq=False)
class _Begun:
    """A save from its beginning to its end.

    Attributes:
        target: the checkpoint's folder.
        root: the folder that is locked: it holds the checkpoint with ``keep``, else it is the same.
        data: the name of its data, which no save had before; the same on all ranks.
        number: its number among the checkpoints in ``root``, on rank 0.
    """

    target: Path
    root: Path
    keep: int | None
    data: str = ""
    number: int = 0
    writer: Writer = field(init=False)
    _lock: FolderLock | None = None

    def begin(self, job: Job, group: dist.ProcessGroup | None, last: int | None) -> None:
        """Lock the folder on rank 0, and share the name of the data.

        Raises:
            CheckpointError: on every rank: another job saves there, or has saved there since this one did.
        """
        told: list[tuple[str, str]] = [("", "")]
        if job.rank == 0:
            self.data = f"data-{uuid.uuid4().hex}"
            try:
                self._lock = lock(self.root, job.timeout)
                self.number = next_number(self.root, last)
                told = [(self.data, "")]
            except CheckpointError as error:
                told = [("", str(error))]
            except OSError as error:
                told = [("", f"{self.root} cannot be read: {error.strerror}")]
        if group is not None:
            dist.broadcast_object_list(told, group=group, group_src=0)
        self.data, refused = told[0]
        if refused:
            raise CheckpointError(refused)

    def numbered(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return numbered(document, self.number)

    def tidy(self) -> None:
        """Do what comes after the index is there, on rank 0."""
        tidy(self.target, self.data)
        if self.keep is not None:
            point(self.target)
            prune(self.target, self.keep)
        # Here, while the other ranks wait: none returns before the lock's file has gone.
        self.end()

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def fail(self, job: Job) -> None:
        """Leave nothing of it. A rank other than 0 does not know whether the index will be replaced yet."""
        if self.data and job.rank == 0:
            drop(self.target, self.data)
        self.end()
        if job.rank == 0:
            with contextlib.suppress(OSError):
                # Of a folder that was made for it; another is not empty.
                self.target.rmdir()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and those that it was raised from or while handling."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and all(each is not other for other in seen):
            seen.append(each)
            waiting += [each.__cause__, each.__context__]
            yield each


def _end(group: dist.ProcessGroup) -> None:
    # It may have gone with its job.
    with contextlib.suppress(AssertionError, RuntimeError, ValueError):
        dist.destroy_process_group(group)


def folder_of(path: object) -> Path:
    """A checkpoint's folder as the user gave it.

    Raises:
        CheckpointError: no path.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{path!r:.60} is no path of a checkpoint: give that of a folder")
    return Path(text)


def _copied(pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """The same in memory of its own, on the CPU."""
    found = {}
    for name, one in pieces.items():
        found[name] = copy = Pieces(one.shape, one.dtype)
        for at, (sizes, flat, start) in one.parts.items():
            numel = torch.Size(sizes).numel()
            copy.parts[at] = (sizes, constant(flat()[start : start + numel].to("cpu", one.dtype, copy=True)), 0)
    return found


def _write(job: Job, pieces: Mapping[str, Pieces], writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Write, and install the index.

    Raises:
        CheckpointError: a rank could not; the same on all.
        BaseException: what interrupted this rank, as it is (Ctrl-C, ``sys.exit``).
    """
    with explaining_failures(job, "saving a checkpoint"), _own_exchange(), warnings.catch_warnings():
        # Without a group torch warns that there is one process, which is so.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save_pieces(
                dict(pieces),
                storage_writer=writer,
                planner=PieceSavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        # Torch's own is none of Exception's.
        except (CheckpointException, RuntimeError) as error:
            if writer.interrupted is not None:
                raise writer.interrupted from None
            if isinstance(error, RuntimeError):
                raise
            raise_interrupt(error, job.rank)
            raise CheckpointError(_told(error, writer)) from error


@contextlib.contextmanager
def _own_exchange() -> Iterator[None]:
    """Let an interrupt inside break off the exchanges of the save alone: those of the step are whole."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        mark_reported(error)
        raise


def raise_interrupt(error: CheckpointException, rank: int) -> None:
    """Raise what ended this rank's part if it is no error but an interrupt: torch makes one failure of both."""
    own = error.failures.get(rank)
    if own is not None and not isinstance(own[0], Exception):
        raise own[0] from None


def _installed(folder: Path, data: str) -> bool:
    try:
        return index.read(folder).data == data
    except CheckpointError:
        return False


def drop(folder: Path, data: str) -> None:
    """Remove what a failed save has written; but what the index speaks of by now is whole, and stays."""
    if _installed(folder, data):
        return
    shutil.rmtree(folder / data, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / f".{index.NAME}.{data}").unlink()


def _told(error: CheckpointException, writer: Writer) -> str:
    """What went wrong on the first rank that failed."""
    rank, (cause, *_) = min(error.failures.items())
    said = str(cause) if isinstance(cause, ZeroGraphError) else f"{type(cause).__name__}: {cause}".removesuffix(": ")
    if _installed(writer.folder, writer.data):
        return f"the checkpoint in {writer.folder} is whole, but what comes after it failed, rank {rank}: {said}"
    return (
        f"the checkpoint in {writer.folder} could not be written, rank {rank}: {said}\nWhat was there before is kept."
    )
