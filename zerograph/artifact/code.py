"""Digests of the Python code that a trace ran, by which another process sees whether its own code is the same.

A trace is followed, and each function of the user, of installed packages and of ``torch.nn`` that ran is named by its
module and its qualified name. Its digest covers its code, its default arguments, the values in its closure, and the
values of the globals and attributes of modules that it names: numbers, tensors, other functions and what these name.
"""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import logging
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.base import source
from zerograph.errors import ArtifactError

_NN = str(Path(torch.__file__).parent / "nn")
_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum),
)
# Packages with which torch itself computes; what they have cached differs between processes.
_OF_TORCH = ("mpmath", "networkx", "numpy", "sympy")
# Attributes whose values differ between processes: transformers keeps a hash of strings.
_OF_PROCESS = ("_original_object_hash",)
# Longer containers, and objects nested deeper, are digested by their type and length.
_MAX_LENGTH, _MAX_DEPTH = 10_000, 12


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Collect the names of the functions that run inside the block: ``module:Class.function``.

    Callbacks of the garbage collector are left out, with what they call: they run wherever a collection starts.

    Raises:
        ArtifactError: a profiler is active, which follows functions too.
    """
    if sys.getprofile() is not None:
        raise ArtifactError("a profiler of Python is active: export the step without it")
    names: set[str] = set()
    seen: set[types.CodeType] = set()
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    collecting: types.FrameType | None = None

    def follow(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal collecting
        code = frame.f_code
        if collecting is not None:
            if event == "return" and frame is collecting:
                collecting = None
        elif event == "call" and code in callbacks:
            collecting = frame
        elif event == "call" and code not in seen:
            seen.add(code)
            if _counts(code.co_filename):
                module = frame.f_globals.get("__name__", "")
                names.add(f"{_module_name(module)}:{code.co_qualname.partition('.<locals>')[0]}")

    sys.setprofile(follow)
    try:
        yield names
    finally:
        sys.setprofile(None)


def _counts(filename: str) -> bool:
    if any(f"{os.sep}site-packages{os.sep}{package}{os.sep}" in filename for package in _OF_TORCH):
        return False
    return source.is_users(filename) or filename.startswith(_NN)


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of what each name stands for in this process; an empty text for one that is not there."""
    seen: dict[int, str] = {}
    kept: list[Any] = []
    return {name: _digest_of(name, seen, kept) for name in names}


def attribute_digests(root: nn.Module, attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of what a graph and its modules hold besides modules, tensors and plain values.

    Args:
        root: has the modules as children.
        attributes: the public attributes of the graph.
    """
    holders = {"self": attributes, **{name: vars(module) for name, module in root.named_modules() if name}}
    seen: dict[int, str] = {}
    kept: list[Any] = []
    return {
        f"the attribute {path}.{name}": _Digest(seen, kept).of(value)
        for path, values in holders.items()
        for name, value in values.items()
        if name[0] != "_" and not isinstance(value, (*_TYPES, nn.Module, nn.Parameter))
    }


def _digest_of(name: str, seen: dict[int, str], kept: list[Any]) -> str:
    module_name, _, path = name.partition(":")
    module = _module(module_name)
    value = None if module is None else _at(module, path)
    return "" if value is None else _Digest(seen, kept).of(value)


def _at(module: types.ModuleType, path: str) -> Any:
    """Return what a path of names leads to in a module; None if there is nothing."""
    value: Any = module
    for part in path.split("."):
        # Not getattr(): it would call properties.
        value = next((vars(cls)[part] for cls in _bases(value) if part in vars(cls)), None)
    return value


def _bases(value: Any) -> tuple[Any, ...]:
    return value.__mro__ if isinstance(value, type) else (value,) if isinstance(value, types.ModuleType) else ()


def _module_name(name: str) -> str:
    """Return a module's name; that of a script is the name of its file, by which commands import it."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    is_script = name == "__main__" or name.startswith("_script_")
    return Path(file).stem if is_script and file is not None else name


def _module(name: str) -> types.ModuleType | None:
    main = sys.modules.get("__main__")
    if main is not None and _module_name("__main__") == name:
        return main
    return sys.modules.get(name)


class _Digest:
    """Digests values, each object once.

    Args:
        seen: the digests so far, by ``id``.
        kept: keeps the objects alive, so that no other object gets their ``id``.
    """

    def __init__(self, seen: dict[int, str], kept: list[Any]) -> None:
        self._seen, self._kept, self._depth = seen, kept, 0

    def of(self, value: Any) -> str:
        """Return the digest of a value. Objects that refer to themselves are digested up to the reference."""
        if isinstance(value, _TYPES):
            return f"{type(value).__name__} {value!r}"
        key = id(value)
        if key not in self._seen:
            self._seen[key] = "itself"
            self._kept.append(value)
            self._depth += 1
            try:
                text = type(value).__name__ if self._depth > _MAX_DEPTH else self._text(value)
            finally:
                self._depth -= 1
            self._seen[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._seen[key]

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MAX_LENGTH:
            return f"{type(value).__name__} of {len(value)}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__} {list(map(self.of, value))}"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__} {sorted(map(self.of, value))}"
        if isinstance(value, dict):
            return f"dict {[(self.of(key), self.of(entry)) for key, entry in value.items()]}"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return f"{type(value).__name__} {self.of(value.__func__)}"
        if isinstance(value, property):
            return f"property {[self.of(function) for function in (value.fget, value.fset, value.fdel)]}"
        if isinstance(value, functools.cached_property):
            return f"cached_property {self.of(value.func)}"
        if isinstance(value, functools.partial):
            return f"partial {self.of(value.func)} {self.of(value.args)} {self.of(value.keywords)}"
        if isinstance(value, type):
            return f"class {value.__qualname__} {self._class(value)}"
        if isinstance(value, types.ModuleType):
            return "module"
        if isinstance(value, nn.Module):
            # What it holds is compared by itself where it is part of the graph.
            return f"module of {type(value).__qualname__}"
        name = getattr(value, "__qualname__", None)
        if isinstance(name, str):
            return f"{type(value).__name__} {getattr(value, '__module__', '')}.{name}"
        return self._object(value)

    def _tensor(self, value: Tensor) -> str:
        content = ""
        if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
        return f"tensor {tuple(value.shape)} {value.dtype} {content}"

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        head = f"function {function.__qualname__} {self.of(code)}"
        if not _counts(code.co_filename):
            return f"{function.__module__} {head}"
        cells = [_cell(cell) for cell in function.__closure__ or ()]
        named = [f"{name}={self.of(value)}" for name, value in _globals(function)]
        values = [function.__defaults__, function.__kwdefaults__, cells, getattr(function, "__wrapped__", None)]
        return f"{head} {list(map(self.of, values))} {named}"

    def _code(self, code: types.CodeType) -> str:
        # The line numbers count: messages and views show them.
        table = hashlib.sha256(code.co_code + code.co_linetable).hexdigest()
        constants = [self.of(constant) for constant in code.co_consts]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return f"{table} {code.co_firstlineno} {code.co_flags} {constants} {names}"

    def _class(self, cls: type) -> list[str]:
        """Return the constants of a user's class. Its functions are digested where they run."""
        if not _counts(_file_of(cls)):
            return []
        plain = {name: entry for name, entry in vars(cls).items() if name[:2] != "__" and isinstance(entry, _TYPES)}
        return [f"{name}={self.of(entry)}" for name, entry in plain.items()]

    def _object(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, logging.Logger) or not _counts(_file_of(kind)):
            # Objects of the standard library and of torch: what they have collected so far does not count.
            return f"object of {kind.__module__}.{kind.__qualname__}"
        attributes = getattr(value, "__dict__", {})
        # Sorted: some classes set their attributes in the order of a set.
        named = [(name, entry) for name, entry in sorted(attributes.items()) if name not in _OF_PROCESS]
        shown = [f"{name}={self.of(entry)}" for name, entry in named]
        return f"object of {kind.__qualname__} {shown}"


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names with their values, and the attributes that it names of modules there."""
    names = sorted(_names(function.__code__))
    space: Mapping[str, Any] = function.__globals__
    for name in names:
        if name not in space:
            continue
        value = space[name]
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from _attributes(name, value, names)


def _attributes(path: str, module: types.ModuleType, names: list[str], depth: int = 3) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = vars(module).get(name)
        if value is None:
            continue
        yield f"{path}.{name}", value
        if isinstance(value, types.ModuleType) and depth:
            yield from _attributes(f"{path}.{name}", value, names, depth - 1)


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
