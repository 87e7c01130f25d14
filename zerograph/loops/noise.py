"""Generators that reading a sample may move: of torch, Python, NumPy, and those of a dataset, with its counters."""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from zerograph import _torch
from zerograph.capture.places import PythonState
from zerograph.capture.state_changes import GeneratorFunctions, generator_functions
from zerograph.loops.containers import PLAIN

_OF_PROCESS: tuple[GeneratorFunctions, ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state),
)


def states(generators: Iterable[GeneratorFunctions] = _OF_PROCESS) -> list[Any]:
    """Return the states of generators: those of torch, Python and NumPy."""
    return [get() for get, _ in generators]


def restore(before: Sequence[Any], generators: Iterable[GeneratorFunctions] = _OF_PROCESS) -> None:
    """Restore states of generators."""
    for (_, set_state), state in zip(generators, before, strict=True):
        set_state(state)


class Generators:
    """The generators of this process, and those that a dataset holds, or its code names.

    Numbers count as generators, lengths of lists, and tensors and arrays up to 1 MiB in all.

    Attributes are searched through containers and objects, transforms for instance. Code names globals and closures.

    Attributes:
        has_iterators: an iterator or an open file is among the values, whose state cannot be restored.
    """

    def __init__(self, dataset: Any) -> None:
        datasets = [dataset]
        while len(datasets) < 10 and (inner := getattr(datasets[-1], "dataset", None)) is not None:
            datasets.append(inner)
        # Of a list, for instance, there is no code.
        reads = [one.__getitem__ for one in datasets if hasattr(one, "__getitem__") and hasattr(one, "__dict__")]
        named = [value for read in reads for _, value in PythonState(read, nn.Module(), ()).places()]
        own = list(_found([datasets, named]))
        self.has_iterators = None in own
        self._functions = [*_OF_PROCESS, *(one for one in own if one is not None)]

    def states(self) -> list[Any]:
        """Return the states of all."""
        return states(self._functions)

    def have_moved(self, before: list[Any]) -> bool:
        """Return whether a generator is in another state than before."""
        return any(comparable(one) != comparable(old) for one, old in zip(self.states(), before, strict=True))

    def restore(self, before: list[Any]) -> None:
        """Restore the states of all."""
        restore(before, self._functions)


def is_plain(value: Any) -> bool:
    """Return whether a container, which is not too long, and what is in it have no code of their own that draws."""
    if type(value) in (list, tuple, dict):
        inside = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ENTRIES and all(map(is_plain, inside))
    return type(value) in (*_ARRAYS, *PLAIN) or isinstance(value, numpy.generic)


def comparable(state: Any) -> Any:
    """Return the state of a generator without arrays; equal states are equal."""
    if isinstance(state, dict):
        return {name: comparable(entry) for name, entry in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, numpy.ndarray) else state


_MOST_VALUES, _MOST_ENTRIES, _MOST_BYTES = 10_000, 1000, 2**20
_ARRAYS = (torch.Tensor, numpy.ndarray)


def _found(value: Any) -> Iterator[GeneratorFunctions | None]:
    """Yield the functions that read and set the states of the generators in a value; None for an iterator."""
    room = _MOST_BYTES
    for one in _reached_from(value):
        if isinstance(one, _ARRAYS):
            if _can_change(one) and (room := room - one.nbytes) >= 0:
                yield _functions_of_array(one)
        elif (functions := _functions_of(one)) is not None:
            yield functions
        elif hasattr(type(one), "__next__"):
            yield None
        elif isinstance(one, (dict, list, deque)):
            if not isinstance(one, dict):
                yield functools.partial(len, one), functools.partial(_shorten, one)
            if len(one) <= _MOST_ENTRIES:
                yield functools.partial(_Entries, one), functools.partial(_put_back, one)


def _reached_from(value: Any) -> Iterator[Any]:
    """Yield a value, and what containers and attributes in it hold."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType)):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, _ARRAYS) or _functions_of(one) is not None or hasattr(type(one), "__next__"):
            continue
        if isinstance(one, (dict, list, tuple, deque)):
            if len(one) <= _MOST_ENTRIES:
                waiting += one.values() if isinstance(one, dict) else one
        elif hasattr(one, "__dict__"):
            waiting.append(vars(one))


def _shorten(one: Any, length: int) -> None:
    """Drop what was appended to a list, which counts samples."""
    while len(one) > length:
        one.pop()


class _Entries:
    """The entries of a container. They differ by numbers, new generators, and tensors and arrays in place of others."""

    def __init__(self, entries: Any) -> None:
        self.values = dict(entries) if isinstance(entries, dict) else dict(enumerate(entries))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Entries)
        return all(map(_is_same, self.values.values(), map(other.values.get, self.values)))


def _is_same(value: Any, old: Any) -> bool:
    if type(value) in (int, float):
        return type(old) in (int, float) and value == old
    if value is old or isinstance(value, _ARRAYS):
        return value is old or old is None
    # A sample may make the generator that others draw from.
    return all(_functions_of(one) is None and not hasattr(type(one), "__next__") for one in _reached_from(value))


def _put_back(one: Any, before: _Entries) -> None:
    one.clear()
    if isinstance(one, dict):
        one.update(before.values)
    else:
        one.extend(before.values.values())


def _can_change(one: Any) -> bool:
    if isinstance(one, numpy.ndarray):
        return bool(one.flags.writeable)
    # Of others torch counts no writes, or does not know the bytes.
    return one.layout is torch.strided and not one.is_inference()


def _functions_of_array(one: Any) -> GeneratorFunctions:
    if isinstance(one, numpy.ndarray):
        return one.copy, functools.partial(operator.setitem, one, ...)
    kept = _torch.version(one), one.detach().clone()

    def read() -> tuple[int, torch.Tensor]:
        nonlocal kept
        if kept[0] != _torch.version(one):
            kept = _torch.version(one), one.detach().clone()
        return kept

    return read, lambda state: one.detach().copy_(state[1])


def _functions_of(value: Any) -> GeneratorFunctions | None:
    """Return the functions that read and set the state of a generator; None for any other value."""
    is_torchs = isinstance(value, torch.Generator)
    return (value.get_state, value.set_state) if is_torchs else generator_functions(value)
