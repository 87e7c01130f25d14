"""Find what Python state ``build()`` changes, and whether it draws random numbers of Python or numpy.

``build()`` is traced again, from the state that the first trace left, and the graphs are compared:

* State that the second trace does not change is a cache. State that it changes again would go on changing in plain
  PyTorch: such values become guards, with a warning that the step is compiled again as long as they change.
* Guards of modules and attributes that only the first trace changed were set up at the first forward. If both graphs
  are equal, the step is valid under the new guards, too.
* Random generators are made to yield their lowest, then their highest numbers. If the graphs differ, the step depends
  on numbers that would be the same in every step, which is an error. If not, the draws only cause a warning.
"""

from __future__ import annotations

import array
import contextlib
import functools
import operator
import queue
import random
import re
import sys
import types
from collections import deque
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.base.dictionaries import dict_class
from zerograph.base.sizes import LARGE
from zerograph.capture.module_attributes import lost_tensors, refuse_constants
from zerograph.capture.places import (
    CACHES,
    CONTAINERS,
    MAX_DEPTH,
    MAX_LENGTH,
    MISSING,
    Place,
    PythonState,
    build_guards,
    object_attributes,
    token,
    walk,
)
from zerograph.errors import CaptureError

GeneratorFunctions = tuple[Callable[[], Any], Callable[[Any], None]]
# The generators of Python and numpy that a process has, by their names in messages.
OF_PROCESS: dict[str, GeneratorFunctions] = {
    "random": (random.getstate, random.setstate),
    "numpy.random": (functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state),
}


@dataclass(frozen=True)
class StateChanges:
    """Consequences of the Python state that a trace changed.

    Attributes:
        guards: places whose values the graph is valid for; each step compares them.
        warnings: messages for the user.
        valid_after_trace: the trace changed guards of modules or attributes, as models do that install hooks at their
            first forward. The graph is the same for the guards that the trace left.
    """

    guards: tuple[Place, ...] = ()
    warnings: tuple[str, ...] = ()
    valid_after_trace: bool = False


class Generator:
    """A random generator, or another value that can be read and set, and its state when this was created.

    Args:
        functions: those that read and set its state.

    Attributes:
        state: the state.
        set_state: sets the state.
    """

    def __init__(self, functions: GeneratorFunctions) -> None:
        self._read, self.set_state = functions
        self.state = self._read()

    def get_state(self) -> Any:
        """Return the present state in a form that can be compared."""
        return comparable(self._read())

    def has_moved(self) -> bool:
        """Return whether the generator is in another state now."""
        return bool(self.get_state() != comparable(self.state))


def restore_generators(generators: Iterable[Generator]) -> None:
    """Restore the states of generators."""
    for generator in generators:
        generator.set_state(generator.state)


class Snapshot:
    """Values, containers and random states as they were when this was taken.

    Args:
        state: the state that ``build()`` can reach.

    Attributes:
        values: every place with its token, by key.
        restores: functions that restore a container or an object, by ``id``, or a value in a root, by its key.
        contents: containers in attributes of the graph and its own modules.
        random: every generator, by its name in messages.
        iterators: names of iterators and files, whose state cannot be compared or restored.
    """

    def __init__(self, state: PythonState) -> None:
        # A flag that hooks are installed is restored together with the hooks.
        names = ("_parameters", "_buffers")
        tables = (table.get(name) for _, table in state.attributes() for name in names)
        self.contents: list[Any] = [table for table in tables if isinstance(table, dict)]
        self.restores: dict[Hashable, Callable[..., None]] = {
            id(table): _restorer(table) for table in (*state.tables(), *self.contents)
        }
        self.values: dict[Hashable, tuple[Place, Hashable]] = {}
        self.random: dict[str, Generator] = {}
        self.iterators: list[str] = []
        places = [*state.places()]
        self.restores |= {place.key: functools.partial(place.assign, value) for place, value in places}
        for place, value, is_entered in walk(places):
            if place.own and isinstance(value, (*CONTAINERS, set)):
                # The walk leaves out what is deep inside, or in long containers.
                is_whole = len(place.steps) <= MAX_DEPTH and len(value) <= MAX_LENGTH
                self.contents += [value] if is_whole else _containers(value, set())
            if (functions := generator_functions(value)) is not None:
                self.random.setdefault(place.name, Generator(functions))
            elif not is_entered:
                self.values[place.key] = place, value.tobytes() if _is_array(value) else token(value)
                if _is_advanced(value) and (not place.own or place.steps[0][1] in state.texts):
                    self.iterators.append(place.name)
                if isinstance(value, CACHES):
                    self.restores[id(value)] = functools.partial(_cleared, value, value.cache_info().misses)
                elif isinstance(value, set) or _is_array(value):
                    self.restores[id(value)] = functools.partial(_put_back, value, value.copy())
            elif not isinstance(value, tuple):
                self.restores[id(value)] = _restorer(value)
            if isinstance(value, CONTAINERS):
                length = place.at(("len", place.own))
                self.values[length.key] = length, length.read()
        for one in self.contents:
            if id(one) not in self.restores:
                is_set = isinstance(one, set)
                self.restores[id(one)] = functools.partial(_put_back, one, one.copy()) if is_set else _restorer(one)
        self.random |= {name: Generator(functions) for name, functions in OF_PROCESS.items()}

    def restore(self, *, random: bool = True) -> None:
        """Restore everything that has changed since; generators only with ``random``."""
        for restore in self.restores.values():
            restore()
        if random:
            restore_generators(self.random.values())

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
        pairs = {name: (self.random[name], later.random[name]) for name in self.random.keys() & later.random.keys()}
        return sorted(name for name, (one, other) in pairs.items() if comparable(one.state) != comparable(other.state))


def _is_advanced(value: Any) -> bool:
    """Return whether code may change a value of the standard library that cannot be compared, such as an iterator."""
    return hasattr(type(value), "__next__") or (isinstance(value, _CHANGED) and not isinstance(value, set))


_CHANGED = (MutableMapping, MutableSequence, MutableSet, queue.Queue, array.array)


def _cleared(cache: Any, misses: int) -> None:
    """Empty a cache to which a trace has added."""
    if cache.cache_info().misses != misses:
        cache.cache_clear()


class StateComparison:
    """A comparison of Python state before and after a trace, on fake tensors, of which none may stay.

    Args:
        build, root, groups: those of :class:`zerograph.capture.places.PythonState`.
        guarded: places that are guards already.
        mode: the fake mode of the trace's tensors.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        root: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        guarded: Iterable[Place],
        mode: _torch.FakeTensorMode,
    ) -> None:
        self._build, self._root, self._mode = build, root, mode
        self._state, self._guarded = PythonState(build, root, groups), {place.key for place in guarded}
        self._attributes = self._state.attributes()
        self._before, self._guards_before = Snapshot(self._state), build_guards(build, root)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """At the end remove tensors of the trace from attributes. Put all state back if an error is raised inside."""
        try:
            yield
        except BaseException:
            self._before.restore()
            raise
        finally:
            self.remove_traced()

    def remove_traced(self, keep: Sequence[Tensor] = ()) -> None:
        """Restore all attributes of modules that hold tensors of the trace, and those attributes of the graph.

        A module gets all its attributes back because they belong together, as a table and its length do. Attributes of
        other modules stay as ``build()`` left them, a count of its calls for instance.

        Args:
            keep: attributes that hold one of these tensors stay.
        """
        kept, restores = set(map(id, keep)), self._before.restores
        graph = getattr(getattr(self._build, "__self__", None), "__dict__", None)
        tables = [table for _, table in self._attributes if self._traced(table)]
        for container in self._before.contents:
            if (traced := self._traced(container)) and kept.isdisjoint(traced):
                restores[id(container)]()
        for table in tables:
            restores[id(table)](functools.partial(self._is_lost, kept, table is not graph))

    def _is_lost(self, kept: set[int], is_modules: bool, value: Any) -> bool:
        traced = self._traced(value)
        return kept.isdisjoint(traced) and (is_modules or bool(traced))

    def _traced(self, value: Any) -> dict[int, Tensor]:
        """Return the tensors of the trace in a value, through containers, by ``id``."""
        return {id(tensor): tensor for tensor in _fakes(value) if tensor.fake_mode is self._mode}

    def traced_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the trace that attributes hold now, by path."""
        tensors: dict[str, Tensor] = {}
        for title, attributes in self._attributes:
            for name, value in attributes.items():
                if name not in ("_parameters", "_modules"):
                    for tensor in self._traced(value).values():
                        tensors.setdefault(f"{title}.{name}" if title else name, tensor)
        return tensors

    def _read_guards(self) -> object:
        self.remove_traced()
        return build_guards(self._build, self._root)

    def check_restorable(self) -> None:
        """Raise if the trace may change Python state that cannot be restored.

        Raises:
            CaptureError: names an iterator or a file.
        """
        if self._before.iterators:
            raise CaptureError(f"a call may advance or write to {self._before.iterators[0]}")

    def check_unchanged(self, stored: Iterable[str]) -> None:
        """Raise if the trace has changed Python state.

        Args:
            stored: the attributes in which it left tensors.

        Raises:
            CaptureError: names a place that has changed.
        """
        after = Snapshot(self._state)
        # A recurrent layer has a list of its weights, which are fake in a trace.
        own = ((one, value) for one, value, _ in walk(self._state.places()) if one.own)
        kept = [one for one, value in own if _holds_tensors(value, 1) and not isinstance(one.root, nn.RNNBase)]
        places = [place.name for place in (*kept, *self._before.changed(after))]
        changed = [*stored, *places, *self._before.drawn(after)]
        if changed or self._read_guards() != self._guards_before:
            raise CaptureError(f"a call changes {changed[0] if changed else 'its module'}")

    def compare(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> StateChanges:
        """Return what the trace changed, and what follows.

        Args:
            traced: the graph of the trace.
            retrace: traces once more, from the present state.

        Raises:
            CaptureError: the graph depends on random numbers of Python or numpy, or on a tensor that a step would
                leave in a container, closure or global for the next one.
        """
        changes = self._state_changes(traced, retrace)
        if changes.guards or self._read_guards() == self._guards_before:
            return changes
        return replace(changes, valid_after_trace=self._is_valid_after_trace(traced, retrace))

    def _is_valid_after_trace(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> bool:
        """Return whether a second trace yields the same graph and leaves the guards of the first one unchanged."""
        after, guards_after = Snapshot(self._state), self._read_guards()
        restore_generators(self._before.random.values())
        try:
            return same_graph(traced, retrace()) and self._read_guards() == guards_after
        finally:
            after.restore()

    def _state_changes(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> StateChanges:
        after = Snapshot(self._state)
        changed, drawn = self._before.changed(after), self._before.drawn(after)
        new = [place for place in changed if place.key not in self._guarded]
        if not new and not drawn:
            self._remove_tensors(changed)
            return StateChanges()
        changes = StateChanges()
        try:
            draw_warnings = self._check_draws(drawn, after, retrace) if drawn else ()
            if new:
                changes = self._compare_with_retrace(traced, new, after, retrace)
        finally:
            after.restore()
        lost_warnings = self._remove_tensors(changed)
        return StateChanges(changes.guards, (*draw_warnings, *changes.warnings, *lost_warnings))

    def _check_draws(
        self, drawn: Sequence[str], after: Snapshot, retrace: Callable[[], fx.GraphModule]
    ) -> tuple[str, ...]:
        """Return a warning about the generators that the trace drew from.

        Raises:
            CaptureError: the graph depends on their numbers.
        """
        self._before.restore()
        _set_extreme(drawn, self._before, low=True)
        with lines_that_change(lambda: [self._before.random[name].get_state() for name in drawn]) as lines:
            low = retrace()
        self._before.restore()
        _set_extreme(drawn, after, low=False)
        high = retrace()
        where = "".join(f"\n  {line}   {code}" for line, code in lines) or f"\n  of {', '.join(drawn)}"
        if not same_graph(low, high):
            raise CaptureError(
                f"the step depends on random numbers of Python or numpy that build() draws{where}\n"
                "They would be drawn once, while the step is traced, and stay the same in every step. Use torch.rand() "
                "with torch.where(), or draw outside build() and pass a tensor to the graph."
            )
        return (
            f"build() draws random numbers of Python or numpy{where}\n"
            "They are drawn when the step is compiled, not in every step.",
        )

    def _compare_with_retrace(
        self, traced: fx.GraphModule, new: Sequence[Place], after: Snapshot, retrace: Callable[[], fx.GraphModule]
    ) -> StateChanges:
        """Trace again from the state after the first trace, and return what the differences mean."""
        after.restore(random=False)
        # Both traces draw the same random numbers, so that only the state makes the graphs differ.
        restore_generators(self._before.random.values())
        with lines_that_change(lambda: [place.read() for place in new]) as lines:
            second = retrace()
        refuse_constants(second, {}, [place.name for place in new if place.is_length or place.read() == _TENSOR])
        changed = after.changed(Snapshot(self._state))
        same = same_graph(traced, second)
        if not changed and same:
            return StateChanges()
        if not changed:
            # Only the first step differs from the later ones.
            return StateChanges(tuple(new))
        names = ", ".join(dict.fromkeys(place.name for place in changed))
        where = "".join(f"\n  {line}   {code}" for line, code in lines)
        if same and all(place.is_length or place.read() == _TENSOR for place in changed):
            collected = [place for place in changed if place.is_length and not _holds_tensors(place.holder())]
            names = ", ".join(dict.fromkeys(map(_container, collected)))
            message = (
                f"build() adds to {names}{where}\n"
                "It runs only while a step is compiled: other steps add nothing. Return from build() what is to "
                "be collected."
            )
            return StateChanges((), (message,) if collected else ())
        return StateChanges(
            tuple(new),
            (
                f"build() changes Python state that differs after each step: {names}{where}\n"
                "The step is compiled again in every step, as long as it changes. Keep it in a buffer, change it "
                "outside build(), or pass it to the graph as a tensor.",
            ),
        )

    def _remove_tensors(self, changed: Sequence[Place]) -> tuple[str, ...]:
        """Restore the places that hold tensors of the trace, which have no values after it; return a warning."""
        with_tensors = [
            place
            for place in changed
            if not place.own and (place.read() == _TENSOR if not place.is_length else _holds_tensors(place.holder()))
        ]
        for place in with_tensors:
            if place.is_in_root:
                self._before.restores.get(place.key, lambda: None)()
            else:
                self._before.restores.get(id(place.holder()), lambda _: None)(_holds_tensors)
        if not with_tensors:
            return ()
        return (lost_tensors(dict.fromkeys(map(_container, with_tensors))),)


_TENSOR = ("object", "FakeTensor")


def _container(place: Place) -> str:
    """Return the name of the container whose length the place is, or of the place itself."""
    return place.name.removeprefix("len(").removesuffix(")") if place.is_length else place.name


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    return next(_fakes(value, depth), None) is not None


def _fakes(value: Any, depth: int = 16) -> Iterator[_torch.FakeTensor]:
    """Yield the tensors of traces in a value, through containers that are not nested deeper."""
    if isinstance(value, _torch.FakeTensor):
        yield value
    elif isinstance(value, (*CONTAINERS, tuple, set)) and depth:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _fakes(entry, depth - 1)


def same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Return whether two traces are the same graph, constants included."""
    if _code(first) != _code(second):
        return False
    for node in first.graph.find_nodes(op="get_attr"):
        a, b = getattr(first, str(node.target), None), getattr(second, str(node.target), None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            fake = isinstance(a, _torch.FakeTensor)
            if (a.shape, a.dtype, fake) != (b.shape, b.dtype, isinstance(b, _torch.FakeTensor)):
                return False
            with _torch.no_modes():
                if not fake and not torch.equal(a, b):
                    return False
    return True


def _code(graph: fx.GraphModule) -> str:
    """Return the graph's code without the numbers of local regions, which differ in each trace."""
    return re.sub(r"(zerograph\.local\.default\(.*), \d+\)", r"\1)", graph.code)


@contextlib.contextmanager
def lines_that_change(fingerprint: Callable[[], Any]) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects the user's lines, with their code, during which ``fingerprint()`` changes.

    It stays empty under a debugger, whose trace function is not replaced.
    """
    lines: list[tuple[str, str]] = []
    if sys.gettrace() is not None:
        yield lines
        return
    value = fingerprint()
    running: tuple[str, int] | None = None

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal value, running
        if not source.is_users(frame.f_code.co_filename):
            return None
        present = fingerprint()
        if present != value:
            value = present
            if running is not None and (line := source.described(*running)) not in lines:
                lines.append(line)
        here: FrameType | None = frame
        if event == "return":
            here = frame.f_back
            while here is not None and not source.is_users(here.f_code.co_filename):
                here = here.f_back
        running = None if here is None else (here.f_code.co_filename, here.f_lineno)
        return follow

    sys.settrace(follow)
    try:
        yield lines
    finally:
        sys.settrace(None)


def _set_extreme(drawn: Sequence[str], snapshot: Snapshot, *, low: bool) -> None:
    """Make generators yield their lowest or highest numbers next; unknown kinds get the snapshot's state."""
    for name in drawn:
        generator = snapshot.random[name]
        generator.set_state(_extreme(generator.state, low=low))


# The generator's tempering turns this word into all ones.
_ALL_ONES = 0x12DD9BB3


def _extreme(state: Any, *, low: bool) -> Any:
    """Return a Mersenne Twister state whose next 64 words are all zeros or all ones; any other state unchanged."""
    words = [0 if low else _ALL_ONES] * 64 + [random.Random(2 * number + low).getrandbits(32) for number in range(560)]
    if isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple) and len(state[1]) == 625:
        return state[0], (*words, 0), None
    if isinstance(state, dict) and state["bit_generator"] == "MT19937":
        return {**state, "state": {"key": words, "pos": 0}, "has_gauss": 0, "gauss": 0.0}
    return state


def _restorer(value: Any) -> Callable[..., None]:
    """Return a function that restores the present entries of a container, or the attributes of an object."""
    return functools.partial(restore_entries, value, entries_of(value))


def restore_entries(value: Any, before: dict[Any, Any], is_lost: Callable[[Any], bool] = lambda _: True) -> None:
    """Restore the entries of a container, or the attributes of an object.

    Args:
        value: the container or object.
        before: its entries, from :func:`entries_of`.
        is_lost: tells of the value of an entry now whether to restore it; of a list all are restored.
    """
    now = entries_of(value)
    if [*now] == [*before] and all(map(operator.is_, now.values(), before.values())):
        return
    changed = [key for key in {**now, **before} if now.get(key, MISSING) is not before.get(key, MISSING)]
    changed = [key for key in changed if is_lost(now.get(key))]
    if isinstance(value, (list, deque)):
        if changed:
            value.clear()
            value.extend(before.values())
        return
    for key in changed:
        kind, entries = dict_class(value), value if isinstance(value, dict) else getattr(value, "__dict__", {})
        is_slot = entries is not value and isinstance(getattr(type(value), key, None), types.MemberDescriptorType)
        if is_slot and key in before:
            object.__setattr__(value, key, before[key])
        elif is_slot:
            object.__delattr__(value, key)
        elif key in before:
            kind.__setitem__(entries, key, before[key])
        else:
            kind.__delitem__(entries, key)


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a container and all containers inside of it, to any depth, except tuples, which cannot change."""
    if isinstance(value, (*CONTAINERS, tuple, set)) and id(value) not in seen:
        seen.add(id(value))
        if not isinstance(value, tuple):
            yield value
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _containers(entry, seen)


def _put_back(value: Any, before: Any, _: object = None) -> None:
    """Restore the entries of a set, or the numbers of an array."""
    if not isinstance(value, set):
        if value.flags.writeable:
            value[...] = before
    elif value != before:
        value.clear()
        value.update(before)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array that is not too large to be copied."""
    return isinstance(value, numpy.ndarray) and value.nbytes <= LARGE


def entries_of(value: Any) -> dict[Any, Any]:
    """Return the entries of a container by key or number, or the attributes of an object."""
    if isinstance(value, dict):
        return dict(dict_class(value).items(value))
    return dict(enumerate(value)) if isinstance(value, (list, deque)) else object_attributes(value)


def generator_functions(value: Any) -> GeneratorFunctions | None:
    """Return the functions that read and set the state of a generator of Python or numpy; None for other values."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.get_state, legacy=False), value.set_state
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    return None


def comparable(state: Any) -> Any:
    """Return the state of a generator without tensors and arrays, whose ``==`` is no bool."""
    if isinstance(state, dict):
        return {key: comparable(entry) for key, entry in state.items()}
    if isinstance(state, Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, numpy.ndarray) else state
