"""Detect changes of dictionaries, by comparing their keys and values object by object."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress
from typing import Any


def dict_class(one: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods read and write a dict's own entries: a subclass may make others of them."""
    return OrderedDict if isinstance(one, OrderedDict) else dict


class Dictionaries:
    """A snapshot of dictionaries. All loops over them run in C."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        everything = list(dictionaries)
        sizes = list(map(len, everything))
        self._filled, self._sizes = list(compress(everything, sizes)), list(compress(sizes, sizes))
        # Most tables of a module are empty.
        self._empty = [one for one, size in zip(everything, sizes, strict=True) if not size]
        # What they have at any time. The mapping of a scripted module's modules cannot be iterated over.
        self._names = [one if isinstance(one, dict) else _View(one.keys) for one in self._filled]
        self._values = [one.values() if isinstance(one, dict) else _View(one.values) for one in self._filled]
        self._keys, self._objects = ([*chain.from_iterable(views)] for views in (self._names, self._values))

    def are_same(self) -> bool:
        """Return whether each dictionary still has the same objects under the same keys, in the same order."""
        return (
            list(map(len, self._filled)) == self._sizes
            and not any(self._empty)
            and all(map(operator.is_, chain.from_iterable(self._values), self._objects))
            and list(chain.from_iterable(self._names)) == self._keys
        )


class _View:
    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())
