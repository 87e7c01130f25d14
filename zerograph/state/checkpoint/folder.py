"""Folders that checkpoints are saved into: which there are, in which order, the latest, and those to be removed."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerograph.base import source
from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.lock import Owner, owner_of, this_process
from zerograph.runtime.checkpoint.storage import Reader

LATEST = "latest"

# The entry of a checkpoint's document that orders it among others. No clock does: it may go back, and copies of files
# have the time of their copying.
_SAVED = "saved"


@dataclass(frozen=True)
class Place:
    """A checkpoint as its index says, without a check.

    Attributes:
        number: one more than that of the newest checkpoint which was in the folder; 0 for those of version 0.1.
        steps: updates done.
        owner: the process that wrote it; None for those of version 0.1.
    """

    path: Path
    number: int
    steps: int
    owner: Owner | None

    @property
    def order(self) -> tuple[int, int, str]:
        return self.number, self.steps, self.path.name


def numbered(document: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the document with the checkpoint's number and this process as its owner."""
    return {**document, _SAVED: {"number": number, "by": asdict(this_process())}}


def check_kind(folder: Path, keep: int | None) -> None:
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


def next_number(root: Path, last: int | None) -> int:
    """Return the number of the next checkpoint in a folder, or in the place of the one that the folder is.

    Args:
        last: the number of the last one that this graph has saved there or loaded; None: it has not.

    Raises:
        CheckpointError: another job has saved there since.
    """
    newest = max((place(root), *_steps_in(root)), key=lambda one: one.order)
    since = last is not None and newest.number > last
    if since and newest.owner is not None and not newest.owner.same_process(this_process()):
        raise CheckpointError(
            f"another job has saved into {root} since this one did: {newest.owner}, {newest.path.name} with "
            f"{newest.steps} steps done\nTwo jobs in one folder replace each other's checkpoints: end one of them, "
            "or give each a folder of its own."
        )
    return newest.number + 1


def place(folder: Path) -> Place:
    """Return what the index in a folder says; number 0 where there is none, or none that can be read."""
    try:
        found = (folder / index.NAME).stat()
        return _place(folder, found.st_ino, found.st_mtime_ns, found.st_size)
    except (OSError, ValueError, RecursionError, MemoryError):
        name = re.fullmatch(r"step-(\d{8,18})", folder.name)
        return Place(folder, 0, int(name[1]) if name else 0, None)


# Of large models an index is megabytes: those that stay are not read again with every save.
@functools.lru_cache(maxsize=64)
def _place(folder: Path, *_: int) -> Place:
    body = json.loads((folder / index.NAME).read_bytes())
    document = body.get("document") if isinstance(body, dict) else None
    if not isinstance(document, dict):
        raise ValueError("no document")
    saved = document.get(_SAVED)
    saved = saved if isinstance(saved, dict) else {}
    return Place(folder, _count(saved.get("number")), _count(document.get("steps_done")), owner_of(saved.get("by")))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0


def _steps_in(folder: Path) -> list[Place]:
    """Return the checkpoints in a folder that holds some, the oldest first."""
    there = [one for one in _step_folders(folder) if (one / index.NAME).is_file()]
    return sorted(map(place, there), key=lambda one: one.order)


def _step_folders(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if re.fullmatch(r"step-\d{8,}", one.name) and one.is_dir()]


def tidy(folder: Path, data: str) -> None:
    """Remove what no index speaks of any more, of this and of interrupted saves."""
    for other in folder.glob("data-*"):
        # What somebody else calls so stays.
        if other.name != data and re.fullmatch("data-[0-9a-f]{32}", other.name):
            shutil.rmtree(other, ignore_errors=True)
    for other in folder.glob(f".{index.NAME}.*"):
        other.unlink(missing_ok=True)


def point(checkpoint: Path) -> None:
    """Make ``latest`` name this checkpoint, at once."""
    for interrupted in checkpoint.parent.glob(f".{LATEST}.*"):
        interrupted.unlink(missing_ok=True)
    beside = checkpoint.parent / f".{LATEST}.{uuid.uuid4().hex}"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(checkpoint.name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, checkpoint.parent / LATEST)
    index.sync_folder(checkpoint.parent)


def prune(written: Path, keep: int) -> None:
    """Leave the ``keep`` checkpoints that were written last, and nothing of saves that were interrupted.

    By their numbers, not by step: a job that went back to an earlier checkpoint keeps what it writes from there. The
    one just written stays whatever its number is, and so does the one that ``latest`` names.
    """
    folder = written.parent
    there = _steps_in(folder)
    named = {written.name, _named(folder)}
    kept = {one.path for one in there if one.path.name in named}
    for one in reversed(there):
        if len(kept) < keep:
            kept.add(one.path)
    for old in there:
        if old.path not in kept:
            # Without its index it is none, whatever is left of it when this is interrupted.
            (old.path / index.NAME).unlink(missing_ok=True)
    for path in set(_step_folders(folder)) - kept:
        if all(one.name.startswith(("data-", f".{index.NAME}.")) for one in path.iterdir()):
            shutil.rmtree(path, ignore_errors=True)


def _named(folder: Path) -> str | None:
    """Return the name in ``latest``, None if there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no name of a file.
    """
    try:
        with open(index.inside(folder, LATEST), encoding="utf-8") as file:
            return index.plain_name(file.read(300).strip())
    except FileNotFoundError:
        return None


def latest(folder: Path) -> Path:
    """Return the checkpoint that the file ``latest`` names, or the newest whole one if it names none that is there.

    Raises:
        CheckpointError: there is none, or the file is damaged.
    """
    try:
        name = _named(folder)
        if name is not None and index.inside(folder, name).is_dir() and (folder / name / index.NAME).exists():
            return folder / name
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{folder / LATEST} cannot be followed: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / LATEST} is damaged: it names no checkpoint") from error
    said = f"{folder} has no file {LATEST}" if name is None else f"{folder / LATEST} names {name!r}, which is not there"
    for one in reversed(_steps_in(folder)):
        try:
            Reader(one.path, index.read(one.path)).check_files()
        except CheckpointError:
            continue
        warnings.warn(
            f"{said}: the newest whole checkpoint is loaded instead, {one.path.name} with {one.steps} steps done",
            stacklevel=source.levels_to_user(),
        )
        return one.path
    raise CheckpointError(f"{said}, and no other checkpoint in {folder} is whole")


def holds_checkpoints(folder: Path) -> bool:
    """Return whether the folder holds checkpoints, saved with ``keep``, and is none itself."""
    if (folder / index.NAME).exists() or not folder.is_dir():
        return False
    return (folder / LATEST).is_file() or bool(_steps_in(folder))
