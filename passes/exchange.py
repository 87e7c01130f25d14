"""exchange: what moves shards between pairs of ranks takes the place of collectives that serve worse on this wire.

It comes behind ``schedule``, which sees torch's own collectives: each start and each wait keeps its place. A
reduce-scatter's pieces are summed where they arrive, which frees the tensor that they were cut from.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.passes.context import Context
from zerograph.passes.edit import emit
from zerograph.step_graph import Boxing, origin

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def exchange(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Gathers, reduce-scatters and all-reduces are exchanges of pieces where the runtime asks for them."""
    graph = module.graph
    if "all-gather" in context.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
            start.target = context.exchanges["all-gather"]
    if "reduce-scatter" in context.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
            _sum_pieces(graph, start, context)
    if "all-reduce" in context.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
            source, _, group = start.args
            start.target = context.exchanges["all-reduce"]
            start.args = source, start.meta["boxing"].ranks, group
    return module


def _sum_pieces(graph: fx.Graph, start: fx.Node, context: Context) -> None:
    found: Boxing = start.meta["boxing"]
    (wait,) = start.users
    whole, _, _, group = start.args
    assert isinstance(whole, fx.Node)
    with graph.inserting_before(start):
        pieces = _emit(graph, start, context.exchanges["reduce-scatter"], whole, found.ranks, group)
    pieces.meta["boxing"] = found
    rank = context.mesh.position[found.dim]
    size = whole.meta["val"].shape[0] // found.ranks
    with graph.inserting_before(wait):
        received = _emit(graph, start, c10d.wait_tensor.default, pieces)
        # In memory of its own, which nobody else reads.
        total = (
            _emit(graph, start, aten.select.int, received, 0, 0)
            if found.ranks == 2
            else _emit(graph, start, aten.sum.dim_IntList, received, [0])
        )
        own = _emit(graph, start, aten.slice.Tensor, whole, 0, rank * size, (rank + 1) * size)
        own.meta["own"] = (2, 3)
        total = _emit(graph, start, aten.add_.Tensor, total, own)
    wait.replace_all_uses_with(total)
    graph.erase_node(wait)
    graph.erase_node(start)


def _emit(graph: fx.Graph, like: fx.Node, target: object, *args: object) -> fx.Node:
    node = emit(graph, target, args, origin(like))
    node.meta |= {key: like.meta[key] for key in ("sbp", "global")}
    return node
