"""Replace the node of a local region by the region's graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from zerograph.ir.evaluate import evaluate
from zerograph.ir.mesh import start_of_slices
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rank_numbers import RankNumber, along
from zerograph.ir.region import region_of
from zerograph.ir.rewrite import copy_placement, emit, operand, replace_node
from zerograph.ir.step_graph import output_nodes, placeholders
from zerograph.ops.random import uniform
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten


def inline_region(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    """Replace a node ``local`` by the operators of its region, each with this rank's value and no global tensor.

    Args:
        graph: the graph of the node, in local shapes.
        node: the node.
        context: the mesh.
    """
    region = region_of(node)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for placeholder, argument in zip(placeholders(region.graph), rules.tensor_arguments(node), strict=True):
            copies[placeholder] = _contiguous(graph, argument, node)
        for inner in region.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = _copy_node(graph, inner, copies, context)
        # The alias keeps outputs apart where the region returns one of its inputs.
        outputs = [
            emit(graph, aten.alias.default, (_contiguous(graph, copies[result], node),), origin(node), local=True)
            for result in output_nodes(region.graph)
        ]
    for reader in list(node.users):
        _, index = rules.output_of(reader)
        copy_placement(outputs[index], reader)
        replace_node(reader, outputs[index])
    graph.erase_node(node)


def _copy_node(graph: fx.Graph, inner: fx.Node, copies: dict[fx.Node, fx.Node], context: Context) -> fx.Node:
    if inner.target is uniform:
        return _draw_per_rank(graph, inner, copies, context)
    copy = graph.node_copy(inner, copies.__getitem__)
    copy.meta = {"origin": origin(inner), "local": True}
    copy.meta["val"] = evaluate(copy)
    return copy


def _draw_per_rank(graph: fx.Graph, inner: fx.Node, copies: dict[fx.Node, fx.Node], context: Context) -> fx.Node:
    """Emit a draw that differs between ranks: this rank's row of a tensor with one row per rank."""
    _, number, size, _, _, dtype, device = inner.args
    assert isinstance(size, (list, tuple))
    # Rows are ordered by rank, then by micro-batch.
    mesh, slices = context.mesh_of_rows, context.batch.slices
    row_number = RankNumber(tuple(math.prod(mesh.shape[dim + 1 :]) for dim in range(mesh.dims - context.has_time)))
    if mesh.slices is not None:
        row_number = start_of_slices(mesh.slices, mesh.slices, mesh.shape[0])
    start = [row_number.at(context.mesh.position), *[0] * len(size)]
    row = emit(
        graph,
        uniform,
        (copies[operand(inner)], number, [1, *size], start, [slices or mesh.size, *size], dtype, device),
        origin(inner),
        local=True,
    )
    meta(row)["rank_arguments"] = {3: (row_number, *(along(0, 0) for _ in size))}
    if context.has_time:
        meta(row)["draw_dim"] = 0
    return emit(graph, aten.select.int, (row, 0, 0), origin(inner), local=True)


def _contiguous(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """Return the node, cloned if it is not contiguous.

    Regions and their readers were traced with contiguous tensors.
    """
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.is_contiguous():
        return node
    layout = torch.contiguous_format
    return emit(graph, aten.clone.default, (node,), origin(like), local=True, memory_format=layout)
