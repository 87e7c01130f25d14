"""The cache of compiled steps in ``$ZEROGRAPH_CACHE/steps``, which jobs fill and read by themselves.

Rank 0 looks a step up. The other ranks receive its file, and every rank compares it with its own process: a step is
used if it fits on all ranks. The name of a step's file is the key: all that the step depends on and that is known
before a trace. The code that the trace ran, and the values that it read, are in the file.

If there is none, rank 0 traces and rewrites the step, writes it, and sends it to the other ranks, which wait for it. A
rank that it does not fit traces by itself. Every rank does so if the step cannot be written to a file.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerograph.artifact.code import digests, names_of
from zerograph.artifact.digest import short
from zerograph.artifact.file import write_file
from zerograph.artifact.process import process_texts
from zerograph.base.cache import folder, opened, setting
from zerograph.base.contexts import collection_paused
from zerograph.base.recording import Recording
from zerograph.base.sizes import in_bytes
from zerograph.base.source import warn_user
from zerograph.compiler.artifacts import Artifact, artifact_content, read_artifact
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import PreparedStep
from zerograph.compiler.dependencies import OF_LOOP, Dependencies
from zerograph.compiler.members import Members
from zerograph.errors import ArtifactError, CommunicationError, ConfigError
from zerograph.runtime.job.exchange import broadcast_from, broadcast_number, broadcast_when_ready
from zerograph.runtime.job.process_group import Job, agree, digest

VARIABLE = "ZEROGRAPH_CACHE_STEPS"
_DEFAULT_LIMIT = "4GiB"
# A file that another job is writing is younger.
_ABANDONED_SECONDS = 3600
_log = logging.getLogger("zerograph.cache")
# What is in the first half of a file's name: the step that a miss is explained by is equal in it.
_IN_NAMES = ("config.", "input ", "the mesh", "parameters: ", "buffers: ", OF_LOOP)
_MOST_DIFFERENCES = 5
# The numbers that rank 0 sends in place of a length: without cache; each rank traces; rank 0 traces for all.
_OFF, _EACH, _ONCE = -2, -1, 0
# Digests among sizes, see :mod:`zerograph.runtime.job.channel`.
_MOST_OF_SIZES = 2**61 - 1


def limit() -> int:
    """Return the bytes that the cache may take; 0 if it is off.

    It is on if the user gives a limit, or a folder; it is off by default.

    Raises:
        ConfigError: the variable has another value.
    """
    text = os.environ.get(VARIABLE, "").strip() or (_DEFAULT_LIMIT if setting() else "0")
    size = 0 if text == "0" else in_bytes(text)
    if size is None:
        raise ConfigError(f"{VARIABLE}={text}: give a size such as 4GiB, or 0 to cache no steps")
    return size


def _is_on() -> bool:
    try:
        # There is no folder where the user has no home: RuntimeError.
        return limit() > 0 and bool(folder("steps"))
    except (ConfigError, RuntimeError) as error:
        # The other ranks wait for an answer.
        warn_user(f"{error}\nNo step is cached.")
        return False


def name_of(present: Mapping[str, str], graph: object) -> str:
    """Return the name of a step's file.

    Args:
        present: everything that the step depends on, as far as it is known before a trace.
        graph: the graph, whose class counts.
    """
    named = sorted(item for item in present.items() if item[0].startswith(_IN_NAMES))
    kind = f"{type(graph).__module__}.{type(graph).__qualname__}"
    return f"{short(f'{kind} {named}')}-{short(str(sorted(present.items())))}.zg"


@dataclass(eq=False)
class StepSource:
    """The cache of steps, and rank 0, as the sources of one step. Without either, each rank traces it.

    Attributes:
        required: the :func:`zerograph.compiler.artifacts.requirements` of the step.
        once: rank 0 traces for all, also without the cache.
        artifact: the step, if a source has it.
        keeps: a trace is recorded, by which others see whether the step is theirs.
        interrupt: what interrupted this rank while it waited for rank 0.
    """

    job: Job
    members: Members
    batch: Batch
    required: Mapping[str, str]
    dependencies: Dependencies
    once: bool = False
    artifact: Artifact | None = None
    keeps: bool = False
    interrupt: BaseException | None = None
    # Rank 0 traces, and the other ranks wait for its answer.
    _waits: bool = False
    # Rank 0 reads and writes the cache.
    _uses_files: bool = False
    # Why others could not tell whether the step is theirs.
    _doubts: list[str] = field(default_factory=list)
    _before: Mapping[str, str] = field(default_factory=dict)
    _content: bytes = b""

    @property
    def records(self) -> bool:
        """True if a trace is to be recorded."""
        return self.keeps and self.artifact is None

    @functools.cached_property
    def _present(self) -> dict[str, str]:
        return {**process_texts(), **self.required}

    @functools.cached_property
    def _name(self) -> str:
        return name_of(self._present, self.dependencies.graph)

    @property
    def _file(self) -> Path:
        return folder("steps") / self._name

    def _youngest(self) -> Path:
        """Return the file that was used last of those of such inputs and options; that of the step if there is none."""
        same = f"{self._name.partition('-')[0]}-*.zg"
        # Another job may remove files at the same time.
        with contextlib.suppress(OSError, ValueError):
            return max(self._file.parent.glob(same), key=lambda file: file.stat().st_mtime)
        return self._file

    @property
    def _mark(self) -> Path:
        """The empty file that stands for a step which cannot be kept: then no rank waits for rank 0."""
        return self._file.with_suffix(".each")

    def look_up(self) -> None:
        """Take the step of the cache, if all ranks can use it; else agree on who traces, and wait for rank 0.

        A collective.
        """
        job, data, number = self.job, b"", _OFF
        self._uses_files = job.rank == 0 and _is_on()
        if job.rank == 0 and (self._uses_files or self.once):
            data = _read(self._file) if self._uses_files else b""
            # Not Path.exists(), which raises where the system refuses, while the other ranks wait.
            is_marked = self._uses_files and os.path.exists(self._mark)
            in_doubt = not data and (is_marked or self.dependencies.foreseen_doubts())
            number = _EACH if in_doubt else _ONCE
            if self._uses_files and not data and not in_doubt:
                # The comparison says why it is not the step.
                data = _read(self._youngest())
        number = broadcast_number(job, len(data) or number)
        if number == _OFF:
            return
        self.keeps = may_record()
        artifact = None
        if number > 0:
            artifact = self._received(data, number)
            fits = agree(job, "using a step of the cache", 0, dict, None, [int(artifact is not None)])
            others = [rank for rank, (used,) in enumerate(fits) if not used and rank != job.rank]
            if artifact is not None and others:
                _tell(job, f"the step of the cache is not used: rank {others[0]} has other code or values")
                artifact = None
            # If it fits on rank 0, the other ranks cannot use what rank 0 traces either.
            number = _EACH if fits[0] == [1] else _ONCE
        if artifact is not None:
            _tell(job, f"{self._name} is used")
            with contextlib.suppress(OSError):
                # The least recently used steps are removed first.
                if job.rank == 0:
                    os.utime(self._file)
            self.artifact = artifact
        elif number == _ONCE and job.size > 1:
            own = digest(sorted(self._present.items())) & _MOST_OF_SIZES
            numbers = agree(job, "tracing a step", 0, dict, None, [own, int(self.keeps)])
            self._waits = numbers[0][1] == 1 and all(row[0] == numbers[0][0] for row in numbers)
            if job.rank and self._waits:
                self._receive()
            elif self._waits:
                self._before = self.dependencies.texts(now=True)

    def _receive(self) -> None:
        """Wait until rank 0 has traced and rewritten the step, and take it if it fits."""
        number, self.interrupt = broadcast_when_ready(self.job, 0, "waiting for rank 0 to trace and rewrite a step")
        self._waits = False
        if number:
            self.artifact = self._received(b"", number)
            if self.artifact is not None:
                _tell(self.job, f"{self._name} is that of rank 0")

    def traced(self, trace: Recording | None) -> None:
        """Have each rank trace, as soon as rank 0's trace shows that its step cannot be sent.

        It cannot be written to a file, or the trace has changed modules, which then differ between ranks.

        Args:
            trace: what it ran.
        """
        if self.job.rank == 0 and self.records:
            if trace is not None:
                self._doubts = self.dependencies.doubts(trace)
            if trace is None or self._doubts or (self._waits and self.dependencies.texts(now=True) != self._before):
                self._answer(b"")

    @collection_paused()
    def send(self, step: PreparedStep) -> None:
        """Send the traced and rewritten step of rank 0 to the ranks that wait for it."""
        if self._waits:
            # Why it cannot be sent is logged when it cannot be written either.
            with contextlib.suppress(Exception):
                self._content = self._content_of(step)
            self._answer(self._content)

    def decline(self) -> None:
        """Have each rank trace: rank 0 has failed, and the others find out where."""
        with contextlib.suppress(CommunicationError):
            self._answer(b"")

    def _answer(self, content: bytes) -> None:
        """Send the content of rank 0's file, if the other ranks still wait for it; empty if each rank is to trace."""
        if self._waits:
            self._waits = False
            broadcast_when_ready(self.job, len(content), "sending a step")
            if content:
                _exchange(self.job, content, len(content))

    def _received(self, data: bytes, number: int) -> Artifact | None:
        """Return rank 0's step, if it fits. Log why it does not.

        Args:
            data: its file; empty on other ranks.
            number: its length.
        """
        content = _exchange(self.job, data, number)
        try:
            with collection_paused():
                artifact = read_artifact(self._name, self.members, content)
                differences = artifact.differences(self._present)
                if not differences and not artifact.holds_for(self.batch):
                    differences = ["it is for other sizes of dynamic dimensions"]
                if not differences:
                    # These are read here: a damaged file is then as if there were none.
                    _ = artifact.programs, artifact.candidate, artifact.warnings
                    return artifact
        except ArtifactError as error:
            differences = [str(error)]
        more = f"; and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
        _tell(self.job, f"the step of the cache is not used: {'; '.join(differences[:_MOST_DIFFERENCES])}{more}")
        return None

    def _content_of(self, step: PreparedStep) -> bytes:
        """Return the content of a step's file.

        Raises:
            ArtifactError: it cannot be written to a file.
        """
        trace = step.captured.recording
        assert trace is not None
        if self._doubts:
            raise ArtifactError("; ".join(self._doubts[:3]))
        return artifact_content(step, trace)

    @collection_paused()
    def keep(self, step: PreparedStep) -> None:
        """Write a step that rank 0 has traced to the cache. Log why not."""
        if step.captured.recording is None or not (self.records and self._uses_files):
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                content = self._content or self._content_of(step)
            except Exception:
                self._mark.touch(0o600)
                raise
            write_file(self._file, content)
            self._mark.unlink(missing_ok=True)
            _remove_oldest(self._file.parent, limit())
            _tell(self.job, f"{self._name} is written")
        except Exception as error:
            # The step runs without it.
            _tell(self.job, f"the step is not kept: {error}")

    def code(self, step: PreparedStep | None) -> dict[str, str]:
        """Return digests of what the trace of a step ran, by name, for messages about ranks that differ."""
        trace = None if step is None else step.captured.recording
        names = self.artifact.document["code"] if self.artifact is not None else names_of(trace) if trace else ()
        return {f"the code of {name}": text for name, text in digests(names).items()}


def _exchange(job: Job, data: bytes, length: int) -> bytes:
    """Return rank 0's bytes on every rank."""
    if job.size == 1:
        return data
    content = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8)
    broadcast_from(job, [content], what="compiled step")
    return content.numpy().tobytes()


def _read(file: Path) -> bytes:
    """Return the content of a file of this user; empty if there is none."""
    try:
        with opened(file) as made:
            status = os.fstat(made.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                _log.info("%s is not used: others can write it", file)
                return b""
            return made.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        _log.info("%s is not used: %s", file, error.strerror)
        return b""


def _remove_oldest(path: Path, most: int) -> None:
    """Remove files, the least recently used first, until the others take at most so many bytes."""
    files = []
    for file in path.iterdir():
        # Another job may remove files at the same time.
        with contextlib.suppress(OSError):
            status = file.stat()
            if file.suffix in (".zg", ".each"):
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


def _tell(job: Job, text: str) -> None:
    _log.info("%s", text, extra={"rank": job.rank if job.size > 1 else None})
