"""Python state that ``build()`` can change: values in attributes, containers, closures, globals and random generators.

A compiled step does not run ``build()``, so such values change only while ``build()`` is traced. State is collected
before the trace and compared after it (:mod:`zerograph.capture.state_changes`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from zerograph._torch import FakeTensor, hook_tables
from zerograph.base import source
from zerograph.base.names import names_in
from zerograph.capture.guards import attribute_guards

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_CONTAINERS = (dict, list, deque)
# Longer containers are compared by length only. Nothing nested deeper, and no more values, are compared.
_MAX_LENGTH, _MAX_DEPTH, _MAX_VALUES = 1000, 6, 50_000
_MISSING = "nothing"

Step = tuple[str, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: the steps that lead to it from a root object, which stays when objects between are replaced.

    Attributes:
        root: an object, a dict or the cell of a closure.
        title: the name of the root in messages.
        steps: ``("attr", name)``, ``("key", key)``, ``("index", number)``, ``("cell", None)``; a last ``("len", None)``
            is the length of a container.
        own: the root is the graph, one of its modules or an optimizer's group, whose tensors are handled elsewhere.
    """

    root: Any
    title: str
    steps: tuple[Step, ...]
    own: bool

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
            elif kind != "cell":
                name = f"len({name})" if kind == "len" else f"{name}[{key!r:.60}]" if name else str(key)
        return name

    @property
    def is_in_root(self) -> bool:
        """True if the root itself holds the value."""
        return len(self.steps) == 1

    def holder(self) -> Any:
        """Return the container or object that holds the value, or whose length it is; None if it is gone."""
        value = self.root
        with contextlib.suppress(LookupError, AttributeError, TypeError, ValueError):
            for step in self.steps[:-1]:
                value = _child(value, step)
            return value
        return None

    def read(self) -> Hashable:
        """Return a token of the present value; equal values have equal tokens."""
        value = self.root
        try:
            for step in self.steps:
                value = len(_counted(value, own=self.own)) if step[0] == "len" else _child(value, step)
        except (LookupError, AttributeError, TypeError, ValueError):
            return _MISSING
        return token(value)


def _child(value: Any, step: Step) -> Any:
    kind, key = step
    if kind == "cell":
        return value.cell_contents
    if kind == "attr":
        attributes = getattr(value, "__dict__", {})
        return attributes[key] if key in attributes else getattr(value, key)
    return value[key]


def token(value: Any) -> Hashable:
    """Return a comparable stand-in for the value, equal on all ranks; for objects and tensors only their kind."""
    if isinstance(value, float) and value != value:
        return "float", "nan"
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, (tuple, frozenset, set)):
        parts = [token(entry) for entry in value]
        return type(value).__name__, tuple(parts) if isinstance(value, tuple) else frozenset(parts)
    if isinstance(value, itertools.count):
        return "count", repr(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.size <= _MAX_LENGTH:
        return "array", str(value.dtype), value.shape, value.tobytes()
    return "object", "FakeTensor" if isinstance(value, FakeTensor) else type(value).__qualname__


@dataclass(frozen=True)
class Generator:
    """A random generator of Python or numpy, and its state at one time.

    Attributes:
        state: the state; compares by ``==``.
        get_state: returns the present state.
        set_state: sets the state.
    """

    state: Any
    get_state: Callable[[], Any]
    set_state: Callable[[Any], None]


@dataclass
class Snapshot:
    """Values, containers and random states as they were when this was taken.

    Attributes:
        values: every place with its token, by key.
        restores: functions that restore the entries of a container, by ``id``, or a value in a root, by its key.
        random: every generator, by its name in messages.
    """

    values: dict[Hashable, tuple[Place, Hashable]] = field(default_factory=dict)
    restores: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    random: dict[str, Generator] = field(default_factory=dict)

    def restore(self, *, random: bool = True) -> None:
        """Restore everything that has changed since; generators only with ``random``."""
        for restore in self.restores.values():
            restore()
        for generator in self.random.values() if random else ():
            generator.set_state(generator.state)

    def changed(self, later: Snapshot) -> list[Place]:
        """Return the places whose values differ in a later snapshot; of a container that grew only its length."""
        places = [
            place
            for key, (place, before) in self.values.items()
            if key in later.values and later.values[key][1] != before
        ]
        # Attributes and globals that are new or gone; new entries of a container change its length.
        for here, other in ((self, later), (later, self)):
            places += [place for key, (place, _) in here.values.items() if key not in other.values and place.is_in_root]
        return places

    def drawn(self, later: Snapshot) -> list[str]:
        """Return the names of the generators that have drawn before a later snapshot."""
        both = self.random.keys() & later.random.keys()
        return sorted(name for name in both if self.random[name].state != later.random[name].state)


class PythonState:
    """The state that a ``build()`` can reach.

    Args:
        build: the function, bound to its graph if it has one.
        root: holds the graph's modules.
        groups: the optimizers' parameter groups.
    """

    def __init__(self, build: Callable[..., Any], root: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        self._graph = getattr(build, "__self__", None)
        # Owners of attributes: (object, title, whether private numbers are guards of every step).
        self._owners = [] if self._graph is None else [(self._graph, "self", False)]
        self._owners += [(module, path, True) for path, module in root.named_modules()]
        # By root and first step: (root, title, first step, own).
        self._roots: dict[Hashable, tuple[Any, str, Step, bool]] = {}
        for number, group in enumerate(groups):
            for key in group:
                if key != "params":
                    self._add(group, f"param_groups[{number}]", ("key", key), own=True)
        _Reach(self._add, self._graph, root).follow(build)

    def _add(self, root: Any, title: str, step: Step, own: bool = False) -> None:
        self._roots.setdefault((id(root), step), (root, title, step, own))

    def snapshot(self) -> Snapshot:
        """Return the present state."""
        walk = _Walk(self._graph)
        for owner, title, private in self._owners:
            attributes = vars(owner)
            walk.taken.restores[id(attributes)] = _restorer(attributes)
            if isinstance(owner, nn.Module):
                # A flag that hooks are installed is restored together with the hooks.
                walk.taken.restores |= {id(hooks): _restorer(hooks) for hooks in hook_tables(owner)}
            guarded = {name for name, _ in attribute_guards(attributes, private=private)}
            for name, value in list(attributes.items()):
                # Every step compares its guards anyway.
                if name not in guarded and name not in _MODULES_OWN and not isinstance(value, nn.Module):
                    walk.visit(Place(owner, title, (("attr", name),), own=True), value, _MAX_DEPTH)
        for root, title, step, own in self._roots.values():
            with contextlib.suppress(LookupError, AttributeError, ValueError):
                walk.visit_root(Place(root, title, (step,), own), _child(root, step))
        _global_random(walk.taken)
        return walk.taken


# Attributes of torch in every module.
_MODULES_OWN = frozenset(vars(nn.Module()))


class _Walk:
    """A walk over all state that fills a snapshot."""

    def __init__(self, graph: object) -> None:
        self.taken = Snapshot()
        self._graph = graph
        self._seen: set[int] = set()

    def visit_root(self, place: Place, value: Any) -> None:
        """Add a value that a root holds, and how to restore it."""
        _remember(place, value, self.taken)
        self.visit(place, value, _MAX_DEPTH)

    def visit(self, place: Place, value: Any, depth: int) -> None:
        """Add a value and everything inside it, to ``depth`` levels."""
        if place.own and isinstance(value, Tensor):
            return
        if (generator := _generator(value)) is not None:
            self.taken.random.setdefault(place.name, generator)
            return
        children = list(_children(value)) if depth and value is not self._graph else []
        nested = isinstance(value, _CONTAINERS) or bool(children)
        if not nested:
            self.taken.values[place.key] = place, token(value)
            return
        if id(value) in self._seen or len(self.taken.values) > _MAX_VALUES:
            return
        self._seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            self.taken.restores[id(value)] = _restorer(value)
            length = Place(place.root, place.title, (*place.steps, ("len", None)), place.own)
            self.taken.values[length.key] = length, token(len(_counted(value, own=place.own)))
        elif hasattr(value, "__dict__"):
            self.taken.restores[id(vars(value))] = _restorer(vars(value))
        for step, child in children:
            self.visit(Place(place.root, place.title, (*place.steps, step), place.own), child, depth - 1)


def _counted(value: Any, *, own: bool) -> Sequence[Any]:
    """Return the entries of a container to count; tensors that modules collect are left out."""
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    return [entry for entry in entries if not isinstance(entry, Tensor)] if own else entries


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield what is inside a container, a tuple of more than plain values, or an object of a user's class."""
    if isinstance(value, dict):
        if len(value) <= _MAX_LENGTH:
            yield from ((("key", key), entry) for key, entry in value.items())
    elif isinstance(value, (list, deque)):
        if len(value) <= _MAX_LENGTH:
            yield from ((("index", number), entry) for number, entry in enumerate(value))
    elif isinstance(value, tuple):
        if any(not isinstance(entry, _PLAIN) for entry in value):
            yield from ((("index", number), entry) for number, entry in enumerate(value))
    elif is_users_object(value):
        attributes = dict(getattr(value, "__dict__", {}))
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield from ((("attr", name), attribute) for name, attribute in attributes.items())


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [slot for slot in slots if not slot.startswith("__")]


def is_users_object(value: Any) -> bool:
    """Return whether the value is an instance of a class that a user wrote, or a namespace; no module, no tensor."""
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if isinstance(value, (*_PLAIN, nn.Module, Tensor, type, types.ModuleType, torch.optim.Optimizer)) or callable(
        value
    ):
        return False
    return is_users_module(sys.modules.get(type(value).__module__))


def is_users_module(module: types.ModuleType | None) -> bool:
    """Return whether a Python module is the user's, installed models included."""
    name = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" or (name is not None and source.is_users(name)))


def _remember(place: Place, value: Any, taken: Snapshot) -> None:
    """Add to the snapshot how to restore ``value`` in a root: in an attribute, a key or a cell."""
    root, (kind, key) = place.root, place.steps[0]

    def restore() -> None:
        try:
            present = _child(root, (kind, key))
        except (LookupError, AttributeError, ValueError):
            present = _MISSING
        if present is value:
            return
        if kind == "cell":
            root.cell_contents = value
        elif kind == "attr" and isinstance(getattr(root, "__dict__", None), dict):
            vars(root)[key] = value
        elif kind == "attr":
            setattr(root, key, value)
        else:
            root[key] = value

    taken.restores[place.key] = restore


def _restorer(container: Any) -> Callable[[], None]:
    """Return a function that restores the present entries of the dict, list or deque."""
    entries = dict(container) if isinstance(container, dict) else list(container)

    def restore() -> None:
        if isinstance(entries, dict):
            for key in [key for key in container if key not in entries]:
                del container[key]
            for key, value in entries.items():
                if key not in container or container[key] is not value:
                    container[key] = value
        elif len(container) != len(entries) or any(a is not b for a, b in zip(container, entries, strict=True)):
            container.clear()
            container.extend(entries)

    return restore


class _Reach:
    """A walk from ``build()`` through the functions that it names, which adds their closures, globals and classes."""

    def __init__(self, add: Callable[..., None], graph: object, root: nn.Module) -> None:
        self._add = add
        self._graph, self._modules = graph, root
        self._seen: set[Hashable] = set()
        self._queue: deque[tuple[types.FunctionType, type | None]] = deque()

    def follow(self, build: Callable[..., Any]) -> None:
        """Walk from ``build``, the modules' ``forward()`` and functions in attributes."""
        self._meet(build, None)
        if self._graph is not None:
            self._meet(getattr(self._graph, "build", None), type(self._graph))
            self._attributes(vars(self._graph))
        for module in self._modules.modules():
            self._meet(vars(module).get("forward"), type(module))
            # Statically: modules of torch.jit create theirs on access, and only for instances.
            self._meet(inspect.getattr_static(type(module), "forward", None), type(module))
            self._attributes({name: value for name, value in vars(module).items() if name not in _MODULES_OWN})
        while self._queue:
            self._function(*self._queue.popleft())

    def _attributes(self, attributes: Mapping[str, Any]) -> None:
        for value in attributes.values():
            if callable(value) and not isinstance(value, (nn.Module, type)):
                self._meet(value, None)

    def _meet(self, value: Any, owner: type | None) -> None:
        """Queue the function inside ``value`` if a user wrote it."""
        while not isinstance(value, types.FunctionType):
            if isinstance(value, types.MethodType):
                value, owner = value.__func__, owner or type(value.__self__)
            elif isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            elif hasattr(value, "func") and callable(getattr(value, "func", None)):
                value = value.func
            else:
                return
        if (id(value), owner) not in self._seen and source.is_users(value.__code__.co_filename):
            self._seen.add((id(value), owner))
            self._queue.append((value, owner))

    def _function(self, function: types.FunctionType, owner: type | None) -> None:
        names = names_in(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(cell, name, ("cell", None))
            self._meet_value(cell, ("cell", None), names)
        for number in range(len(function.__defaults__ or ())):
            self._add(function.__defaults__, f"defaults of {function.__qualname__}", ("index", number))
        for name in function.__kwdefaults__ or ():
            self._add(function.__kwdefaults__, f"defaults of {function.__qualname__}", ("key", name))
        for name, value in vars(function).items():
            if name == "__wrapped__":
                self._meet(value, owner)
            else:
                self._add(function, function.__qualname__, ("attr", name))
        for name in names & function.__globals__.keys():
            self._add(function.__globals__, "", ("key", name))
            self._meet_value(function.__globals__, ("key", name), names)
        if owner is not None:
            self._class(owner, names)

    def _meet_value(self, root: Any, step: Step, names: set[str]) -> None:
        try:
            value = _child(root, step)
        except ValueError:
            return  # an empty cell
        if isinstance(value, types.ModuleType):
            if is_users_module(value):
                for name in names & vars(value).keys():
                    if not isinstance(vars(value)[name], (types.ModuleType, type)):
                        self._add(value, value.__name__, ("attr", name))
                        self._meet(vars(value)[name], None)
        elif isinstance(value, type):
            self._class(value, names)
        elif isinstance(value, types.FunctionType):
            self._meet(value, None)
        elif is_users_object(value):
            self._class(type(value), names)

    def _class(self, kind: type, names: set[str]) -> None:
        """Add the class attributes, own and inherited, with one of the names, and follow the methods among them."""
        for base in kind.__mro__:
            if is_users_module(sys.modules.get(base.__module__)):
                for name in names & vars(base).keys():
                    value = vars(base)[name]
                    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                        self._meet(value, kind)
                    elif not name.startswith("__") and not isinstance(value, type):
                        self._add(base, base.__name__, ("attr", name))


def _generator(value: Any) -> Generator | None:
    """Return a random generator of Python or numpy with its state; None for any other value."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Generator(value.getstate(), value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _numpy_generator(value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _numpy_generator(lambda: bits.state, functools.partial(setattr, bits, "state"))
    return None


def _numpy_generator(get_state: Callable[[], Any], set_state: Callable[[Any], None]) -> Generator:
    return Generator(_comparable(get_state()), lambda: _comparable(get_state()), set_state)


def _comparable(state: Any) -> Any:
    """Return the state with lists for arrays, whose ``==`` is no bool."""
    if isinstance(state, dict):
        return {key: _comparable(entry) for key, entry in state.items()}
    if isinstance(state, tuple):
        return tuple(_comparable(entry) for entry in state)
    return state.tolist() if hasattr(state, "tolist") else state


def _global_random(taken: Snapshot) -> None:
    taken.random["random"] = Generator(random.getstate(), random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        taken.random["numpy.random"] = _numpy_generator(numpy.random.get_state, numpy.random.set_state)
