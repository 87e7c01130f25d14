"""Record what Python code runs and reads while a step is traced: functions, environment variables, and the machine."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

from zerograph.base import source
from zerograph.errors import ArtifactError

F = TypeVar("F", bound=Callable[..., Any])
# Its result is a module that no name in the code leads to.
_IMPORT = importlib.import_module.__code__
_CO_OPTIMIZED = 0x1  # of functions; bodies of classes and modules lack it
# Functions in C that read something which the next process may not find the same: clocks, files, random numbers, names.
_OUTSIDE = frozenset(
    {"time", "posix", "nt", "_io", "io", "_random", "_socket", "_datetime", "datetime", "_uuid", "random"}
)
_HARMLESS = frozenset({"fspath", "getpid", "get_ident", "isatty", "fileno", "perf_counter", "monotonic", "flush"})
_BY_NAME = frozenset({"eval", "exec", "__import__", "input"})
# Modules of the standard library that read clocks and files for messages and imports only.
_MESSAGES = frozenset({"logging", "warnings", "linecache", "traceback", "inspect", "importlib", "tokenize"})


@dataclass
class Recording:
    """Code and reads of what ran inside a block of :func:`recorded`.

    Attributes:
        counts: returns whether the code of a file is recorded.
        codes: the name of its module, by code.
        variables: names of the environment variables that were read.
        doubts: reads of something that another process cannot compare, as text.
    """

    counts: Callable[[str], bool]
    codes: dict[types.CodeType, str] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    doubts: dict[str, None] = field(default_factory=dict)
    _other: set[types.CodeType] = field(default_factory=set)

    def follow(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Note a call; for ``sys.setprofile``."""
        if event == "call":
            code = frame.f_code
            if code in self._other or code in self.codes:
                return
            if code is _IMPORT:
                place = self._caller(frame.f_back)
                if place is not None:
                    self.doubts[f"{place} calls importlib.import_module()"] = None
            elif code.co_flags & _CO_OPTIMIZED and self.counts(code.co_filename):
                self.codes[code] = frame.f_globals.get("__name__", "")
            else:
                self._other.add(code)
        elif event == "c_call":
            self._note_builtin(frame, called)

    def _note_builtin(self, frame: types.FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        # That of a class method is the class.
        kind = owner if isinstance(owner, type) else type(owner)
        module = getattr(function, "__module__", None) or kind.__module__
        name = getattr(function, "__name__", "")
        if module == "builtins":
            if name not in _BY_NAME:
                return
        elif module not in _OUTSIDE or name in _HARMLESS:
            return
        place = self._caller(frame)
        if place is not None:
            self.doubts[f"{place} calls {module}.{name}()"] = None

    def _caller(self, frame: types.FrameType | None) -> str | None:
        """Return the recorded function for which the standard library makes a call; None if it is for others."""
        while frame is not None:
            file = frame.f_code.co_filename
            if self.counts(file):
                return f"{source.described(file, frame.f_lineno)[0].rpartition(os.sep)[2]}:{frame.f_code.co_name}"
            if file.startswith("<frozen importlib") or not source.is_standard(file):
                return None
            if frame.f_globals.get("__name__", "").partition(".")[0] in _MESSAGES:
                return None
            frame = frame.f_back
        return None


# The recording of the running block.
_running: Recording | None = None


@contextmanager
def recorded(counts: Callable[[str], bool]) -> Iterator[Recording]:
    """Record what functions of :func:`followed` run inside the block.

    Callbacks of the garbage collector are not called inside: they run wherever a collection starts.

    Args:
        counts: returns whether the code of a file is recorded.

    Raises:
        ArtifactError: a profiler is active, which follows functions too.
    """
    global _running
    if sys.getprofile() is not None:
        raise ArtifactError("a profiler of Python is active: export the step without it")
    recording = Recording(counts)
    callbacks = gc.callbacks[:]
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

    gc.callbacks.clear()
    try:
        with (
            patch.object(environment, "__getitem__", read_noted),
            patch.object(environment, "__iter__", keys_noted),
        ):
            _running = recording
            try:
                yield recording
            finally:
                _running = None
    finally:
        gc.callbacks[:] = callbacks


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
