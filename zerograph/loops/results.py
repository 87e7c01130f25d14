"""The results of a call without their tensors, which a graph of calls fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerograph import _torch
from zerograph.capture.trace import original_of
from zerograph.errors import CaptureError
from zerograph.loops.containers import INSIDE, found_in, map_tensors, mapped

# For each dimension of a tensor a position, or the limits of a slice.
Index = tuple[int | tuple[int | None, int | None], ...]


@dataclass(frozen=True)
class Place:
    """The place of a tensor among others."""

    number: int


def filled(template: Any, tensors: Sequence[Any]) -> Any:
    """Return a value with tensors in place of their places."""
    return mapped(template, lambda one: tensors[one.number] if isinstance(one, Place) else INSIDE)


@dataclass(frozen=True)
class Template:
    """The result of a call without its tensors.

    Attributes:
        result: it has places in place of tensors.
        differentiable: which of the tensors have a gradient.
        inner: the tensors that others have been computed from, such as features beside what a head makes of them.
        given: the argument or the buffer that a tensor is, by the tensor's place.
    """

    result: Any
    differentiable: tuple[bool, ...]
    inner: frozenset[int]
    given: Mapping[int, Place | Tensor]

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
        own = {id(one): original_of(one) for one in buffers} | {id(one): Place(n) for n, one in enumerate(arguments)}
        edges = _edges_below([one for one in tensors if one.requires_grad]) if len(tensors) > 1 else ()
        inner = frozenset(place for place, one in enumerate(tensors) if (one.grad_fn, one.output_nr) in edges)
        flags = tuple(one.requires_grad for one in tensors)
        given = {place: own[id(one)] for place, one in enumerate(tensors) if id(one) in own}
        return Template(map_tensors(result, lambda one: Place(numbers[id(one)])), flags, inner, given)


def _edges_below(tensors: Sequence[Tensor]) -> set[tuple[Any, int]]:
    """Return the edges of autograd's graph below tensors: each a node, and the number of one of its outputs."""
    nodes, seen, edges = [one.grad_fn for one in tensors], set[Any](), set[tuple[Any, int]]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            edges.update(node.next_functions)
            nodes += [below for below, _ in node.next_functions]
    return edges


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
