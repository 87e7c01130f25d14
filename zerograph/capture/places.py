"""Places of the Python state that ``build()`` can reach, and the values there: one walk for all that depends on them.

* Guards are values of attributes that code may branch on or compute with. A captured graph is valid while they are
  equal.
* Other values, in containers, objects, closures, globals and random generators, change a step only while ``build()``
  is traced: a compiled step does not run it. They are collected before the trace and compared after it
  (:mod:`zerograph.capture.state_changes`).
* The parts of a value are also what counts in its digest (:mod:`zerograph.artifact.digest`).
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import os
import random
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph._torch import FakeTensor, global_hooks, hook_tables, module_hooks
from zerograph.base import source
from zerograph.base.dictionaries import dict_class
from zerograph.base.names import EveryName, computes_names, globals_in, modules_imported_in, names_in, texts_of
from zerograph.base.sizes import LARGE
from zerograph.capture.wrappers import is_seen_through

# Values that cannot change in place, and whose text tells all of them.
PLAIN = (
    *(type(None), type(NotImplemented), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_NUMBERS = (bool, int, float, str)
# Functions that keep what they have returned.
CACHES: Any = type(functools.cache(len))
CONTAINERS = (dict, list, deque)
# Wrappers of functions, with the attributes that count; the first is the function.
WRAPPERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.partial: ("func", "args", "keywords", "__dict__"),
}
# Longer containers are compared by length only. Nothing nested deeper, and no more values, are compared.
MAX_LENGTH, MAX_DEPTH, _MAX_VALUES = 1000, 6, 50_000
# Attributes of torch in every module.
_MODULES_OWN = frozenset(vars(nn.Module()))

Step = tuple[str, Any]
Guards = tuple[tuple[str, Any], ...]


class _Nothing:
    """The guard of a value that is no guard, and the value of a place that is gone."""


UNGUARDED, MISSING = _Nothing(), _Nothing()


class Identity:
    """A guard on an object's identity: equal to guards on the same object, which it keeps alive.

    Its text is the same on all ranks.

    Attributes:
        value: the object.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"tensor of shape {tuple(self.value.shape)} and {self.value.dtype}"
        return str(getattr(self.value, "__qualname__", type(self.value).__qualname__))


@dataclass(eq=False, slots=True)
class Place:
    """Where a value is: the steps that lead to it from a root object, which stays when objects between are replaced.

    Attributes:
        root: an object, a dict or the cell of a closure.
        title: the name of the root in messages.
        steps: ``("attr", name)``, ``("key", key)``, ``("index", number)``, ``("cell", None)``, ``("call", None)`` of a
            weak reference; a last ``("len", own)`` is the length of a container.
        own: the root is the graph, one of its modules or an optimizer's group, whose tensors are handled elsewhere.
    """

    root: Any
    title: str
    steps: tuple[Step, ...]
    own: bool = False

    @property
    def key(self) -> Hashable:
        """Identity of the place."""
        return id(self.root), self.steps

    @property
    def name(self) -> str:
        """Name of the place in messages, ``self.counts['calls']`` for instance."""
        name = self.title
        for kind, key in self.steps:
            if kind == "attr":
                name = f"{name}.{key}" if name else str(key)
            elif kind == "call":
                name = f"{name}()"
            elif kind != "cell":
                shown = type(key).__name__ if isinstance(key, Tensor) else f"{key!r:.60}"
                name = f"len({name})" if kind == "len" else f"{name}[{shown}]" if name else str(key)
        return name

    @property
    def is_in_root(self) -> bool:
        """True if the root itself holds the value."""
        return len(self.steps) == 1

    @property
    def is_length(self) -> bool:
        """True if the value is the length of a container."""
        return self.steps[-1][0] == "len"

    def at(self, step: Step) -> Place:
        """Return the place that one more step leads to."""
        return Place(self.root, self.title, (*self.steps, step), self.own)

    def holder(self) -> Any:
        """Return the container or object that holds the value, or whose length it is."""
        return _follow(self.root, self.steps[:-1])

    def value(self) -> Any:
        """Return the present value; :data:`MISSING` if it is gone."""
        return _follow(self.root, self.steps)

    def assign(self, value: Any) -> None:
        """Put a value in a place of the root, if another one is there."""
        kind, key = self.steps[0]
        if self.value() is value:
            return
        if kind in ("attr", "cell"):
            setattr(self.root, "cell_contents" if kind == "cell" else key, value)
        else:
            self.root[key] = value

    def read(self) -> Hashable:
        """Return a token of the present value; equal values have equal tokens."""
        return token(self.value())


def _follow(value: Any, steps: Iterable[Step]) -> Any:
    """Return the value that steps lead to; :data:`MISSING` if there is none."""
    try:
        for kind, key in steps:
            if kind == "cell":
                value = value.cell_contents
            elif kind == "call":
                value = value()
            elif kind == "len":
                value = len(_counted(value, own=key))
            elif kind == "attr":
                attributes = getattr(value, "__dict__", {})
                value = attributes[key] if key in attributes else getattr(value, key)
            else:
                value = dict_class(value).__getitem__(value, key) if isinstance(value, dict) else value[key]
    except (LookupError, AttributeError, TypeError, ValueError):
        return MISSING
    return value


def _counted(value: Any, *, own: bool) -> Sequence[Any]:
    """Return the entries of a container to count; tensors that modules collect are left out."""
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    return [entry for entry in entries if not isinstance(entry, Tensor)] if own else entries


def token(value: Any) -> Hashable:
    """Return a comparable stand-in for the value, equal on all ranks; for objects and tensors only their kind."""
    if isinstance(value, (float, complex)):
        # 0.0 equals -0.0, and NaN differs from itself.
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, frozenset, set)):
        tokens = map(token, value)
        return type(value).__name__, tuple(tokens) if isinstance(value, tuple) else frozenset(tokens)
    if isinstance(value, (itertools.count, slice)):
        return type(value).__name__, repr(value)
    if isinstance(value, PLAIN):
        return type(value).__name__, value
    if isinstance(value, ContextVar):
        return "ContextVar", token(value.get(None))
    if isinstance(value, CACHES):
        return "cache", value.cache_info().misses
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.nbytes > LARGE or value.dtype.hasobject:
            return "object", type(value).__qualname__
        content = numpy.ascontiguousarray(value)
        told = content.tobytes() if value.size <= MAX_LENGTH else zlib.crc32(content.view("u1").data)
        return "array", str(value.dtype), value.shape, told
    return "object", "FakeTensor" if isinstance(value, FakeTensor) else type(value).__qualname__


def parts(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield what a value consists of: entries, the function inside and what is bound to it, or attributes."""
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from ((("key", key), entry) for key, entry in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((("index", number), entry) for number, entry in enumerate(value))
    elif names := next((names for kind, names in WRAPPERS.items() if isinstance(value, kind)), ()):
        yield from ((("attr", name), getattr(value, name)) for name in names)
    elif isinstance(value, weakref.ref):
        yield ("call", None), value()
    else:
        yield from ((("attr", name), entry) for name, entry in object_attributes(value).items())


def object_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, slots included."""
    state: Any = vars(value) if isinstance(value, threading.local) else object.__getstate__(value)
    entries = state if isinstance(state, tuple) else (state,)
    return {name: entry for part in entries for name, entry in (part or {}).items()}


def attributes_of(values: Mapping[str, Any], *, private: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and guard of the attributes of a graph or a module, modules and torch's own tables left out.

    The guard of numbers, flags and tuples of them is their token, that of tensors and functions their identity. Lists,
    dicts and other objects have the guard :data:`UNGUARDED`: they may grow with every step.

    Args:
        values: by name.
        private: numbers and flags in attributes that begin with an underscore are guards too.
    """
    for name, value in list(values.items()):
        # Of torch's own only numbers count: the mode, for instance.
        if (name not in _MODULES_OWN or isinstance(value, _NUMBERS)) and not isinstance(value, nn.Module):
            yield name, value, _guard(name, value, private=private)


def _guard(name: str, value: Any, *, private: bool) -> Any:
    if isinstance(value, _NUMBERS):
        return token(value) if private or name[0] != "_" else UNGUARDED
    if name[0] == "_" or isinstance(value, (nn.Module, type, list, dict)):
        return UNGUARDED
    if value is None or isinstance(value, (torch.dtype, torch.device)) or _is_of_numbers(value):
        return token(value)
    return Identity(value) if isinstance(value, Tensor) or callable(value) else UNGUARDED


def _is_of_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        entry is None or isinstance(entry, _NUMBERS) or _is_of_numbers(entry) for entry in value
    )


def attribute_guards(values: Mapping[str, Any], *, private: bool = False) -> Guards:
    """Return the guards of attributes. The arguments are those of :func:`attributes_of`."""
    return tuple((name, guard) for name, _, guard in attributes_of(values, private=private) if guard is not UNGUARDED)


def module_guards(root: nn.Module) -> tuple[Any, ...]:
    """Return the guards of a module and its submodules: class, mode, numbers, flags, tensors, functions and hooks.

    Attributes of a wrapper that tracing sees through are none: they differ between ranks.
    """
    return tuple(
        (
            name,
            type(module).__qualname__,
            (
                *(() if is_seen_through(module) else attribute_guards(vars(module), private=True)),
                *map(Identity, (*module_hooks(module), *(global_hooks() if module is root else ()))),
            ),
        )
        for name, module in root.named_modules()
    )


def build_guards(build: Callable[..., Any], root: nn.Module) -> tuple[Any, ...]:
    """Return the guards of the modules, and of the graph that ``build`` is a method of."""
    owner = getattr(build, "__self__", None)
    return module_guards(root), () if owner is None else attribute_guards(vars(owner))


def walk(
    places: Iterable[tuple[Place, Any]], names: Collection[str] | None = None
) -> Iterator[tuple[Place, Any, bool]]:
    """Yield places and values with all that is inside these, and whether a value counts by what is inside.

    A container or object is entered once, by the first place that leads to it. With names, all such places are yielded,
    and the tensors in containers and objects that modules hold, too.

    Args:
        places: where to begin, with the values there.
        names: the attributes of objects that count; None for all.
    """
    waiting, entered, number = [*places][::-1], set[int](), 0
    while waiting:
        place, value = waiting.pop()
        if place.own and isinstance(value, Tensor) and names is None:
            continue
        inside = [*_inside(value, names)] if len(place.steps) <= MAX_DEPTH else []
        is_entered = bool(inside) or isinstance(value, CONTAINERS)
        if is_entered and (id(value) in entered or number > _MAX_VALUES):
            if names is not None:
                yield place, value, is_entered
            continue
        if is_entered:
            entered.add(id(value))
        number += 1
        yield place, value, is_entered
        waiting += [(place.at(step), part) for step, part in reversed(inside)]


def _inside(value: Any, names: Collection[str] | None) -> Iterable[tuple[Step, Any]]:
    """Return what is inside a container, a tuple of more than plain values, or an object of a user's class."""
    if isinstance(value, CONTAINERS):
        is_walked = len(value) <= MAX_LENGTH
    elif isinstance(value, tuple):
        is_walked = any(not isinstance(entry, PLAIN) for entry in value)
    elif isinstance(value, _BOUND) or (names is not None and isinstance(value, LRScheduler)):
        # The objects that they are bound to or refer to, and rates.
        is_walked = True
    elif names is not None and isinstance(value, torch.optim.Optimizer):
        return [(("attr", "param_groups"), value.param_groups)]
    else:
        entries = parts(value) if is_users_object(value) else ()
        if names is None:
            return entries
        # Libraries change their own objects, on some ranks only: what saves a model notes it in the configuration.
        return [] if is_of_library(type(value)) else [(step, entry) for step, entry in entries if step[1] in names]
    return parts(value) if is_walked else ()


# State of the standard library by what code reads it with: where it is.
_STATE_OF_PYTHON: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(("environ", "getenv"), (vars(os.environ), "_data")),
    "warn": (vars(warnings), "filters"),
}
DEFAULTS = ("__defaults__", "__kwdefaults__")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_SPACES = (types.ModuleType, type)
_OF_CREATION = frozenset({"__init__", "__new__", "__post_init__"})
# Special methods that no call of a model runs, unless its code makes or pickles such an object.
_NOT_CALLED = _OF_CREATION | {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__init_subclass__"}
_BOUND = (types.MethodType, functools.partial, weakref.ref)
_NO_USERS = (*PLAIN, nn.Module, Tensor, type, types.ModuleType, torch.optim.Optimizer, random.Random)


def is_users_object(value: Any) -> bool:
    """Return whether the value is an instance of a class that a user wrote, or a namespace; no module, no tensor."""
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace, threading.local)):
        return True
    if isinstance(value, _NO_USERS):
        return False
    return is_users_module(sys.modules.get(type(value).__module__))


def _is_scripts(value: Any) -> bool:
    """Return whether a value is a function of the script, in a table of functions for instance."""
    return isinstance(value, types.FunctionType) and not source.is_installed(value.__code__.co_filename)


def is_of_library(root: Any) -> bool:
    """Return whether a class, a module or the globals of one are of an installed package."""
    if isinstance(root, type):
        root = sys.modules.get(root.__module__)
    file = root.get("__file__") if isinstance(root, dict) else getattr(root, "__file__", None)
    return isinstance(file, str) and source.is_installed(file)


def is_users_module(module: types.ModuleType | None) -> bool:
    """Return whether a Python module is the user's, installed models included."""
    name = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" or (name is not None and source.is_users(name)))


class PythonState:
    """The state that a ``build()`` can reach.

    That is what attributes hold, and what the functions name that a user wrote: from ``build()``, the modules'
    ``forward()`` and functions in attributes on, their closures, defaults, globals and classes.

    Args:
        build: the function, bound to its graph if it has one.
        root: holds the graph's modules.
        groups: the optimizers' parameter groups.

    Attributes:
        texts: the names and strings in the code of the functions.
        classes: those whose attributes count.
    """

    def __init__(self, build: Callable[..., Any], root: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        graph = getattr(build, "__self__", None)
        # Owners of attributes, with their titles; of the first, plain attributes are guards. Other roots with one step,
        # by key.
        self._owners: list[tuple[Any, str]] = [] if graph is None else [(graph, "self")]
        self._owners += [(module, path) for path, module in root.named_modules()]
        self._guarded = len(self._owners)
        self.texts: set[str] = set()
        self.classes: set[type] = set()
        self._roots: dict[Hashable, Place] = {}
        self._met: set[Hashable] = set()
        self._functions: deque[tuple[types.FunctionType, type | None]] = deque()
        for number, group in enumerate(groups):
            for key in group:
                if key != "params":
                    self._add(group, f"param_groups[{number}]", ("key", key), own=True)
        self._meet(build, None)
        if graph is not None:
            self._meet(getattr(graph, "build", None), type(graph))
        for owner, _ in [*self._owners]:
            self._meet_functions_of(owner)
        self._follow_functions()
        # Methods of an object may lead to others.
        known = -1
        while known != (known := len(self.texts)):
            values = [value for _, value, _ in walk(self.places())]
            # Torch does not know modules in lists.
            for one in [*values, *(entry for owner, _ in self._owners for entry in vars(owner).values())]:
                if isinstance(one, (nn.Module, CACHES)) or _is_scripts(one):
                    self._meet_named(one, set())
            objects = [*filter(is_users_object, values)]
            for kind in {type(one) for one in (*objects, *self.modules())}:
                if not is_of_library(kind):
                    self._add_class(kind, self.texts)
            self._follow_functions()

    def _meet_functions_of(self, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            # Statically: modules of torch.jit create theirs on access, and only for instances.
            self._meet(inspect.getattr_static(type(owner), "forward", None), type(owner))
            self._add_class(type(owner), {"forward"})
        for value in vars(owner).values():
            if callable(value) and not isinstance(value, (nn.Module, type)):
                self._meet(value, type(owner))

    def _follow_functions(self) -> None:
        while self._functions:
            self._follow_names(*self._functions.popleft())

    def _add(self, root: Any, title: str, step: Step, own: bool = False) -> Any:
        """Add a place of a root; return its value."""
        place = Place(root, title, (step,), own)
        return self._roots.setdefault(place.key, place).value()

    def _meet(self, value: Any, owner: type | None) -> None:
        """Queue the function inside ``value`` if a user wrote it."""
        while not isinstance(value, types.FunctionType):
            if isinstance(value, types.MethodType):
                owner = owner or type(value.__self__)
            names = next((names for kind, names in WRAPPERS.items() if isinstance(value, kind)), ("func",))
            names = ("__wrapped__",) if isinstance(value, CACHES) else names
            if not callable(value := getattr(value, names[0], None)):
                return
        if not source.is_users(value.__code__.co_filename) and hasattr(value, "__wrapped__"):
            # A decorator of torch's, no_grad for instance.
            self._meet(value.__wrapped__, owner)
        if (id(value), owner) not in self._met and source.is_users(value.__code__.co_filename):
            self._met.add((id(value), owner))
            self._functions.append((value, owner))

    def _follow_names(self, function: types.FunctionType, owner: type | None) -> None:
        """Add what a function holds, and what it names among globals and in its class."""
        names = names_in(function.__code__)
        if computes_names(function.__code__) and not source.is_installed(function.__code__.co_filename):
            self.texts = EveryName(self.texts)
        self.texts |= texts_of(function.__code__)
        for name in DEFAULTS:
            self._add(function, function.__qualname__, ("attr", name))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = self._add(cell, name, ("cell", None))
            if name == "__class__" and isinstance(value, type):
                # Of super(): it makes no object.
                self._add_class(value, names)
            else:
                self._meet_named(value, names)
        for name, value in vars(function).items():
            if name == "__wrapped__":
                self._meet(value, owner)
            else:
                self._add(function, function.__qualname__, ("attr", name))
        for name, (holder, key) in _STATE_OF_PYTHON.items():
            if name in names:
                self._add(holder, name, ("key", key))
        by_text = texts_of(function.__code__) if "globals" in names else set()
        for name in (globals_in(function.__code__) | by_text) & function.__globals__.keys():
            self._meet_named(self._add(function.__globals__, "", ("key", name)), names)
        for _, module in modules_imported_in(function.__code__, function.__globals__):
            self._meet_named(module, names)
        if owner is not None:
            self._add_class(owner, texts_of(function.__code__))

    def _meet_named(self, value: Any, names: set[str]) -> None:
        """Follow a function, and add what a user's module or class has under the names."""
        if isinstance(value, types.ModuleType):
            # Of libraries only functions: a script may replace them.
            for name in names & vars(value).keys():
                one = vars(value)[name]
                if isinstance(one, FUNCTIONS) or (is_users_module(value) and not isinstance(one, _SPACES)):
                    self._meet(self._add(value, value.__name__, ("attr", name)), None)
        elif isinstance(value, (types.FunctionType, CACHES, *_BOUND)):
            self._meet(value, None)
        elif isinstance(value, nn.Module):
            known = {id(owner) for owner, _ in self._owners}
            for name, module in value.named_modules(prefix=type(value).__name__):
                if id(module) not in known:
                    self._owners.append((module, name))
                    self._meet_functions_of(module)
        elif isinstance(value, type):
            self._add_class(value, names, creates=True)
        elif is_users_object(value):
            self._add_class(type(value), names)

    def _add_class(self, kind: type, names: set[str], *, creates: bool = False) -> None:
        """Add the class attributes, own and inherited, with one of the names, and follow the methods among them.

        Methods that Python calls, such as ``__call__`` and ``__getattr__``, have names that code does not show.
        """
        for base in (*kind.__mro__, *inspect.getmro(type(kind))):
            if not is_users_module(sys.modules.get(base.__module__)):
                continue
            self.classes.add(base)
            for name, value in [*vars(base).items()]:
                is_function = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
                is_special = name[:2] == name[-2:] == "__"
                is_run = name in names or (is_function and is_special)
                if not (creates and name in _OF_CREATION if name in _NOT_CALLED else is_run):
                    continue
                is_known = (id(base), (("attr", name),)) in self._roots
                if is_function:
                    self.texts.add(name)
                    self._meet(self._add(base, base.__name__, ("attr", name)), kind)
                elif not is_special and not is_known and not isinstance(value, type):
                    self._meet_named(self._add(base, base.__name__, ("attr", name)), names)

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules that the functions reach."""
        yield from (owner for owner, _ in self._owners if isinstance(owner, nn.Module))

    def attributes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the attributes of the graph and its own modules, with their titles."""
        return [(title, vars(owner)) for owner, title in self._owners[: self._guarded]]

    def tables(self) -> Iterator[dict[Any, Any]]:
        """Yield the dicts that hold the attributes of the graph and its modules, and their hooks."""
        for owner, _ in self._owners:
            yield from (vars(owner), *(hook_tables(owner) if isinstance(owner, nn.Module) else ()))

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Yield the places in roots, but for guards, with their present values."""
        for number, (owner, title) in enumerate(self._owners):
            is_guarded = number < self._guarded
            for name, value, guard in attributes_of(vars(owner), private=isinstance(owner, nn.Module)):
                # An object with __call__ is guarded, but not what it holds.
                if guard is UNGUARDED or not is_guarded or isinstance(value, _BOUND) or is_users_object(value):
                    yield Place(owner, title, (("attr", name),), own=is_guarded), value
        for place in self._roots.values():
            if (value := place.value()) is not MISSING:
                yield place, value
