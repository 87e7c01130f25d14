"""Record what Python code runs and reads while a step is traced: functions, environment variables, and the machine."""

from __future__ import annotations

import functools
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zerograph.base import source
from zerograph.base.contexts import collection_paused, replaced
from zerograph.errors import ArtifactError

F = TypeVar("F", bound=Callable[..., Any])
# They differ between processes.
_OF_PROCESS = (id, hash)
_CO_OPTIMIZED = 0x1  # of functions; bodies of classes and modules lack it
# Modules of the standard library that read clocks and files. Recorded code may call what writes messages.
_MESSAGES = frozenset({"logging", "warnings", "linecache", "traceback", "inspect", "importlib", "tokenize"})


@dataclass
class Recording:
    """Code and reads of what ran inside a block of :func:`recorded`.

    Attributes:
        counts: returns whether the code of a file is recorded.
        refused_in_python: returns the name of a function if recorded code may not call it; empty if it may. Its
            arguments are the name of the function's module, and its own.
        refused_in_c: returns the same for a function in C.
        codes: the globals of functions that ran, by their code.
        runs: number of runs, by code.
        cells: what the closures of functions contain that ran, by code. Two functions of equal code may differ in it.
        variables: names of the environment variables that were read.
        doubts: reads of something that another process cannot compare, as text.
    """

    counts: Callable[[str], bool]
    refused_in_python: Callable[[str, str], str]
    refused_in_c: Callable[[Any], str]
    codes: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)
    runs: Counter[types.CodeType] = field(default_factory=Counter)
    cells: dict[types.CodeType, list[list[Any]]] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    doubts: dict[str, None] = field(default_factory=dict)
    # By ``id``: code is equal where only its file differs, and to hash it takes long.
    _known: dict[int, types.CodeType] = field(default_factory=dict)
    _other: dict[int, types.CodeType] = field(default_factory=dict)
    # Code whose calls of functions in C are nobody's.
    _silent: dict[int, types.CodeType] = field(default_factory=dict)
    # Of the other code, what recorded code calls.
    _entered: set[int] = field(default_factory=set)

    def follow(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Note a call; for ``sys.setprofile``."""
        # Most events of a trace are those of torch's dispatch: the first tests decide what recording costs.
        if event == "c_call":
            if id(frame.f_code) not in self._silent:
                self._note_in_c(frame, called)
        elif event == "call":
            code = frame.f_code
            if id(code) in self._other:
                caller = frame.f_back
                if caller is not None and id(caller.f_code) in self._known:
                    self._note_outside(frame)
            elif id(code) in self._known or (code.co_flags & _CO_OPTIMIZED and self.counts(code.co_filename)):
                self._known[id(code)] = code
                if (space := self.codes.setdefault(code, frame.f_globals)) is not frame.f_globals:
                    names = " and ".join(str(one.get("__name__")) for one in (frame.f_globals, space))
                    self.doubts[f"{names} have the same {code.co_qualname}()"] = None
                self.runs[code] += 1
                if code.co_freevars:
                    values, cells = frame.f_locals, self.cells.setdefault(code, [])
                    inside = [values.get(name) for name in code.co_freevars]
                    if not any(all(map(operator.is_, inside, others)) for others in cells):
                        cells.append(inside)
            else:
                self._other[id(code)] = code
                self._note_outside(frame)

    def _note_in_c(self, frame: types.FrameType, called: Any) -> None:
        """Note a call of a function in C, if recorded code makes it, or the standard library for it."""
        code, file = frame.f_code, frame.f_code.co_filename
        if not source.is_users(file) if self.counts(file) else not _may_call_for_users(file):
            self._silent[id(code)] = code
            return
        # Copies of the standard library ask for the identity too.
        is_own = called in _OF_PROCESS and id(code) in self._known
        refused = called.__name__ if is_own else self.refused_in_c(called)
        if refused and (place := self._caller(frame)) is not None:
            self.doubts[f"{place} calls {refused}()"] = None

    def _note_outside(self, frame: types.FrameType) -> None:
        """Note a call of code that is not recorded, if recorded code makes it."""
        code, caller = frame.f_code, frame.f_back
        if caller is None or id(caller.f_code) not in self._known or id(code) in self._entered:
            return
        if not source.is_users(caller.f_code.co_filename):
            return
        self._entered.add(id(code))
        if not code.co_flags & _CO_OPTIMIZED or code.co_filename.startswith("<string"):
            # Bodies, and functions that a string defines, which digests follow.
            return
        refused = self.refused_in_python(frame.f_globals.get("__name__", ""), code.co_name)
        if refused and (place := self._caller(caller)) is not None:
            self.doubts[f"{place} calls {refused}()"] = None

    def _caller(self, frame: types.FrameType | None) -> str | None:
        """Return the recorded function for which the standard library makes a call; None if it is for others."""
        while frame is not None:
            file = frame.f_code.co_filename
            if self.counts(file):
                if not source.is_users(file):
                    # A function of torch.nn: what torch reads is compared.
                    return None
                return f"{source.described(file, frame.f_lineno)[0].rpartition(os.sep)[2]}:{frame.f_code.co_name}"
            if not _may_call_for_users(file):
                return None
            if frame.f_globals.get("__name__", "").partition(".")[0] in _MESSAGES:
                return None
            frame = frame.f_back
        return None


def _may_call_for_users(file: str) -> bool:
    """Return whether code of a file that does not count may run for recorded code: that of the standard library."""
    return not file.startswith("<frozen importlib") and source.is_standard(file)


# The recording of the running block.
_running: Recording | None = None


@contextmanager
def recorded(
    counts: Callable[[str], bool], refused_in_python: Callable[[str, str], str], refused_in_c: Callable[[Any], str]
) -> Iterator[Recording]:
    """Record what functions of :func:`followed` run inside the block.

    The garbage collector does not run inside: its callbacks, and finalizers of what others have left, would run
    wherever a collection starts, as if the code there called them.

    Args:
        counts, refused_in_python, refused_in_c: see :class:`Recording`.

    Raises:
        ArtifactError: a profiler is active, which follows functions too.
    """
    global _running
    if sys.getprofile() is not None:
        raise ArtifactError("a profiler of Python is active: export the step without it")
    recording = Recording(counts, refused_in_python, refused_in_c)
    environment = type(os.environ)
    read, keys = environment.__getitem__, environment.__iter__

    def read_noted(variables: Any, name: str) -> str:
        if isinstance(name, str):
            recording.variables.add(name)
        else:
            recording.doubts["the code reads os.environb"] = None
        return read(variables, name)

    def keys_noted(variables: Any) -> Iterator[str]:
        if recording._caller(sys._getframe(1)) is not None:
            recording.doubts["the code reads all environment variables"] = None
        return keys(variables)

    with (
        collection_paused(),
        replaced([(environment, "__getitem__", read_noted), (environment, "__iter__", keys_noted)]),
    ):
        _running = recording
        try:
            yield recording
        finally:
            _running = None


def followed(function: F) -> F:
    """Make a function that a recording follows, with everything that it calls."""
    return _switching(function, on=True)


def unfollowed(function: F) -> F:
    """Make a function that no recording follows, nor what it calls: to follow torch's dispatch would take long."""
    return _switching(function, on=False)


def _switching(function: F, *, on: bool) -> F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _running is None:
            return function(*args, **kwargs)
        before = sys.getprofile()
        sys.setprofile(_running.follow if on else None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(before)

    return run  # type: ignore[return-value]
