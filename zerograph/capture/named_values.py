"""Values that ``build()`` reads by name, and that a script may change between two calls.

A trace makes constants of them: globals, closures, defaults, attributes of classes, and what is inside objects and
containers that these or the attributes of modules hold. Inside an object count the attributes that the code names. So
do torch's functions and its hooks of all modules.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
from collections.abc import Callable, Collection, Hashable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn

from zerograph._torch import dict_version, global_hooks
from zerograph.base.dictionaries import dict_class
from zerograph.capture.places import (
    CACHES,
    CONTAINERS,
    DEFAULTS,
    FUNCTIONS,
    MAX_LENGTH,
    MISSING,
    Identity,
    Place,
    PythonState,
    Step,
    is_of_library,
    is_users_object,
    token,
    walk,
)

# Scripts may replace functions and methods of torch, which layers call too.
_TORCHS: tuple[Any, ...] = (torch, Tensor, nn.functional)
# The name of the fact.
NAMED_VALUES = "values that build() reads by name"
# Others are forgotten: a value that is annealed does not come back.
_MOST_STATES = 64
# Names of functions, as they were at first: a library that one rank alone imports may add names. A prepared model has a
# class of its own, which is freed with it.
_callables: WeakKeyDictionary[Any, Collection[str]] = WeakKeyDictionary()


class NamedValues:
    """The values that code names, as they were when this was created.

    Args:
        state: the state that ``build()`` can reach.

    Attributes:
        tokens: equal for equal values, by the key of the place.
        places: the places, by key.
    """

    def __init__(self, state: PythonState) -> None:
        self.tokens: dict[Hashable, Hashable] = {}
        self.places: dict[Hashable, Place] = {}
        self._checks: list[Callable[[], bool]] = []
        holders: dict[int, tuple[Any, list[Step], list[Any]]] = {}
        named = ((place, value) for place, value in state.places() if _is_named(place, state.texts))
        for place, value, is_entered in walk(named, state.texts):
            _, steps, values = holders.setdefault(id(holder := place.holder()), (holder, [], []))
            steps.append(place.steps[-1])
            values.append(value)
            self.places[place.key] = place
            if isinstance(value, CONTAINERS):
                self.tokens[place.key] = type(value).__name__, len(value), tuple(map(_token, _ordered(value)))
                self._checks.append(_is_equal(functools.partial(_order, value)))
            else:
                self.tokens[place.key] = Identity(type(value)) if is_entered else _token(value)
                if is_users_object(value):
                    # It may get an attribute in place of its class's.
                    self._checks.append(_is_equal(functools.partial(len, getattr(value, "__dict__", ()))))
                if _changes_in_place(value):
                    self._checks.append(_is_equal(functools.partial(_token, value)))
        self._checks += [_is_equal(functools.partial(len, vars(kind))) for kind in state.classes]
        layers = {kind for module in state.modules() for kind in type(module).__mro__}
        for space in (*_TORCHS, *(kind for kind in layers if kind.__module__.startswith("torch."))):
            place = Place(space, space.__name__, (("attr", "*"),))
            self.places[place.key] = place
            self.tokens[place.key] = tuple(map(vars(space).get, _callables_of(space)))
            self._checks.append(_has_callables(space))
        place = Place(nn.Module, "hooks of all modules", (("attr", "*"),))
        self.places[place.key], self.tokens[place.key] = place, _hooks_of_scripts()
        self._checks.append(_is_equal(_hooks_of_scripts))
        self._checks += itertools.starmap(_has_objects, holders.values())

    def are_same(self) -> bool:
        """Return whether the same objects are in the same places."""
        try:
            return all(check() for check in self._checks)
        except (LookupError, AttributeError, TypeError, ValueError):
            return False


class ValueStates:
    """The last states of the named values, numbered in their order.

    Ranks compare numbers: values may differ between ranks, and have to change on all of them together.

    Attributes:
        count: of all states so far.
    """

    def __init__(self) -> None:
        self._states: list[tuple[dict[Hashable, Hashable], str]] = []
        self.count = 0
        self._left_out: set[Hashable] = set()

    def leave_out(self, before: NamedValues, after: NamedValues) -> None:
        """Leave out what a trace has changed, and what is inside: a compiled step does not change it."""
        changed = before.tokens.items() ^ after.tokens.items()
        if changed:
            self._left_out |= {key for key, _ in changed}
            self._states = [(self._counted(state), title) for state, title in self._states]

    def title_of(self, values: NamedValues) -> str:
        """Return the number of the present state and what changed when it was new; an empty text for the first."""
        now = self._counted(values.tokens)
        for state, title in self._states:
            if state == now:
                return title
        before = self._states[-1][0] if self._states else now
        names = sorted({values.places[key].name for key in now if before.get(key, MISSING) != now[key]})
        title = f"{self.count}: {', '.join(names)}" if self.count else ""
        self.count += 1
        self._states = [*self._states[1 - _MOST_STATES :], (now, title)]
        return title

    def _counted(self, tokens: dict[Hashable, Hashable]) -> dict[Hashable, Hashable]:
        return {key: one for key, one in tokens.items() if not self._is_left_out(key)} if self._left_out else tokens

    def _is_left_out(self, key: Any) -> bool:
        root, steps = key
        return any((root, steps[: number + 1]) in self._left_out for number in range(len(steps)))


def _is_named(place: Place, texts: Collection[str]) -> bool:
    """Return whether code names a place: an attribute may be for others. A private one of the graph never counts."""
    kind, key = place.steps[0]
    if isinstance(place.root, (type, types.ModuleType, dict)) and is_of_library(place.root):
        return isinstance(place.value(), FUNCTIONS) and isinstance(place.root, types.ModuleType)
    if kind == "attr" and place.own and not isinstance(place.root, nn.Module):
        # Others are zerograph's.
        return key in {*texts} and key[:1] != "_"
    # The code of a library's module is not read.
    is_layers = isinstance(place.root, nn.Module) and is_of_library(type(place.root))
    return kind != "attr" or is_layers or key in texts or key in DEFAULTS


def _token(value: Any) -> Hashable:
    one: Any = token(value)
    is_told = not isinstance(value, Tensor) and (isinstance(value, CACHES) or not callable(value))
    # Of two dates, for instance, the token tells only what they are.
    return one if is_told and one[0] != "object" else Identity(value)


def _callables_of(space: Any) -> Collection[str]:
    # Those of bases too, which may be replaced there.
    spaces = space.__mro__ if isinstance(space, type) else (space,)
    names = {name for one in spaces for name, value in vars(one).items() if callable(value)}
    return _callables.setdefault(space, names)


def _hooks_of_scripts() -> tuple[Callable[..., Any], ...]:
    """Return the hooks of all modules without those of torch, by which it counts what runs."""
    return tuple(one for one in global_hooks() if not getattr(one, "__module__", "").startswith("torch."))


def _ordered(value: Any) -> Collection[Any]:
    """Return the keys of a dict, whose order code may follow."""
    return value if isinstance(value, dict) and len(value) <= MAX_LENGTH else ()


def _order(value: Any) -> Hashable:
    return len(value), *map(id, _ordered(value))


def _changes_in_place(value: Any) -> bool:
    return isinstance(value, (set, bytearray, itertools.count, ContextVar, CACHES, numpy.ndarray))


def _is_equal(read: Callable[[], Any]) -> Callable[[], bool]:
    """Return a check that a value is equal to what it is now."""
    now = read()
    return lambda: read() == now


def _has_callables(space: Any) -> Callable[[], bool]:
    """Return a check that a class or a module of torch has the same functions."""
    # The dict itself: what vars() returns for a class refers to it.
    table: Any = gc.get_referents(vars(space))[0] if isinstance(space, type) else vars(space)
    names, version = _callables_of(space), dict_version(table)
    now = [*map(table.get, names)]

    def check() -> bool:
        nonlocal version
        if (latest := dict_version(table)) != version and [*map(table.get, names)] == now:
            version = latest
        return latest == version

    return check


def _has_objects(holder: Any, steps: Sequence[Step], values: Sequence[Any]) -> Callable[[], bool]:
    """Return a check that one holder has the same objects under all steps."""
    kind, keys = steps[0][0], [key for _, key in steps]
    if kind == "cell":
        return lambda: holder.cell_contents is values[0]
    if kind == "call":
        return lambda: holder() is values[0]
    table = getattr(holder, "__dict__", {}) if kind == "attr" else holder
    read = dict_class(table).__getitem__ if isinstance(table, dict) else operator.getitem
    get: Callable[[Any], Any] = functools.partial(read, table)
    if kind == "attr" and not all(key in table for key in keys):
        # In slots.
        get = functools.partial(getattr, holder)
    return lambda: all(map(operator.is_, map(get, keys), values))
