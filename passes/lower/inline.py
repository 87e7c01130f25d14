"""Putting a local region's graph in the place of its node."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from zerograph.ir.evaluate import evaluate
from zerograph.ir.metadata import meta, origin
from zerograph.ir.random import uniform
from zerograph.ir.region import region_of
from zerograph.ir.rewrite import copy_placement, emit
from zerograph.passes.context import Context

aten = torch.ops.aten


def put_in_place(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    """The region's operators stand where ``node`` stood, each with this rank's value, which is nothing globally."""
    region = region_of(node)
    given = node.args[0]
    assert isinstance(given, (list, tuple))
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for placeholder, argument in zip(region.graph.find_nodes(op="placeholder"), given, strict=True):
            assert isinstance(argument, fx.Node)
            copies[placeholder] = _contiguous(graph, argument, node)
        for inner in region.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = _copied(graph, inner, copies, context)
        results = region.graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        # An output of its own, even where the region returns what it was given.
        outputs = [
            emit(graph, aten.alias.default, (_contiguous(graph, copies[one], node),), origin(node), local=True)
            for one in results
            if isinstance(one, fx.Node)
        ]
    for reader in list(node.users):
        assert reader.target is operator.getitem
        index = reader.args[1]
        assert isinstance(index, int)
        copy_placement(outputs[index], reader)
        reader.replace_all_uses_with(outputs[index])
        graph.erase_node(reader)
    graph.erase_node(node)


def _copied(graph: fx.Graph, inner: fx.Node, copies: dict[fx.Node, fx.Node], context: Context) -> fx.Node:
    if inner.target is uniform:
        return _drawn(graph, inner, copies, context)
    copy = graph.node_copy(inner, copies.__getitem__)
    copy.meta = {"origin": origin(inner), "local": True}
    copy.meta["val"] = evaluate(copy)
    return copy


def _drawn(graph: fx.Graph, inner: fx.Node, copies: dict[fx.Node, fx.Node], context: Context) -> fx.Node:
    """Ranks draw differently: this rank's numbers are its row of a tensor with a row for each rank."""
    seed, number, size, _, _, dtype, device = inner.args
    assert isinstance(seed, fx.Node)
    assert isinstance(size, (list, tuple))
    # Of a micro-batch: that of its place behind those of the ranks before and the micro-batches before.
    start = [context.mesh.position[0] * (context.mesh.size // context.mesh.shape[0]), *[0] * len(size)]
    drawn = emit(
        graph,
        uniform,
        (copies[seed], number, [1, *size], start, [context.mesh.size, *size], dtype, device),
        origin(inner),
        local=True,
    )
    meta(drawn)["rank_arguments"] = (3,)
    if context.timed:
        meta(drawn)["draw_dim"] = 0
    return emit(graph, aten.select.int, (drawn, 0, 0), origin(inner), local=True)


def _contiguous(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """A region was traced, and its readers were, with contiguous tensors."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.is_contiguous():
        return node
    kind = torch.contiguous_format
    return emit(graph, aten.clone.default, (node,), origin(like), local=True, memory_format=kind)
