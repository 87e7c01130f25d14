"""Python state that ``build()`` can change: values in attributes, containers, closures, globals and random generators.

A compiled step does not run ``build()``, so what ``build()`` changes goes on changing only while it is traced. State is
found before the trace and compared after it; :mod:`zerograph.capture.state_changes` says what follows.
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
from zerograph.capture.guards import attribute_guards

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_CONTAINERS = (dict, list, deque)
# Containers longer than this count by their length; what lies deeper than this is not looked at; nor is more than this.
_LONGEST, _DEEPEST, _MOST = 1000, 6, 50_000
_MISSING = "nothing"

Step = tuple[str, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: the steps that lead to it from a root which stays, whatever objects lie between.

    Attributes:
        root: an object, a dict or the cell of a closure.
        title: what messages call the root.
        steps: ``("attr", name)``, ``("key", key)``, ``("index", number)``, ``("cell", None)``; a last ``("len", None)``
            is the length of a container.
        own: the root is the graph, one of its modules or an optimizer's group, whose tensors are dealt with elsewhere.
    """

    root: Any
    title: str
    steps: tuple[Step, ...]
    own: bool

    @property
    def key(self) -> Hashable:
        return id(self.root), self.steps

    @property
    def name(self) -> str:
        """What messages call it, ``self.counts['calls']`` for instance."""
        name = self.title
        for kind, key in self.steps:
            if kind == "attr":
                name = f"{name}.{key}" if name else str(key)
            elif kind != "cell":
                name = f"len({name})" if kind == "len" else f"{name}[{key!r:.60}]" if name else str(key)
        return name

    @property
    def first(self) -> bool:
        """Whether the root itself holds the value."""
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
        """A token of the value now, which equals that of an equal value."""
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
        held = getattr(value, "__dict__", {})
        return held[key] if key in held else getattr(value, key)
    return value[key]


def token(value: Any) -> Hashable:
    """Return what tells the value from others, equal on all ranks; of objects and tensors only their kind."""
    if isinstance(value, float) and value != value:
        return "float", "nan"
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, (tuple, frozenset, set)):
        parts = [token(one) for one in value]
        return type(value).__name__, tuple(parts) if isinstance(value, tuple) else frozenset(parts)
    if isinstance(value, itertools.count):
        return "count", repr(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.size <= _LONGEST:
        return "array", str(value.dtype), value.shape, value.tobytes()
    return "object", "FakeTensor" if isinstance(value, FakeTensor) else type(value).__qualname__


@dataclass(frozen=True)
class Generator:
    """A random generator of Python or numpy as it was.

    Attributes:
        state: compares by ``==``.
        read: gets the state that it has now.
        put: sets one.
    """

    state: Any
    read: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass
class Snapshot:
    """Values, containers and random states as they were when this was taken.

    Attributes:
        values: every place with its token, by key.
        restores: what puts back the entries of a container, by ``id``, or what a root holds, by the place's key.
        random: every generator, by what messages call it.
    """

    values: dict[Hashable, tuple[Place, Hashable]] = field(default_factory=dict)
    restores: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    random: dict[str, Generator] = field(default_factory=dict)

    def restore(self, *, random: bool = True) -> None:
        """Put back everything that has changed since."""
        for one in self.restores.values():
            one()
        for generator in self.random.values() if random else ():
            generator.put(generator.state)

    def changed(self, later: Snapshot) -> list[Place]:
        """The places whose values differ in a later snapshot; where a container grew only its length."""
        places = [
            place
            for key, (place, before) in self.values.items()
            if key in later.values and later.values[key][1] != before
        ]
        # An attribute or global that is new or gone; of what is in a container the length tells.
        for one, other in ((self, later), (later, self)):
            places += [place for key, (place, _) in one.values.items() if key not in other.values and place.first]
        return places

    def drawn(self, later: Snapshot) -> list[str]:
        """The generators that have drawn until a later snapshot."""
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
        """Return everything as it is now."""
        walk = _Walk(self._graph)
        for owner, title, private in self._owners:
            held = vars(owner)
            walk.taken.restores[id(held)] = _restorer(held)
            if isinstance(owner, nn.Module):
                # A flag that says that hooks are there goes back together with them.
                walk.taken.restores |= {id(hooks): _restorer(hooks) for hooks in hook_tables(owner)}
            guarded = {name for name, _ in attribute_guards(held, private=private)}
            for name, value in list(held.items()):
                # Numbers that every step depends on are compared anyway.
                if name not in guarded and name not in _MODULES_OWN and not isinstance(value, nn.Module):
                    walk.visit(Place(owner, title, (("attr", name),), own=True), value, _DEEPEST)
        for root, title, step, own in self._roots.values():
            with contextlib.suppress(LookupError, AttributeError, ValueError):
                walk.root(Place(root, title, (step,), own), _child(root, step))
        _global_random(walk.taken)
        return walk.taken


# Held by every module; torch's.
_MODULES_OWN = frozenset(vars(nn.Module()))


class _Walk:
    """One pass over all state, which fills a snapshot."""

    def __init__(self, graph: object) -> None:
        self.taken = Snapshot()
        self._graph = graph
        self._seen: set[int] = set()

    def root(self, place: Place, value: Any) -> None:
        _remember(place, value, self.taken)
        self.visit(place, value, _DEEPEST)

    def visit(self, place: Place, value: Any, depth: int) -> None:
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
        if id(value) in self._seen or len(self.taken.values) > _MOST:
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
    """The entries of a container that count: tensors that modules collect do not."""
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    return [one for one in entries if not isinstance(one, Tensor)] if own else entries


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    """What is inside a container, a tuple of more than plain values, or an object of a user's class."""
    if isinstance(value, dict):
        if len(value) <= _LONGEST:
            yield from ((("key", key), one) for key, one in value.items())
    elif isinstance(value, (list, deque)):
        if len(value) <= _LONGEST:
            yield from ((("index", number), one) for number, one in enumerate(value))
    elif isinstance(value, tuple):
        if any(not isinstance(one, _PLAIN) for one in value):
            yield from ((("index", number), one) for number, one in enumerate(value))
    elif is_users_object(value):
        held = dict(getattr(value, "__dict__", {}))
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield from ((("attr", name), one) for name, one in held.items())


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [one for one in slots if not one.startswith("__")]


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
    """Note how to put ``value`` back where a root holds it: into an attribute, a key or a cell."""
    root, (kind, key) = place.root, place.steps[0]

    def restore() -> None:
        try:
            now = _child(root, (kind, key))
        except (LookupError, AttributeError, ValueError):
            now = _MISSING
        if now is value:
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
    """Return what puts back the entries that the dict, list or deque has now."""
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
    """Follows ``build()`` through the functions that it names, and adds their closures, globals and classes."""

    def __init__(self, add: Callable[..., None], graph: object, root: nn.Module) -> None:
        self._add = add
        self._graph, self._modules = graph, root
        self._seen: set[Hashable] = set()
        self._queue: deque[tuple[types.FunctionType, type | None]] = deque()

    def follow(self, build: Callable[..., Any]) -> None:
        self._meet(build, None)
        if self._graph is not None:
            self._meet(getattr(self._graph, "build", None), type(self._graph))
            self._attributes(vars(self._graph))
        for module in self._modules.modules():
            self._meet(vars(module).get("forward"), type(module))
            # Statically: that of torch.jit's modules is made when it is asked for, of an instance only.
            self._meet(inspect.getattr_static(type(module), "forward", None), type(module))
            self._attributes({name: one for name, one in vars(module).items() if name not in _MODULES_OWN})
        while self._queue:
            self._function(*self._queue.popleft())

    def _attributes(self, held: Mapping[str, Any]) -> None:
        for value in held.values():
            if callable(value) and not isinstance(value, (nn.Module, type)):
                self._meet(value, None)

    def _meet(self, value: Any, owner: type | None) -> None:
        """Queue the function that is in ``value``, if it is one of the user's."""
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
        names = _names(function.__code__)
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
            return  # a cell that is empty yet
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
        """Add what the class and those that it derives from hold under one of the names, and follow their methods."""
        for one in kind.__mro__:
            if is_users_module(sys.modules.get(one.__module__)):
                for name in names & vars(one).keys():
                    value = vars(one)[name]
                    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                        self._meet(value, kind)
                    elif not name.startswith("__") and not isinstance(value, type):
                        self._add(one, one.__name__, ("attr", name))


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that a function uses, and those inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _generator(value: Any) -> Generator | None:
    """The state of a random generator of Python or numpy; None of anything else."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Generator(value.getstate(), value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _numpys(value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _numpys(lambda: bits.state, functools.partial(setattr, bits, "state"))
    return None


def _numpys(read: Callable[[], Any], put: Callable[[Any], None]) -> Generator:
    return Generator(_comparable(read()), lambda: _comparable(read()), put)


def _comparable(state: Any) -> Any:
    """The same state without arrays, whose ``==`` is an array."""
    if isinstance(state, dict):
        return {key: _comparable(one) for key, one in state.items()}
    if isinstance(state, tuple):
        return tuple(_comparable(one) for one in state)
    return state.tolist() if hasattr(state, "tolist") else state


def _global_random(taken: Snapshot) -> None:
    taken.random["random"] = Generator(random.getstate(), random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        taken.random["numpy.random"] = _numpys(numpy.random.get_state, numpy.random.set_state)
