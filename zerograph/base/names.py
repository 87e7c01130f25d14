"""The names in code, and the values that they stand for."""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from zerograph.base import source

# Code that has one of these names may read a name that it does not show.
BY_TEXT = frozenset({"getattr", "vars", "hasattr", "__dict__", "dir", "attrgetter"})
# In place of a name: all names.
_ALL = "*"
# Of modules in modules.
_DEPTH = 4
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_OF_GLOBALS = {_LOAD_GLOBAL, *(dis.opmap[name] for name in ("LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"))}


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names in code, and in the code inside."""
    return {name for inner in with_inner(code) for name in inner.co_names}


def globals_in(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads or writes, and the code inside."""
    names: set[str] = set()
    for inner in with_inner(code):
        extended, instructions = 0, inner.co_code
        # Opcodes are at even places, and a number of more than a byte is in several of them.
        for opcode, number in zip(instructions[::2], instructions[1::2], strict=True):
            number |= extended
            extended = number << 8 if opcode == dis.EXTENDED_ARG else 0
            if opcode in _OF_GLOBALS:
                # The lowest bit says how it is called.
                names.add(inner.co_names[number >> 1 if opcode == _LOAD_GLOBAL else number])
    return names


def texts_of(code: types.CodeType) -> set[str]:
    """Return the names and the strings in code, and in the code inside; of strings with dots also the parts."""
    constants = {constant for inner in with_inner(code) for constant in inner.co_consts if isinstance(constant, str)}
    return names_in(code) | constants | {part for one in constants for part in one.split(".")}


class EveryName(set[str]):
    """Names in code, beside which any other counts."""

    def __contains__(self, name: object) -> bool:
        return True


def computes_names(code: types.CodeType) -> bool:
    """Return whether code, or the code inside, may read an attribute by a name that is no string in it."""
    return any(map(_computes_names, with_inner(code)))


@functools.cache
def _computes_names(code: types.CodeType) -> bool:
    if "getattr" not in code.co_names:
        return False
    instructions = [*dis.get_instructions(code)]
    for number, one in enumerate(instructions):
        if one.argval == "getattr" and one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            # The arguments, up to the call.
            arguments = list(itertools.takewhile(lambda one: "CALL" not in one.opname, instructions[number + 1 :]))
            if not any(one.opname == "LOAD_CONST" and isinstance(one.argval, str) for one in arguments):
                return True
            if any(one.opname.startswith(("BUILD_STRING", "FORMAT", "BINARY_OP")) for one in arguments):
                return True
    return False


def named_values(space: Mapping[str, Any], code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield what code names, by a path that :func:`value_at` follows: globals, imports, attributes of modules there.

    Args:
        space: the globals of the code.
        code: that of a function.
    """
    names = sorted(names_in(code))
    for name in names:
        if (value := _look_up(space, name)) is not None or name in space:
            yield from _with_attributes(name, value, names)
    for path, module in modules_imported_in(code, space):
        if path not in names:
            yield from _with_attributes(path, module, names)
    if "globals" in names:
        yield _ALL, values_of(space)


def modules_imported_in(code: types.CodeType, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the modules that code with these globals imports itself."""
    package = str(space.get("__package__") or "")
    # An import may be relative to the module's package, or to one that contains it.
    outer = ["", *(f"{one}." for one in itertools.accumulate(package.split("."), "{}.{}".format) if one)]
    paths = (one + name for name in sorted(_imported(code)) for one in outer)
    yield from ((path, sys.modules[path]) for path in paths if path in sys.modules)


def value_at(space: Mapping[str, Any], path: str) -> Any:
    """Return what a path stands for among globals; None if there is nothing."""
    first, *rest = path.split(":")
    value = values_of(space) if first == _ALL else _look_up(space, first)
    for name in rest:
        attributes = vars(value) if isinstance(value, types.ModuleType) else {}
        value = values_of(attributes) if name == _ALL else attributes.get(name)
    return value


def _look_up(space: Mapping[str, Any], name: str) -> Any:
    return space.get(name, sys.modules.get(name, vars(builtins).get(name)))


def _with_attributes(path: str, value: Any, names: Collection[str], depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, types.ModuleType) and depth:
        for name in names:
            if (attribute := vars(value).get(name)) is not None:
                yield from _with_attributes(f"{path}:{name}", attribute, names, depth - 1)
        if depth == _DEPTH and not BY_TEXT.isdisjoint(names) and source.is_users(value.__dict__.get("__file__") or "<"):
            yield f"{path}:{_ALL}", values_of(vars(value))


def values_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a module's names, sorted by these."""
    return {name: value for name, value in sorted(space.items()) if name[:2] != "__"}


def _imported(code: types.CodeType) -> set[str]:
    """Return the names of the modules that code imports, and what it imports from them."""
    # Opcodes are at even places.
    importing = [one for one in with_inner(code) if dis.opmap["IMPORT_NAME"] in one.co_code[::2]]
    instructions = (instruction for one in importing for instruction in dis.get_instructions(one))
    return {str(one.argval) for one in instructions if one.opname in ("IMPORT_NAME", "IMPORT_FROM")}
