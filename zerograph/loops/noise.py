"""Generators that reading a sample may move: of torch, Python, NumPy, and those of a dataset, with its counters."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from zerograph import _torch
from zerograph.capture.places import PythonState
from zerograph.capture.state_changes import (
    OF_PROCESS,
    GeneratorFunctions,
    entries_of,
    generator_functions,
    restore_entries,
)
from zerograph.loops.containers import PLAIN

_OF_PROCESS: tuple[GeneratorFunctions, ...] = ((torch.get_rng_state, torch.set_rng_state), *OF_PROCESS.values())


def states() -> list[Any]:
    """Return the states of the process's generators: those of torch, Python and NumPy."""
    return [get() for get, _ in _OF_PROCESS]


def restore(before: Sequence[Any]) -> None:
    """Restore states of the process's generators."""
    for (_, set_state), state in zip(_OF_PROCESS, before, strict=True):
        set_state(state)


def generators_of(dataset: Any) -> tuple[list[GeneratorFunctions], bool]:
    """Return the generators of this process, and those that a dataset holds, or its code names.

    Numbers count as generators, lengths of lists, and tensors and arrays up to 1 MiB in all.

    Attributes are searched through containers and objects, transforms for instance. Code names globals and closures.

    Returns:
        The functions that read and set the states, and whether an iterator or an open file is among the values, whose
        state cannot be restored.
    """
    datasets = [dataset]
    while len(datasets) < 10 and (inner := getattr(datasets[-1], "dataset", None)) is not None:
        datasets.append(inner)
    # Of a list, for instance, there is no code.
    reads = [one.__getitem__ for one in datasets if hasattr(one, "__getitem__") and hasattr(one, "__dict__")]
    named = [value for read in reads for _, value in PythonState(read, nn.Module(), ()).places()]
    own = list(_found([datasets, named]))
    return [*_OF_PROCESS, *(one for one in own if one is not None)], None in own


def is_plain(value: Any) -> bool:
    """Return whether a container, which is not too long, and what is in it have no code of their own that draws."""
    if type(value) in (list, tuple, dict):
        inside = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ENTRIES and all(map(is_plain, inside))
    return type(value) in (*_ARRAYS, *PLAIN) or isinstance(value, numpy.generic)


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
                yield functools.partial(_Entries, one), _Entries.restore


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

    def __init__(self, container: Any) -> None:
        self.container, self.values = container, entries_of(container)

    def restore(self) -> None:
        restore_entries(self.container, self.values)

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
