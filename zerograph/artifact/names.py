"""The names in the code of functions, and the values that they stand for."""

from __future__ import annotations

import dis
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

from zerograph.base import source


def names_in(code: types.CodeType) -> set[str]:
    """Return the names in code, and in the code inside."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _imported(code: types.CodeType) -> set[str]:
    """Return the names of the modules that code imports, and what it imports from them."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    # Opcodes are at even places.
    own = dis.get_instructions(code) if dis.opmap["IMPORT_NAME"] in code.co_code[::2] else ()
    names = {str(one.argval) for one in own if one.opname in ("IMPORT_NAME", "IMPORT_FROM")}
    return names.union(*map(_imported, inner))


def texts_of(code: types.CodeType) -> set[str]:
    """Return the names and the strings in code, and in the code inside."""
    texts = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return texts.union(*(texts_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


# Code that has one of these names may read a name that it does not show.
BY_TEXT = frozenset({"getattr", "vars", "hasattr", "__dict__", "dir", "attrgetter"})


def named_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function names with its value: globals, names that it imports, and attributes of modules there."""
    code, space = function.__code__, function.__globals__
    names, imported = sorted(names_in(code)), _imported(code)
    package = str(space.get("__package__") or "")
    builtins = cast(Any, function).__builtins__
    for name in names:
        value = space.get(name, sys.modules.get(name, builtins.get(name)))
        if value is None and name not in space:
            # An import may be relative to the module's package, or to one that contains it.
            outer = itertools.accumulate(package.split("."), "{}.{}".format) if name in imported else ()
            modules = [module for module in map(sys.modules.get, (f"{path}.{name}" for path in outer)) if module]
            for module in modules:
                yield from _attributes(f".{name}", module, names)
            if not modules:
                continue
            value = modules
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from _attributes(name, value, names)
            if BY_TEXT & set(names) and source.is_users(getattr(value, "__file__", None) or "<"):
                yield f"{name}.*", _values(vars(value))
    if "globals" in names:
        yield "*", _values(space)


def _values(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a module's names."""
    return {name: value for name, value in sorted(space.items()) if name[:2] != "__"}


def _attributes(path: str, module: types.ModuleType, names: list[str], depth: int = 3) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = vars(module).get(name)
        if value is None:
            continue
        yield f"{path}.{name}", value
        if isinstance(value, types.ModuleType) and depth:
            yield from _attributes(f"{path}.{name}", value, names, depth - 1)
