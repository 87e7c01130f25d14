"""mark_fused: mark what a compiler computes where it is read, so that the memory estimate leaves it out.

Inductor computes a pointwise value in the loops that read it, and never stores it, if only loops read it. A scatter is
stored, unless it writes one element of each row, as the gradient of a loss of classes does; the constant that it writes
to is not. What one layer computes and another reads is stored. The marks predict this from operators alone. They change
no node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable
from zerograph.ir.alias import base_of, is_view
from zerograph.ir.layers import layers_of
from zerograph.ir.metadata import meta, origin
from zerograph.ir.operator_parts import LOOPS_OF_SEVERAL, SCATTERS, writes_one_each
from zerograph.passes.context import Context

aten = torch.ops.aten

# Operators that Inductor turns into a pointwise expression, beside those that torch tags so.
_EXPRESSIONS = {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.cat.default,
    aten.full.default,
    aten.full_like.default,
    aten.slice_scatter.default,
    aten.zeros.default,
    aten.zeros_like.default,
}
# Operators of the longest chain: Inductor stores the values of larger expressions.
_DEEPEST = 32


def mark_fused(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Mark values that the backend's compiler fuses into their readers, so that they take no memory."""
    if context.backend.node_by_node:
        return module
    depths: dict[fx.Node, int] = {}
    layers = layers_of(module.graph)
    for node in module.graph.nodes:
        depth = max((depths.get(base_of(source), 0) for source in node.all_input_nodes), default=0) + 1
        if (
            depth <= _DEEPEST
            and _is_expression(node)
            and all(_fuses(node, reader) and _in_one_layer(layers, node, reader) for reader in _readers(node))
        ):
            meta(node)["fused"] = True
            depths[node] = depth
    return module


def _in_one_layer(layers: Mapping[fx.Node, str], node: fx.Node, reader: fx.Node) -> bool:
    """Return whether two nodes belong to one layer; a node outside of all modules joins any."""
    return layers.get(node, layers.get(reader)) == layers.get(reader, layers.get(node))


def _is_expression(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or is_mutable(node.target) or is_view(node):
        return False
    if not isinstance(node.meta.get("val"), Tensor) or "boxing" in node.meta:
        return False
    if node.target in SCATTERS:
        x, dim, index = node.args[:3]
        return writes_one_each(x.meta["val"], dim, index.meta["val"])  # type: ignore
    return torch.Tag.pointwise in node.target.tags or node.target in _EXPRESSIONS


def _fuses(node: fx.Node, reader: fx.Node) -> bool:
    """Return whether the reader is a loop that may compute the node's value: not one of another phase."""
    target = reader.target
    is_loop = isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _EXPRESSIONS or target in LOOPS_OF_SEVERAL
    )
    return is_loop and origin(reader).phase == origin(node).phase


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read the node's value or a view of it."""
    for user in node.users:
        if is_view(user) or user.target is aten._unsafe_view.default:
            yield from _readers(user)
        else:
            yield user
