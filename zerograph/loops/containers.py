"""Tensors inside of containers of any kind: take them out, and put others in their place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zerograph._torch import pytree

# Values of a batch that are the same on all ranks.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, numpy.generic)


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a value in which each tensor is replaced by what a function returns for it.

    Containers are copied: mappings with what else they hold, sequences, named tuples, dataclasses, classes that are
    registered with pytree, and other objects by their attributes. Modules and functions stay themselves.
    """
    seen: dict[int, Any] = {}

    def run(one: Any) -> Any:
        if isinstance(one, Tensor):
            return function(one)
        if isinstance(one, PLAIN) or _is_opaque(one):
            return one
        if id(one) in seen:
            return seen[id(one)]
        seen[id(one)] = new = _rebuilt(one, run, lambda copied: seen.__setitem__(id(one), copied))
        return new

    return run(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside a value, in the order in which :func:`mapped` replaces them."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _rebuilt(one: Any, run: Callable[[Any], Any], note: Callable[[Any], None]) -> Any:
    if isinstance(one, Mapping):
        return _rebuilt_mapping(one, run)
    if isinstance(one, tuple):
        return type(one)(*map(run, one)) if hasattr(one, "_fields") else type(one)(map(run, one))
    if type(one) in (list, set, frozenset):
        return type(one)(map(run, one))
    if not dataclasses.is_dataclass(one):
        leaves, spec = pytree.tree_flatten(one)
        if not (len(leaves) == 1 and leaves[0] is one):
            return pytree.tree_unflatten([run(leaf) for leaf in leaves], spec)
    if not hasattr(one, "__dict__"):
        return one
    new = copy.copy(one)
    note(new)
    # Past __setattr__, which frozen classes refuse.
    vars(new).update({name: run(member) for name, member in vars(one).items()})
    if isinstance(one, list):
        new[:] = map(run, one)
    return new


def _rebuilt_mapping(one: Mapping[Any, Any], run: Callable[[Any], Any]) -> Any:
    new: Any = copy.copy(one)
    if isinstance(getattr(one, "data", None), dict):
        # Such as a BatchEncoding, which holds more than its entries.
        new.data = {key: run(entry) for key, entry in new.data.items()}
        return new
    for key in list(one):
        new[key] = run(one[key])
    return new


def _is_opaque(one: Any) -> bool:
    """Return whether a value is no container of a batch's tensors."""
    return isinstance(one, (nn.Module, type, numpy.ndarray, torch.Generator, torch.Size)) or callable(one)
