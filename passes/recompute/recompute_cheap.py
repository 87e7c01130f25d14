"""recompute_cheap: what one pass over memory makes again is not kept from forward for backward.

A model's matrix products need their inputs again for their weights' gradients. Where such an input is an activation
function or a layer norm of something that backward reads too, keeping both is memory for nothing: backward makes it
again just before it reads it, from the same numbers by the same operator, bit by bit. The time of one pass over the
tensor is that of nothing beside the product's.
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

# Bytes on a rank of what is worth a node.
_LEAST = 2**16


def recompute_cheap(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No large activation function or layer norm lives into backward if all that it is made of does."""
    remade: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        made = node.args[0] if node.target is operator.getitem else node
        if not isinstance(made, fx.Node) or not _is_cheap(made, node):
            continue
        if nbytes(node.meta["val"]) < _LEAST * context.ranks:
            continue
        readers = [reader for reader in _readers(node) if origin(reader).phase == "backward"]
        if readers and all(_is_alive(given, min(readers), remade) for given in made.all_input_nodes):
            _make_again(node, made, readers)
            remade.add(node)
    drop_unused(module.graph)
    return module


def _is_cheap(made: fx.Node, node: fx.Node) -> bool:
    if origin(made).phase != "forward" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if made.target is aten.native_layer_norm.default:
        return node is not made and bool(node.args[1] == 0)
    if made is not node or not isinstance(made.target, OpOverload):
        return False
    return torch.Tag.pointwise in made.target.tags


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What computes with the node's value: its users, and those of its views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_alive(node: fx.Node, at: fx.Node, remade: set[fx.Node]) -> bool:
    """Whether the memory that the node's value lies in is held at ``at`` anyway."""
    node = _source(node)
    if node.op == "placeholder":
        return True
    if node in remade:
        return False
    return any(at <= reader for reader in _readers(node) if origin(reader).phase == "backward")


def _make_again(node: fx.Node, made: fx.Node, readers: list[fx.Node]) -> None:
    """Copies of the operator, and of the views between it and its readers in backward, before the first of those."""
    graph = node.graph
    copies: dict[fx.Node, fx.Node] = {}

    def copy(one: fx.Node) -> fx.Node:
        if one not in copies:
            if one is not made:
                copy(one.all_input_nodes[0])
            copies[one] = graph.node_copy(one, lambda given: copies.get(given, given))
            meta(copies[one]).update({"origin": replace(origin(one), phase="backward"), "recomputed": True})
        return copies[one]

    with graph.inserting_before(min(readers)):
        for reader in readers:
            for given in reader.all_input_nodes:
                if _source(given) is node:
                    reader.replace_input_with(given, copy(given))


def _source(node: fx.Node) -> fx.Node:
    """What the node is a view of, or itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
