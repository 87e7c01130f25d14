"""Alias analysis: which values share memory, by the schemas of operators.

Schemas declare most aliases; two tables list the operators whose schemas do not. There are two questions.
:func:`shared_arguments` returns what shares memory for the shapes and strides of the graph, as memory estimates need
it. :func:`viewed` returns the value that a node may be a view of, for any strides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.ir.loop import loop_of

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

# Their results share the memory of the first argument, which their schemas do not declare.
_UNDECLARED_VIEWS = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
# Views for some strides, copies for others.
_VIEWS_OF_SOME_STRIDES = {aten.reshape.default, aten.contiguous.default}


def is_view(node: fx.Node) -> bool:
    """Return True if the operator's schema declares its value as a view of the first argument."""
    return isinstance(node.target, OpOverload) and node.target.is_view


# Copies of their argument, perhaps with another dtype or layout.
COPIES = {aten._to_copy.default, aten.clone.default, aten.reshape.default, aten.contiguous.default}


def is_view_or_copy(node: fx.Node) -> bool:
    """Return True if the value has the elements of the first argument: it is a view, a cast or a copy of it."""
    return is_view(node) or node.target in COPIES


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose value this one may be a view or a part of, or None if it has memory of its own."""
    if node.target is operator.getitem:
        parts = node.args[0]
        return parts if isinstance(parts, fx.Node) and _may_view(parts) else None
    return node.all_input_nodes[0] if _may_view(node) else None


def base_of(node: fx.Node) -> fx.Node:
    """Return the node at the end of the chain of views, or the node itself."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value or a view of it."""
    for user in node.users:
        yield user
        if viewed(user) is node:
            yield from readers(user)


def shared_arguments(node: fx.Node) -> Sequence[fx.Node | None]:
    """Return the argument that each result of the operator shares memory with, None for memory of its own.

    The last entry is that of all further results.
    """
    if node.op == "call_module" and loop_of(node) is None:
        # The update of a bucket with owners returns the bucket's shard, which it wrote.
        return node.all_input_nodes[:1]
    if node.target is operator.getitem and not isinstance(node.all_input_nodes[0].meta["val"], Tensor):
        shared = shared_arguments(node.all_input_nodes[0])
        return [shared[min(int(node.args[1]), len(shared) - 1)]] if shared else ()  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload):
        return ()
    if node.target in _UNDECLARED_VIEWS or node.target is WAIT:
        return node.all_input_nodes[:1]
    if node.target in _VIEWS_OF_SOME_STRIDES and not _strides_allow(node):
        return ()
    arguments = (_argument(node, place) for place in _declared(node.target))
    return [argument if isinstance(argument, fx.Node) else None for argument in arguments]


def _may_view(node: fx.Node) -> bool:
    return is_view(node) or node.target in _UNDECLARED_VIEWS | _VIEWS_OF_SOME_STRIDES


def _strides_allow(node: fx.Node) -> bool:
    """Return True if the strides of its argument make this reshape a view."""
    value: Tensor = node.all_input_nodes[0].meta["val"]
    if value.is_contiguous():
        return True
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(node.meta["val"].shape)
    except RuntimeError:
        return False
    return node.target is not aten.contiguous.default


@functools.cache
def _declared(target: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return the argument (position, name) that each result shares memory with by the schema, or None."""
    places: dict[str, tuple[int, str]] = {}
    split_argument: tuple[int, str] | None = None
    for position, argument in enumerate(_torch.schema_arguments(target)):
        if argument.alias_info is not None:
            places |= dict.fromkeys(argument.alias_info.before_set, (position, argument.name))
            # "Tensor(a -> *) self" of an operator that returns "Tensor(a)[]": all parts are views of it.
            if "*" in argument.alias_info.after_set:
                split_argument = position, argument.name
    results: list[tuple[int, str] | None] = []
    for result in _torch.returns(target):
        names = () if result.alias_info is None else result.alias_info.before_set
        shared = next((places[name] for name in names if name in places), None)
        results.append(split_argument if shared is None and result.alias_info is not None else shared)
    return tuple(results)


def _argument(node: fx.Node, place: tuple[int, str] | None) -> Any:
    if place is None:
        return None
    position, name = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
