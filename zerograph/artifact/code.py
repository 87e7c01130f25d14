"""Digests of the Python code that a trace ran, by which another process sees whether its own code is the same.

A trace is followed, and each function of the user, of installed packages and of ``torch.nn`` that ran is named by its
module and its qualified name. Its digest covers its code, its default arguments, the values in its closure, and the
values of the globals and attributes of modules that it names. Functions among these values count by their own code:
those that ran have digests of their own. Environment variables that the trace read count too.
"""

from __future__ import annotations

import hashlib
import operator
import os
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zerograph._torch import hook_tables, untagged
from zerograph.artifact.allowed import REFLECTION, refused_in_c, refused_in_python
from zerograph.artifact.digest import Digest, Visited, counts, module_name, name_of
from zerograph.artifact.names import BY_TEXT, texts_of
from zerograph.base import recording, source
from zerograph.base.recording import Recording

_NUMBERS = (bool, int, float, str)
_VARIABLE = "environment variable "
# Attributes of torch in every module: its tables are compared, or hold modules and tensors, which are.
_MODULES_OWN = frozenset(vars(nn.Module()))


def recorded() -> AbstractContextManager[Recording]:
    """Record the functions that a trace inside the block runs, see :func:`zerograph.base.recording.recorded`."""
    return recording.recorded(counts, refused_in_python, refused_in_c)


def names_of(trace: Recording) -> list[str]:
    """Return names for what a trace ran and read: ``module:Class.function``, and environment variables."""
    functions = {name_of(code, module) for code, module in trace.codes.items()}
    return [*sorted(functions), *(f"{_VARIABLE}{name}" for name in sorted(trace.variables))]


def digests(names: Iterable[str], visited: Visited | None = None) -> dict[str, str]:
    """Return the digest of what each name stands for in this process; an empty text for one that is not there."""
    names = list(names)
    visited = Visited() if visited is None else visited
    visited.executed = frozenset(names)
    digest = Digest(visited)
    return {name: _digest_of(name, digest) for name in names}


def described(name: str) -> str:
    """Return a name of :func:`names_of` in words, for messages about its digest."""
    return f"the {name}" if name.startswith(_VARIABLE) else f"the code of {name}, or a value that it reads"


def unseen(trace: Recording, visited: Visited, named: Collection[types.CodeType]) -> list[str]:
    """Return what ran in a trace, but is not in the digests: code that no name leads to, and closures.

    Args:
        trace: what ran.
        visited: what was seen.
        named: the code that names lead to. Of other code, in attributes for instance, the globals are not compared.
    """
    missing = []
    for code, module in trace.codes.items():
        name = f"{module}:{code.co_qualname}"
        if code not in named or not (visited.parents.get(code) in trace.codes or _has_closures(code, trace, visited)):
            missing.append(f"{name} ran, and no name leads to it")
        if _is_own(code):
            missing += [f"{name} reads {text}" for text in sorted(REFLECTION.intersection(code.co_names))]
    for function, entries in visited.memos:
        if entries > trace.runs[function.__code__] and _is_own(function.__code__):
            missing.append(f"{function.__qualname__} keeps a result from before the trace")
    return missing


def _is_own(code: types.CodeType) -> bool:
    """Return whether code is the user's own, and not that of an installed package, whose version is compared."""
    return source.is_users(code.co_filename) and not source.is_installed(code.co_filename)


def _has_closures(code: types.CodeType, trace: Recording, visited: Visited) -> bool:
    """Return whether the digests saw the closure of each function of this code that ran."""
    seen = visited.functions.get(code, [])
    return all(any(all(map(operator.is_, cells, other)) for other in seen) for cells in trace.cells.get(code, ()))


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


def attribute_digests(
    root: nn.Module,
    attributes: Mapping[str, Any],
    own: Collection[object],
    visited: Visited,
    names: Collection[str] | None = None,
) -> dict[str, str]:
    """Return digests of what a graph and its modules hold besides modules and tensors, and of their classes.

    Args:
        root: has the modules as children.
        attributes: the attributes of the graph.
        own: the graph, and what else is no value of the step.
        visited: collects doubts.
        names: digest attributes of modules of these names only.
    """
    modules = {name: module for name, module in root.named_modules() if name}
    tensors = [*root.named_parameters(), *root.named_buffers()]
    visited.own = {**{id(one): "graph" for one in (*own, root)}, **{id(one): name for name, one in modules.items()}}
    visited.own |= {id(tensor): name for name, tensor in tensors}
    digest = Digest(visited)
    texts = {}
    holders = {"self": attributes, **{name: vars(module) for name, module in modules.items()}}
    for path, values in holders.items():
        for name, value in values.items():
            if name in _MODULES_OWN or _is_compared(path, name, value) or isinstance(value, (nn.Module, nn.Parameter)):
                continue
            if names is None or name in names:
                texts[f"the attribute {path}.{name}"] = digest.of(value)
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            visited.doubt(f"{path} is compiled by TorchScript")
        if hooks := [hook for table in hook_tables(module) for hook in table.values()]:
            texts[f"the hooks of {path}"] = digest.of(hooks)
    classes = dict.fromkeys(map(type, [*own, *modules.values()]))
    texts |= {f"the class {cls.__module__}.{cls.__qualname__}": digest.of(cls) for cls in classes}
    return texts


def _is_compared(path: str, name: str, value: Any) -> bool:
    """Return whether guards compare an attribute as it is, see :mod:`zerograph.capture.guards`."""
    if name[0] == "_":
        return path != "self" and isinstance(value, _NUMBERS)
    return value is None or isinstance(value, (*_NUMBERS, torch.dtype, torch.device))


def _digest_of(name: str, digest: Digest) -> str:
    if name.startswith(_VARIABLE):
        value = os.environ.get(name.removeprefix(_VARIABLE))
        # Not the value itself: some are secrets.
        return "not set" if value is None else hashlib.sha256(value.encode()).hexdigest()[:16]
    module, _, path = name.partition(":")
    found = _module(module)
    value = None if found is None else _at(found, path)
    return "" if value is None else digest.of(value)


def _at(module: types.ModuleType, path: str) -> Any:
    """Return what a path of names leads to in a module; None if there is nothing."""
    value: Any = module
    for part in path.split("."):
        # Not getattr(): it would call properties.
        value = untagged(next((vars(cls)[part] for cls in _bases(value) if part in vars(cls)), None))
    return value


def _bases(value: Any) -> tuple[Any, ...]:
    return value.__mro__ if isinstance(value, type) else (value,) if isinstance(value, types.ModuleType) else ()


def _module(name: str) -> types.ModuleType | None:
    main = sys.modules.get("__main__")
    if main is not None and module_name("__main__") == name:
        return main
    return sys.modules.get(name)
