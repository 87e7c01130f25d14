"""Values inside of containers of any kind: take them out, and put others in their place."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zerograph._torch import pytree

# Values of a batch that are the same on all ranks.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, numpy.generic)
# In place of a value's replacement: its parts are replaced.
INSIDE: Any = object()


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a value with what a function returns for it in its place, or for the parts of it.

    Containers are copied: mappings with what else they hold, lists, tuples, dataclasses, classes that are registered
    with pytree, and other objects by their attributes. Modules, functions and values without parts stay themselves.

    Args:
        value: the value.
        function: takes a value; returns its replacement, or :data:`INSIDE` to replace its parts.
    """
    return _mapped(value, function, {})


def _mapped(one: Any, function: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    # No function inside that calls itself: the cycle would keep tensors until garbage is collected.
    replacement = function(one)
    if replacement is not INSIDE:
        return replacement
    if id(one) not in seen:
        run = functools.partial(_mapped, function=function, seen=seen)
        seen[id(one)] = _rebuilt(one, run, lambda copied: seen.__setitem__(id(one), copied))
    return seen[id(one)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a value in which each tensor is replaced by what a function returns for it."""
    return mapped(value, lambda one: function(one) if isinstance(one, Tensor) else INSIDE)


def found_in(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the values of some kinds inside a value, in the order in which :func:`mapped` replaces them."""
    return _collected(value, lambda one: isinstance(one, kinds))


def opaque_in(value: Any) -> list[Any]:
    """Return the values inside a value that are no tensors and not plain, and that :func:`mapped` leaves themselves."""
    known = (*PLAIN, Tensor, torch.Size, type)
    return _collected(value, lambda one: not has_parts(one) and not isinstance(one, known))


def _collected(value: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    found: list[Any] = []

    def note(one: Any) -> Any:
        if not is_wanted(one):
            return INSIDE
        found.append(one)
        return one

    mapped(value, note)
    return found


def has_parts(one: Any) -> bool:
    """Return whether :func:`mapped` takes a value apart."""
    if isinstance(one, (*PLAIN, nn.Module, type, Tensor, numpy.ndarray, torch.Generator, torch.Size)) or callable(one):
        return False
    return isinstance(one, (Mapping, list, tuple)) or hasattr(one, "__dict__") or _is_registered(one)


def _is_registered(one: Any) -> bool:
    leaves = pytree.tree_leaves(one)
    return not (len(leaves) == 1 and leaves[0] is one)


def _rebuilt(one: Any, run: Callable[[Any], Any], note: Callable[[Any], None]) -> Any:
    if not has_parts(one):
        return one
    if isinstance(one, Mapping):
        return _rebuilt_mapping(one, run)
    if isinstance(one, tuple):
        return type(one)(*map(run, one)) if hasattr(one, "_fields") else type(one)(map(run, one))
    if type(one) is list:
        return list(map(run, one))
    if not dataclasses.is_dataclass(one) and _is_registered(one):
        leaves, spec = pytree.tree_flatten(one)
        return pytree.tree_unflatten([run(leaf) for leaf in leaves], spec)
    new = copy.copy(one)
    note(new)
    # Past __setattr__, which frozen classes refuse.
    vars(new).update({name: run(member) for name, member in vars(one).items()})
    if isinstance(one, list):
        new[:] = map(run, one)
    return new


def _rebuilt_mapping(one: Mapping[Any, Any], run: Callable[[Any], Any]) -> Any:
    new: Any = copy.copy(one)
    # Not by getattr(), which may read an entry.
    if isinstance(vars(one).get("data") if hasattr(one, "__dict__") else None, dict):
        # Such as a BatchEncoding, which holds more than its entries.
        new.data = dict(new.data)
    for key in list(one):
        new[key] = run(one[key])
    return new
