"""simplify: what a captured graph says in a roundabout way is said plainly, so that no rule need see through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.alias import base_of
from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import drop_unused, emit
from zerograph.passes.context import Context

aten = torch.ops.aten


def simplify(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Copies over memory that nobody reads are what was copied; lookups at all positions in order are views."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        _replace(node, _copied(node))
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        _replace(node, _in_order(node))
    drop_unused(graph)
    return module


def _replace(node: fx.Node, plain: fx.Node | None) -> None:
    if plain is not None:
        node.replace_all_uses_with(plain)
        node.graph.erase_node(node)


def _copied(node: fx.Node) -> fx.Node | None:
    target, source = node.args[:2]
    assert isinstance(target, fx.Node)
    assert isinstance(source, fx.Node)
    over, value = target.meta["val"], source.meta["val"]
    same = over.shape == value.shape and over.dtype == value.dtype and over.device == value.device
    return source if same and not _may_change(source) else None


def _may_change(node: fx.Node) -> bool:
    """Whether it is an input or a view of one: state is written at the end of the step, and a copy keeps the old."""
    return base_of(node).op != "call_function"


def _in_order(node: fx.Node) -> fx.Node | None:
    """``x[arange(n)[:, None], arange(m)]`` with all of x's sizes is x; its batch dimension may then stay split."""
    source, indices = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(indices, (list, tuple))
    value, result = source.meta["val"], node.meta["val"]
    if len(indices) != value.dim() or not all(isinstance(index, fx.Node) for index in indices):
        return None
    found = [_counts_along(index, size, result.dim()) for index, size in zip(indices, value.shape, strict=True)]
    axes = [axis for axis in found if axis is not None]
    # Each dimension along a later one of the result: then the elements come in the order in which they lie.
    if len(axes) < len(found) or axes != sorted(set(axes)) or value.numel() != result.numel():
        return None
    with node.graph.inserting_before(node):
        return emit(node.graph, aten.view.default, (source, list(result.shape)), origin(node))


def _counts_along(index: fx.Node, size: int, rank: int) -> int | None:
    """The result's dimension along which ``index`` counts from 0 to ``size`` - 1; None if it is something else."""
    shape: Sequence[int] = index.meta["val"].shape
    node: Any = index
    while node.target in _STILL_COUNT and (node.target is not aten.add.Tensor or node.args[1] == 0):
        node = node.args[0]
    if node.target is not aten.arange.default or tuple(node.meta["val"].shape) != (size,) or node.args != (size,):
        return None
    long = [at for at, one in enumerate(shape) if one == size]
    if index.meta["val"].numel() != size or len(long) != 1:
        return None
    return rank - len(shape) + long[0]


# What leaves a table of positions one, whatever dimensions of size one it gets.
_STILL_COUNT = {aten.unsqueeze.default, aten.view.default, aten._to_copy.default, aten.add.Tensor}
