"""Putting a local region's graph in the place of its node."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from zerograph.passes.context import Context
from zerograph.passes.edit import emit
from zerograph.passes.evaluate import evaluate
from zerograph.random import uniform
from zerograph.region import region_of
from zerograph.step_graph import origin

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
            _inner(emit(graph, aten.alias.default, (_contiguous(graph, copies[one], node),), origin(node)))
            for one in results
            if isinstance(one, fx.Node)
        ]
    for reader in list(node.users):
        assert reader.target is operator.getitem
        index = reader.args[1]
        assert isinstance(index, int)
        outputs[index].meta |= {key: reader.meta[key] for key in ("sbp", "global") if key in reader.meta}
        reader.replace_all_uses_with(outputs[index])
        graph.erase_node(reader)
    graph.erase_node(node)


def _copied(graph: fx.Graph, inner: fx.Node, copies: dict[fx.Node, fx.Node], context: Context) -> fx.Node:
    if inner.target is uniform:
        return _drawn(graph, inner, copies, context)
    copy = graph.node_copy(inner, copies.__getitem__)
    copy.meta = {"origin": origin(inner)}
    copy.meta["val"] = evaluate(copy)
    return _inner(copy)


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
    )
    drawn.meta["own"] = (3,)
    if context.timed:
        drawn.meta["advances"] = 0
    return _inner(emit(graph, aten.select.int, (_inner(drawn), 0, 0), origin(inner)))


def _contiguous(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """A region was traced, and its readers were, with contiguous tensors."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.is_contiguous():
        return node
    return _inner(emit(graph, aten.clone.default, (node,), origin(like), memory_format=torch.contiguous_format))


def _inner(node: fx.Node) -> fx.Node:
    node.meta["local"] = True
    return node
