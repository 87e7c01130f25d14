"""Writing a checkpoint: each rank its part, beside what is there; the index at the end makes it the one that counts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from zerograph.errors import CheckpointError, ConfigError, ZeroGraphError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.pieces import Pieces, Saving, constant
from zerograph.runtime.checkpoint.storage import Writer
from zerograph.runtime.process_group import Job, agree, digest, explained, noted

LATEST = "latest"


@dataclass(eq=False)
class Saver:
    """The saves of one graph, one after another; a save in the background has a process group of its own."""

    _group: dist.ProcessGroup | None = None
    _world: Any = None
    _thread: threading.Thread | None = None
    _failed: list[BaseException] = field(default_factory=list)

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
        problem: Exception | None = None
        target = Path()
        pieces: Mapping[str, Pieces] = {}
        document: Mapping[str, Any] = {}
        try:
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise ConfigError(f"keep = {keep!r}: give a number of checkpoints, 1 or more, or None")
            target = folder_of(path).absolute()
            _check_kind(target, keep)
            target = target if keep is None else target / f"step-{steps_done:08d}"
            target.mkdir(parents=True, exist_ok=True)
            if not os.access(target, os.W_OK):
                raise CheckpointError(f"{target} cannot be written to: no permission")
            pieces, document = contents()
        except OSError as error:
            problem = CheckpointError(f"{target} cannot be made: {error.strerror}")
        except Exception as error:
            problem = error
        facts = {"the path of the checkpoint": str(path), "keep": str(keep)}
        agree(job, "saving a checkpoint", digest(facts), lambda: facts, problem)
        with explained(job, "beginning to save a checkpoint"):
            group = self._own_group(job)
            data = _name(job, group)

        def written() -> None:
            _tidy(target, data)
            if keep is not None:
                _point(target)
                _prune(target.parent, keep)

        writer = Writer(target, data, document, job.rank, written)
        with noted(job, "saving a checkpoint"):
            kept = _copied(pieces) if asynchronous else pieces
        if not asynchronous:
            _write(job, kept, writer, group)
            return
        self._thread = threading.Thread(
            target=self._in_background, args=(job, kept, writer, group), name="zerograph checkpoint", daemon=False
        )
        self._thread.start()

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

    def _in_background(self, *args: Any) -> None:
        try:
            _write(*args)
        except BaseException as error:
            self._failed.append(error)

    def _own_group(self, job: Job) -> dist.ProcessGroup | None:
        if job.size == 1:
            return None
        if self._group is None or self._world is not job.world:
            self._group = dist.new_group(timeout=timedelta(seconds=job.timeout), backend="gloo")
            self._world = job.world
            # It goes with the graph that saves: torch would keep its sockets and threads until the job ends.
            weakref.finalize(self, _end, self._group).atexit = False
        return self._group


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


def _check_kind(folder: Path, keep: int | None) -> None:
    """Raise if the folder is a checkpoint and is to hold some, or the other way round: it could be read as either.

    Raises:
        CheckpointError: it says which it is.
    """
    if keep is not None and (folder / index.NAME).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint, saved without keep: with keep = {keep} it would hold others, and load() could "
            "not tell which is meant\nGive a folder of their own to those, or leave keep out."
        )
    if keep is None and (folder / LATEST).is_file():
        raise CheckpointError(
            f"{folder} holds checkpoints, saved with keep: without it the folder would be one itself, and load() could "
            "not tell which is meant\nGive another folder, or keep."
        )


def _name(job: Job, group: dist.ProcessGroup | None) -> str:
    """A name that no save had before, the same on all ranks."""
    name = [uuid.uuid4().hex]
    if group is not None:
        dist.broadcast_object_list(name, group=group, group_src=0)
    return f"data-{name[0]}"


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
    try:
        # Without a group torch warns that there is one process, which is so.
        with explained(job, "saving a checkpoint"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save_pieces(
                dict(pieces), storage_writer=writer, planner=Saving(), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        whole = _drop(writer)
        raise CheckpointError(_told(error, writer, whole)) from error


def _drop(writer: Writer) -> bool:
    """Remove what a failed save has written; but what the index speaks of by now is whole, and stays (True)."""
    try:
        if index.read(writer.folder).data == writer.data:
            return True
    except CheckpointError:
        pass
    shutil.rmtree(writer.folder / writer.data, ignore_errors=True)
    with contextlib.suppress(OSError):
        (writer.folder / f".{index.NAME}.{writer.data}").unlink()
    with contextlib.suppress(OSError):
        # Of a folder that was made for it; another is not empty.
        writer.folder.rmdir()
    return False


def _told(error: CheckpointException, writer: Writer, whole: bool) -> str:
    """What went wrong on the first rank that failed."""
    rank, (cause, *_) = min(error.failures.items())
    said = str(cause) if isinstance(cause, ZeroGraphError) else f"{type(cause).__name__}: {cause}"
    if whole:
        return f"the checkpoint in {writer.folder} is whole, but what comes after it failed, rank {rank}: {said}"
    return (
        f"the checkpoint in {writer.folder} could not be written, rank {rank}: {said}\nWhat was there before is kept."
    )


def _tidy(folder: Path, data: str) -> None:
    """What no index speaks of any more, of this and of interrupted saves."""
    for other in folder.glob("data-*"):
        # What somebody else calls so stays.
        if other.name != data and re.fullmatch("data-[0-9a-f]{32}", other.name):
            shutil.rmtree(other, ignore_errors=True)
    for other in folder.glob(f".{index.NAME}.*"):
        other.unlink(missing_ok=True)


def _point(checkpoint: Path) -> None:
    """Make ``latest`` say this one, at once."""
    for interrupted in checkpoint.parent.glob(f".{LATEST}.*"):
        interrupted.unlink(missing_ok=True)
    beside = checkpoint.parent / f".{LATEST}.{uuid.uuid4().hex}"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(checkpoint.name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, checkpoint.parent / LATEST)
    index.sync_folder(checkpoint.parent)


def _prune(folder: Path, keep: int) -> None:
    """Leave the ``keep`` checkpoints that were written last, and nothing of saves that were interrupted.

    By time, not by step: a job that went back to an earlier checkpoint keeps what it writes from there.
    """
    there = [one for one in folder.iterdir() if re.fullmatch(r"step-\d{8,}", one.name) and one.is_dir()]
    valid = [one for one in there if (one / index.NAME).is_file()]
    valid.sort(key=lambda one: ((one / index.NAME).stat().st_mtime_ns, one.name))
    for old in valid[:-keep]:
        # Without its index it is none, whatever is left of it when this is interrupted.
        (old / index.NAME).unlink(missing_ok=True)
    for old in set(there) - set(valid[-keep:]):
        if all(one.name.startswith(("data-", f".{index.NAME}.")) for one in old.iterdir()):
            shutil.rmtree(old, ignore_errors=True)
