"""List and order the checkpoints of a folder, find the latest, and remove old ones."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zerograph.base.source import warn_user
from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.lock import Owner, owner_of, this_process
from zerograph.runtime.checkpoint.remote import Folder, RemotePath, read
from zerograph.runtime.checkpoint.storage import Reader

LATEST = "latest"

# The entry of a checkpoint's document that orders it among others. Times do not: a clock may go back, and a copied file
# has the time of the copy.
_SAVED = "saved"


@dataclass(frozen=True)
class Place:
    """A checkpoint as its index describes it; its files are not checked.

    Attributes:
        path: folder of the checkpoint.
        number: one more than the number of the newest checkpoint in the folder at the save; 0 if version 0.1 wrote it.
        steps: updates done.
        owner: the process that wrote it; None if version 0.1 wrote it.
    """

    path: Folder
    number: int
    steps: int
    owner: Owner | None

    @property
    def order(self) -> tuple[int, int, str]:
        """Return the sort key; later saves have a greater one."""
        return self.number, self.steps, self.path.name


def numbered(document: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the document with the checkpoint's number and this process as its owner."""
    return {**document, _SAVED: {"number": number, "by": asdict(this_process())}}


def check_kind(folder: Folder, keep: int | None) -> None:
    """Check that the folder does not become both a checkpoint and a folder of checkpoints: ``load()`` reads either.

    Args:
        keep: the number of checkpoints that the folder is to hold; None to save one checkpoint as the folder itself.

    Raises:
        CheckpointError: the folder already is the other of the two.
    """
    if keep is not None and (folder / index.NAME).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint, saved without keep: with keep = {keep} it would also hold other "
            "checkpoints, and load() could not tell which is meant\nGive those another folder, or leave keep out."
        )
    if keep is None and (folder / LATEST).is_file():
        raise CheckpointError(
            f"{folder} holds checkpoints, saved with keep: without keep it would also be one itself, and load() "
            "could not tell which is meant\nGive another folder, or keep."
        )


def next_number(root: Folder, last: int | None) -> int:
    """Return the number of the next checkpoint that is saved in a folder, or as the folder itself.

    Args:
        last: number of the last checkpoint that this graph saved there; None if there is none.

    Raises:
        CheckpointError: another job has saved there since.
    """
    newest = max((place(root), *_steps_in(root)), key=lambda checkpoint: checkpoint.order)
    is_newer = last is not None and newest.number > last
    if is_newer and newest.owner is not None and not newest.owner.same_process(this_process()):
        raise CheckpointError(
            f"another job has saved into {root} since this job did: {newest.owner}, {newest.path.name} with "
            f"{newest.steps} steps done\nTwo jobs in one folder replace each other's checkpoints: end one of them, "
            "or give each its own folder."
        )
    return newest.number + 1


def place(folder: Folder) -> Place:
    """Read a folder's index; the number is 0 if there is no readable index."""
    try:
        stat = (folder / index.NAME).stat()
        return _place(folder, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, RecursionError, MemoryError):
        name = re.fullmatch(r"step-(\d{8,18})", folder.name)
        return Place(folder, 0, int(name[1]) if name else 0, None)


# The index of a large model has megabytes: an unchanged one is not read again at every save.
@functools.lru_cache(maxsize=64)
def _place(folder: Folder, *_: int) -> Place:
    body = json.loads(read(folder / index.NAME))
    document = body.get("document") if isinstance(body, dict) else None
    if not isinstance(document, dict):
        raise ValueError("no document")
    saved = document.get(_SAVED)
    saved = saved if isinstance(saved, dict) else {}
    return Place(folder, _count(saved.get("number")), _count(document.get("steps_done")), owner_of(saved.get("by")))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0


def _steps_in(folder: Folder) -> list[Place]:
    """Return the checkpoints in a folder, oldest first."""
    paths = [path for path in _step_folders(folder) if (path / index.NAME).is_file()]
    return sorted(map(place, paths), key=lambda checkpoint: checkpoint.order)


def _step_folders(folder: Folder) -> list[Folder]:
    return [path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]


def tidy(folder: Folder, data: str) -> None:
    """Remove the files of earlier and of interrupted saves, which the index does not name.

    Args:
        data: name of the data folder that the index names.
    """
    for other in folder.glob("data-*"):
        # Names of another form are the user's.
        if other.name != data and re.fullmatch("data-[0-9a-f]{32}", other.name):
            remove_tree(other)
    for other in folder.glob(f".{index.NAME}.*"):
        other.unlink(missing_ok=True)


def point(checkpoint: Folder) -> None:
    """Make ``latest`` name this checkpoint, atomically."""
    for interrupted in checkpoint.parent.glob(f".{LATEST}.*"):
        interrupted.unlink(missing_ok=True)
    index.replace(checkpoint.parent, LATEST, checkpoint.name)


def prune(written: Folder, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` that were written last, and the files of interrupted saves.

    Checkpoints are ordered by number, not by step: a job that went back to an earlier checkpoint keeps what it writes
    from there. The checkpoint just written is kept whatever its number is, and so is the one that ``latest`` names.
    """
    folder = written.parent
    checkpoints = _steps_in(folder)
    names = {written.name, _latest_name(folder)}
    kept = {checkpoint.path for checkpoint in checkpoints if checkpoint.path.name in names}
    for checkpoint in reversed(checkpoints):
        if len(kept) < keep:
            kept.add(checkpoint.path)
    for old in checkpoints:
        if old.path not in kept:
            # The index goes first: if the removal is interrupted, the rest is not taken for a checkpoint.
            (old.path / index.NAME).unlink(missing_ok=True)
    for path in set(_step_folders(folder)) - kept:
        if all(entry.name.startswith(("data-", f".{index.NAME}.")) for entry in path.iterdir()):
            remove_tree(path)


def remove_tree(folder: Folder) -> None:
    """Remove a folder and all in it, as far as it can be removed."""
    if isinstance(folder, RemotePath):
        with contextlib.suppress(OSError):
            folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _latest_name(folder: Folder) -> str | None:
    """Return the name in the file ``latest``, or None if there is no such file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold a file name.
    """
    try:
        return index.plain_name(index.inside(folder, LATEST).read_bytes()[:300].decode().strip())
    except FileNotFoundError:
        return None


def latest(folder: Folder) -> Folder:
    """Return the checkpoint that the file ``latest`` names, or the newest whole one if that does not exist.

    Raises:
        CheckpointError: no checkpoint is whole, or the file is damaged.
    """
    try:
        name = _latest_name(folder)
        if name is not None and index.inside(folder, name).is_dir() and (folder / name / index.NAME).exists():
            return folder / name
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / LATEST} is damaged: it names no checkpoint") from error
    reason = (
        f"{folder} has no file {LATEST}" if name is None else f"{folder / LATEST} names {name!r}, which is not there"
    )
    for checkpoint in reversed(_steps_in(folder)):
        try:
            Reader(checkpoint.path, index.read(checkpoint.path)).check_files()
        except CheckpointError:
            continue
        warn_user(
            f"{reason}: the newest whole checkpoint is loaded instead, {checkpoint.path.name} with "
            f"{checkpoint.steps} steps done"
        )
        return checkpoint.path
    raise CheckpointError(f"{reason}, and no other checkpoint in {folder} is whole")


def holds_checkpoints(folder: Folder) -> bool:
    """Return whether the folder holds checkpoints, saved with ``keep``, and is not a checkpoint itself."""
    if (folder / index.NAME).exists() or not folder.is_dir():
        return False
    return (folder / LATEST).is_file() or bool(_steps_in(folder))
