"""Values inside of containers of any kind: take them out, and put others in their place."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.capture.trace import original_of
from zerograph.eager.program import Slot
from zerograph.errors import CaptureError
from zerograph.ir.rewrite import closure

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


# For each dimension of a tensor a position, or the limits of a slice.
Index = tuple[int | tuple[int | None, int | None], ...]


def filled(template: Any, tensors: Sequence[Any]) -> Any:
    """Return a value with tensors in their slots."""
    return mapped(template, lambda one: tensors[one.index] if isinstance(one, Slot) else INSIDE)


@dataclass(frozen=True)
class Template:
    """The result of a call without its tensors.

    Attributes:
        result: it has slots in place of tensors.
        differentiable: which of the tensors have a gradient.
        inner: the tensors that others have been computed from, such as features beside what a head makes of them.
        given: the argument or the buffer that a tensor is, by the tensor's place.
    """

    result: Any
    differentiable: tuple[bool, ...]
    inner: frozenset[int]
    given: Mapping[int, Slot | Tensor]

    @staticmethod
    def of(result: Any, arguments: Sequence[Tensor], buffers: Sequence[Tensor]) -> Template:
        """Return the template of a result.

        Args:
            result: the result.
            arguments: the tensors among the arguments.
            buffers: those of the module.
        """
        tensors = found_in(result, Tensor)
        # Of a tensor that is there twice the first place.
        numbers = {id(one): place for place, one in reversed([*enumerate(tensors)])}
        own = {id(one): original_of(one) for one in buffers} | {id(one): Slot(n) for n, one in enumerate(arguments)}
        edges = _edges_below([one for one in tensors if one.requires_grad]) if len(tensors) > 1 else ()
        inner = frozenset(place for place, one in enumerate(tensors) if (one.grad_fn, one.output_nr) in edges)
        flags = tuple(one.requires_grad for one in tensors)
        given = {place: own[id(one)] for place, one in enumerate(tensors) if id(one) in own}
        return Template(map_tensors(result, lambda one: Slot(numbers[id(one)])), flags, inner, given)


def _edges_below(tensors: Sequence[Tensor]) -> set[tuple[Any, int]]:
    """Return the edges of autograd's graph below tensors: each a node, and the number of one of its outputs."""
    starts = [one.grad_fn for one in tensors if one.grad_fn is not None]
    nodes = closure(starts, lambda node: (below for below, _ in node.next_functions if below is not None))
    return {edge for node in nodes for edge in node.next_functions}


def parts_of(results: Sequence[Tensor]) -> dict[int, tuple[int, Index]]:
    """Return the results that are parts of others, such as the features of the first token: of which one, and where.

    Raises:
        CaptureError: results share memory in another way.
    """
    whole: list[int] = []
    parts: dict[int, tuple[int, Index]] = {}
    numbers = {id(one): place for place, one in reversed([*enumerate(results)])}
    for place in sorted(numbers.values(), key=lambda place: -_torch.size_hint(results[place].numel())):
        shared = [other for other in whole if _overlap(results[place], results[other])]
        if not shared:
            whole.append(place)
            continue
        index = _index_of(results[place], results[shared[0]]) if len(shared) == 1 else None
        if index is None:
            raise CaptureError("a call returns tensors that share memory, to which the loop may write")
        parts[place] = shared[0], index
    return parts


def part_at(whole: Tensor, index: Index) -> Tensor:
    """Return a part of a result."""
    return whole[tuple(slice(*one) if isinstance(one, tuple) else one for one in index)]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors share memory, unless they are apart along one dimension, such as chunks."""
    if _torch.storage_key(one.untyped_storage()) != _torch.storage_key(other.untyped_storage()):
        return False
    low, high = sorted((one, other), key=lambda tensor: _torch.size_hint(tensor.storage_offset()))
    strides, sizes, high_sizes = (
        [*map(_torch.size_hint, entries)] for entries in (low.stride(), low.shape, high.shape)
    )
    shift = _torch.size_hint(high.storage_offset()) - _torch.size_hint(low.storage_offset())
    return strides != [*map(_torch.size_hint, high.stride())] or not any(
        size * stride <= shift and all(shift + high_size * stride <= outer for outer in strides if outer > stride)
        for size, high_size, stride in zip(sizes, high_sizes, strides, strict=True)
    )


# Of autograd's nodes between a tensor and an index of it.
_OF_AN_INDEX = {"SelectBackward0", "SliceBackward0", "AliasBackward0"}


def _index_of(part: Tensor, whole: Tensor) -> Index | None:
    """Return where a result has another one as its part, in any call; None if autograd or sizes do not tell."""
    node = part.grad_fn
    while node is not None and node is not whole.grad_fn and node.name() in _OF_AN_INDEX:
        node = node.next_functions[0][0]
    offset = _torch.constant_value(part.storage_offset() - whole.storage_offset())
    if node is not whole.grad_fn or part.requires_grad != whole.requires_grad or part._backward_hooks or offset is None:
        return None
    rest, index = int(offset), list[int | tuple[int | None, int | None]]()
    dims, kept = (
        [*zip(map(_torch.size_key, one.shape), map(_torch.size_key, one.stride()), strict=True)]
        for one in (whole, part)
    )
    for size, stride in dims:
        if rest and not isinstance(stride, int):
            return None
        start, rest = divmod(rest, stride) if rest else (0, 0)
        if not kept or kept[0][1] != stride:
            index.append(start)
        elif kept[0][0] == size:
            index.append((None, None))
            kept.pop(0)
        elif isinstance(size, int) and isinstance(kept[0][0], int):
            index.append((start, start + kept.pop(0)[0]))
        else:
            return None
    return None if kept or rest else tuple(index)
