"""Which nodes share memory: storage relations between values, by the schemas of operators.

A schema declares most of it. One table lists the operators whose schemas do not. Two questions have two answers:
:func:`shared_arguments` says what shares memory for these shapes and strides, which memory estimates and turns need;
:func:`viewed` says which value a node may be a view of, whatever the strides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.ir.loop import loop_of

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

# They return their first argument's memory, which their schemas do not say.
_UNDECLARED_VIEWS = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
# Views for some strides, copies for others.
_VIEWS_OF_SOME_STRIDES = {aten.reshape.default, aten.contiguous.default}


def is_view(node: fx.Node) -> bool:
    """Return whether the operator's schema says that the value is a view of the first argument."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose value this one may be a view or a part of, or None for memory of its own."""
    if node.target is operator.getitem:
        parts = node.args[0]
        return parts if isinstance(parts, fx.Node) and _may_view(parts) else None
    return node.all_input_nodes[0] if _may_view(node) else None


def base_of(node: fx.Node) -> fx.Node:
    """Return the node at the end of the chain of views, or the node itself."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def shared_arguments(node: fx.Node) -> Sequence[fx.Node | None]:
    """Return for each result of the operator the argument that it shares memory with, None for memory of its own.

    The last entry stands for all further results.
    """
    if node.op == "call_module" and loop_of(node) is None:
        # The update of a dealt bucket returns the bucket's shard, which it wrote.
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
    return [given if isinstance(given := _argument(node, place), fx.Node) else None for place in _declared(node.target)]


def _may_view(node: fx.Node) -> bool:
    return is_view(node) or node.target in _UNDECLARED_VIEWS | _VIEWS_OF_SOME_STRIDES


def _strides_allow(node: fx.Node) -> bool:
    """Return whether the strides of its argument make this reshape a view."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value: Tensor = source.meta["val"]
    if value.is_contiguous():
        return True
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(node.meta["val"].shape)
    except RuntimeError:
        return False
    return node.target is not aten.contiguous.default


@functools.cache
def _declared(target: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return for each result the argument (position, name) that the schema says it shares memory with."""
    places: dict[str, tuple[int, str]] = {}
    parted: tuple[int, str] | None = None
    for position, argument in enumerate(_torch.schema_arguments(target)):
        if argument.alias_info is not None:
            places |= dict.fromkeys(argument.alias_info.before_set, (position, argument.name))
            # "Tensor(a -> *) self" of an operator that returns "Tensor(a)[]": all parts are views of it.
            if "*" in argument.alias_info.after_set:
                parted = position, argument.name
    results: list[tuple[int, str] | None] = []
    for result in _torch.returns(target):
        names = () if result.alias_info is None else result.alias_info.before_set
        share = next((places[name] for name in names if name in places), None)
        results.append(parted if share is None and result.alias_info is not None else share)
    return tuple(results)


def _argument(node: fx.Node, place: tuple[int, str] | None) -> Any:
    if place is None:
        return None
    position, name = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
