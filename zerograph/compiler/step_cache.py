"""The cache of compiled steps in ``$ZEROGRAPH_CACHE/steps``, which jobs fill and read by themselves.

Rank 0 looks a step up and writes it. The other ranks receive its file, and every rank compares it with its own process:
a step is used if it fits on all ranks. The file of a step is found by its inputs and options. Everything else that it
depends on is in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from zerograph.base.cache import folder
from zerograph.base.collection import collection_paused
from zerograph.base.sizes import in_bytes
from zerograph.base.source import levels_to_user
from zerograph.compiler.artifacts import Artifact, read_artifact, write_artifact
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import RewrittenStep
from zerograph.compiler.dependencies import Dependencies
from zerograph.compiler.members import Members
from zerograph.errors import ArtifactError, ConfigError
from zerograph.runtime.job.exchange import broadcast_number, broadcast_small
from zerograph.runtime.job.process_group import Job, agree

VARIABLE = "ZEROGRAPH_CACHE_STEPS"
# A file that another job is writing is younger.
_ABANDONED_SECONDS = 3600
_log = logging.getLogger("zerograph.cache")
# Steps that differ in one of these have files of their own.
_IN_NAMES = ("config.", "input ", "the mesh", "parameters: ", "buffers: ")
_MOST_DIFFERENCES = 5
# The numbers that rank 0 sends in place of a length.
_OFF, _MISSING = -1, 0


def limit() -> int:
    """Return the bytes that the cache may take; 0 if it is off, as by default.

    Raises:
        ConfigError: the variable has another value.
    """
    text = os.environ.get(VARIABLE, "").strip()
    size = 0 if text in ("", "0") else in_bytes(text)
    if size is None:
        raise ConfigError(f"{VARIABLE}={text}: give a size such as 4GiB, or 0 to cache no steps")
    return size


def _is_on() -> bool:
    try:
        return limit() > 0
    except ConfigError as error:
        # The other ranks wait for an answer.
        warnings.warn(f"{error}\nNo step is cached.", stacklevel=levels_to_user())
        return False


def file_of(present: Mapping[str, str], graph: object) -> Path:
    """Return the file of a step.

    Args:
        present: the requirements of the step.
        graph: the graph, whose class counts.
    """
    # Of the rest the file may have another value, which the log names.
    named = {name: text for name, text in present.items() if name.startswith(_IN_NAMES)}
    kind = type(graph)
    text = repr((kind.__module__, kind.__qualname__, sorted(named.items())))
    return folder("steps") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.zg"


def look_up(
    job: Job, members: Members, batch: Batch, present: Mapping[str, str], graph: object
) -> tuple[Artifact | None, bool]:
    """Return the step of the cache, if there is one that all ranks can use, and whether a new one is to be kept.

    A collective.

    Args:
        job: the ranks.
        members: the modules and tensors of the graph.
        batch: the inputs.
        present: the requirements of the step.
        graph: the graph.
    """
    data, number = b"", _OFF
    if job.rank == 0 and _is_on():
        data, number = _read(file_of(present, graph)), _MISSING
    number = broadcast_number(job, len(data) or number)
    if number <= 0:
        return None, number == _MISSING
    file = file_of(present, graph)
    if job.size > 1:
        content = torch.frombuffer(bytearray(data or bytes(number)), dtype=torch.uint8)
        broadcast_small(job, [content], "compiled step")
        data = content.numpy().tobytes()
    artifact, differences = _fitting(file, data, members, batch, present)
    fits = agree(job, "using a step of the cache", 0, dict, None, [int(artifact is not None)])
    if differences:
        more = f"; and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
        _tell(job, f"{file.name} is not used: {'; '.join(differences[:_MOST_DIFFERENCES])}{more}")
    others = [rank for rank, (used,) in enumerate(fits) if not used and rank != job.rank]
    if artifact is not None and others:
        _tell(job, f"{file.name} is not used: rank {others[0]} has other code or values")
        artifact = None
    if artifact is not None:
        _tell(job, f"{file.name} is used")
        with contextlib.suppress(OSError):
            # The least recently used steps are removed first.
            if job.rank == 0:
                os.utime(file)
    return artifact, True


@collection_paused()
def _fitting(
    file: Path, data: bytes, members: Members, batch: Batch, present: Mapping[str, str]
) -> tuple[Artifact | None, list[str]]:
    """Return the step of a file if this process can use it, else why not."""
    try:
        artifact = read_artifact(file, members, data)
        if differences := artifact.differences(present):
            return None, differences
        if not artifact.holds_for(batch):
            return None, ["it is for other sizes of dynamic dimensions"]
        # Both are read here: a damaged one is then compiled, as if there were no file.
        _ = artifact.programs
        return artifact, []
    except ArtifactError as error:
        return None, [str(error)]


def _read(file: Path) -> bytes:
    """Return the content of a file of this user; empty if there is none."""
    try:
        with open(file, "rb") as opened:
            status = os.fstat(opened.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                _log.info("%s is not used: others can write it", file)
                return b""
            return opened.read()
    except OSError:
        return b""


def keep(job: Job, step: RewrittenStep, dependencies: Dependencies) -> None:
    """Write a step, which was just compiled and not read, to the cache. Says why not in the log.

    Args:
        job: the ranks; rank 0 writes.
        step: the step.
        dependencies: what it depends on.
    """
    trace = step.captured.recording
    if trace is None:
        return
    if job.rank:
        trace.cells.clear()
        return
    file = file_of({**step.requirements, **step.input_requirements}, dependencies.graph)
    try:
        if doubts := dependencies.doubts(trace):
            raise ArtifactError("; ".join(doubts[:3]))
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_artifact(step, file, dependencies.code(trace))
        _remove_oldest(file.parent, limit())
        _tell(job, f"{file.name} is written")
    except Exception as error:
        # The step runs without it.
        _tell(job, f"the step is not kept: {error}")
    finally:
        # The recording lives as long as the step; what closures contain need not.
        trace.cells.clear()


def _remove_oldest(path: Path, most: int) -> None:
    """Remove files, the least recently used first, until the others take at most so many bytes."""
    files = []
    for file in path.iterdir():
        # Another job may remove files at the same time.
        with contextlib.suppress(OSError):
            status = file.stat()
            if file.suffix == ".zg":
                files.append((status.st_mtime, status.st_size, file))
            elif file.name.startswith(".") and status.st_mtime < time.time() - _ABANDONED_SECONDS:
                file.unlink()
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= most:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        total -= size


def may_record() -> bool:
    """Return whether a trace can be recorded: no other profiler of Python is active."""
    if sys.getprofile() is None:
        return True
    _log.info("the step is not kept: a profiler of Python is active")
    return False


def with_code(dependencies: Dependencies, step: RewrittenStep | None, lines: Mapping[str, str]) -> dict[str, str]:
    """Return texts by name, after digests of what the trace of a step ran, for messages about ranks that differ."""
    trace = None if step is None else step.captured.recording
    code = {} if trace is None else dependencies.code(trace)
    return {**{f"the code of {name}": text for name, text in code.items()}, **lines}


def _tell(job: Job, text: str) -> None:
    _log.info("%s", text, extra={"rank": job.rank if job.size > 1 else None})
