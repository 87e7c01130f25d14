"""Detect changes of dictionaries, by comparing their keys and values object by object."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, compress
from typing import Any

# The mapping that holds the modules of a scripted module cannot be iterated over.
_keys: Callable[[Mapping[Any, Any]], Iterable[Any]] = operator.methodcaller("keys")
_values: Callable[[Mapping[Any, Any]], Iterable[Any]] = operator.methodcaller("values")


class Dictionaries:
    """A snapshot of dictionaries. All loops over them run in C."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        self._all = list(dictionaries)
        self._sizes = list(map(len, self._all))
        # Most tables of a module are empty: their sizes are compared only.
        self._filled = list(compress(self._all, self._sizes))
        self._keys = list(chain.from_iterable(map(_keys, self._filled)))
        self._objects = list(chain.from_iterable(map(_values, self._filled)))

    def are_same(self) -> bool:
        """Return whether each dictionary still has the same objects under the same keys, in the same order."""
        return (
            list(map(len, self._all)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(map(_values, self._filled)), self._objects))
            and list(chain.from_iterable(map(_keys, self._filled))) == self._keys
        )
