"""recompute_cheap: recompute in backward what one pass over memory computes, instead of saving it.

The gradients of a matrix product's weights need the product's input again. If that input is an activation function or a
layer norm of a value that backward reads too, saving both wastes memory. Backward recomputes it just before it is read,
from the same numbers by the same operator, bitwise. One pass over the tensor takes next to no time beside the product.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import is_view
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import drop_unused
from zerograph.ir.step_graph import nbytes
from zerograph.passes.context import Context

aten = torch.ops.aten

# Minimum bytes on a rank to recompute a value.
_MIN_BYTES = 2**16


def recompute_cheap(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Recompute large activation functions and layer norms in backward if backward reads their inputs anyway."""
    recomputed: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        producer = node.args[0] if node.target is operator.getitem else node
        if not isinstance(producer, fx.Node) or not _is_cheap(producer, node):
            continue
        if nbytes(node.meta["val"]) < _MIN_BYTES * context.ranks:
            continue
        readers = [reader for reader in _readers(node) if origin(reader).phase == "backward"]
        if readers and all(_is_alive(source, min(readers), recomputed) for source in producer.all_input_nodes):
            _recompute(node, producer, readers)
            recomputed.add(node)
    drop_unused(module.graph)
    return module


def _is_cheap(producer: fx.Node, node: fx.Node) -> bool:
    if origin(producer).phase != "forward" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if producer.target is aten.native_layer_norm.default:
        return node is not producer and bool(node.args[1] == 0)
    if producer is not node or not isinstance(producer.target, OpOverload):
        return False
    return torch.Tag.pointwise in producer.target.tags


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that compute with the node's value: its users, and those of its views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_alive(node: fx.Node, reader: fx.Node, recomputed: set[fx.Node]) -> bool:
    """Return whether the node's memory is still allocated at ``reader``, without its recomputed readers."""
    node = _view_base(node)
    if node.op == "placeholder":
        return True
    if node in recomputed:
        return False
    return any(reader <= later for later in _readers(node) if origin(later).phase == "backward")


def _recompute(node: fx.Node, producer: fx.Node, readers: list[fx.Node]) -> None:
    """Copy the operator, and the views between it and its readers in backward, to before the first reader."""
    graph = node.graph
    copies: dict[fx.Node, fx.Node] = {}

    def copy(source: fx.Node) -> fx.Node:
        if source not in copies:
            if source is not producer:
                copy(source.all_input_nodes[0])
            copies[source] = graph.node_copy(source, lambda source: copies.get(source, source))
            meta(copies[source]).update({"origin": replace(origin(source), phase="backward"), "recomputed": True})
        return copies[source]

    with graph.inserting_before(min(readers)):
        for reader in readers:
            for source in reader.all_input_nodes:
                if _view_base(source) is node:
                    reader.replace_input_with(source, copy(source))


def _view_base(node: fx.Node) -> fx.Node:
    """Return the node of which this one is a view, or itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
