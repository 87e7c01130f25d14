"""simplify: replace roundabout operators by plain ones, so that no rule need see through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph._torch import size_key
from zerograph.ir.alias import base_of
from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import drop_unused, emit, operand, replace_node
from zerograph.passes.context import Context

aten = torch.ops.aten


def simplify(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Merge equal casts; drop needless copies and slices; replace lookups of everything by views."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        _replace(node, _whole(node, 0))
    for node in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        _replace(node, _whole(node, 1))
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        _replace(node, _copy_source(node))
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        _replace(node, _as_view(node))
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _replace(node, _only_part(node))
    _merge_casts(graph)
    drop_unused(graph)
    return module


def _replace(node: fx.Node, plain: fx.Node | None) -> None:
    if plain is not None:
        replace_node(node, plain)


def _merge_casts(graph: fx.Graph) -> None:
    """Cast a value once for all its readers of a phase: autocast casts the input of each product by itself.

    Parameters are left alone: a cast of one is freed between two distant readers.
    """
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if base_of(node.all_input_nodes[0]).op != "placeholder":
            key = node.args, tuple(node.kwargs.items()), origin(node).phase
            _replace(node, first[key]) if key in first else first.update({key: node})


def _whole(node: fx.Node, part: int) -> fx.Node | None:
    """Return the argument ``part`` of a slice, or of its transpose, that takes everything.

    Torch leaves such slices out where it knows all sizes.
    """
    source = operand(node, part)
    values = source.meta["val"], node.meta["val"]
    before, after = ([tuple(map(size_key, sizes)) for sizes in (value.shape, value.stride())] for value in values)
    return source if before == after and values[0].dtype == values[1].dtype else None


def _copy_source(node: fx.Node) -> fx.Node | None:
    target, source = operand(node), operand(node, 1)
    over, value = target.meta["val"], source.meta["val"]
    same = over.shape == value.shape and over.dtype == value.dtype and over.device == value.device
    return source if same and not _may_change(source) else None


def _may_change(node: fx.Node) -> bool:
    """Return whether the node is an input or a view of one. State is written at the end; a copy keeps the old value."""
    return base_of(node).op != "call_function"


def _only_part(node: fx.Node) -> fx.Node | None:
    """Return a copy of the only part of a concatenation that has elements, or None.

    A key-value cache of transformers begins empty, and the positions of a concatenation cannot stay split.
    """
    value = node.meta["val"]
    parts = [part for part in node.all_input_nodes if 0 not in part.meta["val"].shape]
    if len(parts) != 1 or parts[0].meta["val"].shape != value.shape or parts[0].meta["val"].dtype != value.dtype:
        return None
    with node.graph.inserting_before(node):
        layout = torch.contiguous_format
        return emit(node.graph, aten.clone.default, (parts[0],), origin(node), memory_format=layout)


def _as_view(node: fx.Node) -> fx.Node | None:
    """Return a view instead of a lookup ``x[arange(n)[:, None], arange(m)]`` of all of x, or None.

    The batch dimension of a view can stay split.
    """
    source, indices = operand(node), node.args[1]
    assert isinstance(indices, (list, tuple))
    value, result = source.meta["val"], node.meta["val"]
    if len(indices) != value.dim() or not all(isinstance(index, fx.Node) for index in indices):
        return None
    counted = [_counts_along(index, size, result.dim()) for index, size in zip(indices, value.shape, strict=True)]
    axes = [axis for axis in counted if axis is not None]
    # The order of elements is kept if each dimension counts along a later one of the result.
    if len(axes) < len(counted) or axes != sorted(set(axes)) or value.numel() != result.numel():
        return None
    with node.graph.inserting_before(node):
        return emit(node.graph, aten.view.default, (source, list(result.shape)), origin(node))


def _counts_along(index: fx.Node, size: int, rank: int) -> int | None:
    """Return the result's dimension along which ``index`` counts from 0 to ``size`` - 1, or None."""
    shape: Sequence[int] = index.meta["val"].shape
    node: Any = index
    while node.target in _KEEPS_COUNT and (node.target is not aten.add.Tensor or node.args[1] == 0):
        node = node.args[0]
    if node.target is not aten.arange.default or tuple(node.meta["val"].shape) != (size,) or node.args != (size,):
        return None
    long = [dim for dim, length in enumerate(shape) if length == size]
    if index.meta["val"].numel() != size or len(long) != 1:
        return None
    return rank - len(shape) + long[0]


# Operators that only add dimensions of size one to a table of positions, or cast it.
_KEEPS_COUNT = {aten.unsqueeze.default, aten.view.default, aten._to_copy.default, aten.add.Tensor}
