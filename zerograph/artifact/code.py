"""Digests of what a trace read, by which another process sees whether its own code and values are the same.

A trace is followed. Each global and each attribute of a module that the code names which ran, of the user, of installed
packages or of ``torch.nn``, is digested by its place: ``module:name``. Functions among these values, and those in
classes, count by their own code; what they name counts if they ran. Environment variables that the trace read count
too.
"""

from __future__ import annotations

import operator
import os
import sys
import types
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from zerograph.artifact.allowed import REFLECTION, refused_in_c, refused_in_python
from zerograph.artifact.digest import Digest, counts, short
from zerograph.base import recording, source
from zerograph.base.names import BY_TEXT, named_values, names_in, texts_of, value_at
from zerograph.base.recording import Recording

_VARIABLE = "environment variable "


def recorded() -> AbstractContextManager[Recording]:
    """Record the functions that a trace inside the block runs, see :func:`zerograph.base.recording.recorded`."""
    return recording.recorded(counts, refused_in_python, refused_in_c)


def names_of(trace: Recording) -> list[str]:
    """Return the places that a trace read: ``module:name``, ``module:name:attribute``, and environment variables."""
    places: set[str] = set()
    for code, space in trace.codes.items():
        module = _module_name(space.get("__name__", ""))
        places.update(f"{module}:{path}" for path, _ in named_values(space, code))
        # The function or the class that has the code: an object of a library in C may lead to it.
        if (first := code.co_qualname.partition(".")[0]) in space:
            places.add(f"{module}:{first}")
        # Names that stand for nothing now, but may in another process.
        places.update(f"{module}:{name}" for name in names_in(code) if _is_own(code))
    return [*sorted(places), *(f"{_VARIABLE}{name}" for name in sorted(trace.variables))]


def digests(names: Iterable[str], digest: Digest | None = None) -> dict[str, str]:
    """Return the digest of what is at each place in this process; an empty text for a module that is not there."""
    digest = Digest() if digest is None else digest
    return {name: _digest_of(name, digest) for name in names}


def described(name: str) -> str:
    """Return a name of :func:`names_of` in words, for messages about its digest."""
    return f"the {name}" if name.startswith(_VARIABLE) else f"the code or the value of {name.replace(':', '.')}"


def unseen(trace: Recording, seen: Sequence[Digest]) -> list[str]:
    """Return what ran in a trace, but is in no digest: code that no place leads to, and results from before it.

    Args:
        trace: what ran.
        seen: have seen the places that the trace read, and what the graph holds.
    """
    missing, codes = [], set().union(*(digest.codes for digest in seen))
    made = {inner for code in trace.codes for inner in code.co_consts if isinstance(inner, types.CodeType)}

    def is_seen(code: types.CodeType) -> bool:
        """Return whether digests saw the code, and each closure of it but for those that the trace has made."""
        known = [cells for digest in seen for cells in digest.cells.get(code, ())]
        ran = () if code in made else trace.cells.get(code, ())
        return code in codes and all(any(all(map(operator.is_, cells, one)) for one in known) for cells in ran)

    for code, space in trace.codes.items():
        name = f"{space.get('__name__')}:{code.co_qualname}"
        module = _module(_module_name(space.get("__name__", "")))
        is_torchs = not source.is_users(code.co_filename)
        if not is_torchs and (not is_seen(code) or module is None or vars(module) is not space):
            missing.append(f"{name} ran, and no name leads to it")
        if _is_own(code):
            missing += [f"{name} reads {text}" for text in sorted(REFLECTION.intersection(code.co_names))]
    for function, entries in (memo for digest in seen for memo in digest.memos):
        if entries > trace.runs[function.__code__] and _is_own(function.__code__):
            missing.append(f"{function.__qualname__} keeps a result from before the trace")
    return missing


def _is_own(code: types.CodeType) -> bool:
    """Return whether code is the user's own, and not that of an installed package, whose version is compared."""
    return source.is_users(code.co_filename) and not source.is_installed(code.co_filename)


def read_names(trace: Recording) -> frozenset[str] | None:
    """Return the names of attributes that a trace may have read; None for all.

    The user's own functions may make names. Those of installed packages do for modules, which are compared.
    """
    names: set[str] = set()
    for code in trace.codes:
        named = texts_of(code)
        if named & BY_TEXT and _is_own(code):
            return None
        names |= named
    return frozenset(names)


def own_names(trace: Recording) -> frozenset[str]:
    """Return the names and strings in the user's own code that ran."""
    return frozenset().union(*(texts_of(code) for code in trace.codes if _is_own(code)))


def _digest_of(name: str, digest: Digest) -> str:
    if name.startswith(_VARIABLE):
        value = os.environ.get(name.removeprefix(_VARIABLE))
        # Not the value itself: some are secrets.
        return "not set" if value is None else short(value)
    module_name, _, path = name.partition(":")
    if (module := _module(module_name)) is None:
        return ""
    digest.silent = not source.is_users(getattr(module, "__file__", None) or "<")
    try:
        return digest.of(value_at(vars(module), path))
    finally:
        digest.silent = False


def _module_name(name: str) -> str:
    """Return a module's name; that of a script is the name of its file, by which commands import it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    is_script = name == "__main__" or name.startswith("_script_")
    return Path(file).stem if is_script and file is not None else name


def _module(name: str) -> types.ModuleType | None:
    main = sys.modules.get("__main__")
    return main if main is not None and _module_name("__main__") == name else sys.modules.get(name)
