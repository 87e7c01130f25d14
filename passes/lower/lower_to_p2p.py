"""lower_to_p2p: replace collectives by exchanges of pieces between pairs of ranks where the runtime asks for it.

The pass runs after ``schedule``, which sees torch's own collectives: each start and each wait keeps its place. The
pieces of a reduce-scatter are summed after the wait, which frees the tensor that they were cut from.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.ir.metadata import Boxing, meta
from zerograph.ir.rank_numbers import RankArguments, along
from zerograph.ir.rewrite import emit_like, operand, replace_node
from zerograph.ops import blocks
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def lower_to_p2p(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace collectives by exchanges of pieces between ranks where the runtime asks for it."""
    graph = module.graph
    if "all-gather" in context.backend.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
            start.target = context.backend.exchanges["all-gather"]
    if "reduce-scatter, summed" in context.backend.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
            whole, _, ranks, group = start.args
            start.target = context.backend.exchanges["reduce-scatter, summed"]
            start.args = whole, ranks, group
    if "reduce-scatter, coded" in context.backend.exchanges:
        for total in graph.find_nodes(op="call_function", target=blocks.sum_decoded):
            _sum_in_hosts(graph, total, context)
    if "reduce-scatter" in context.backend.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
            _sum_pieces(graph, start, context)
    if "all-reduce" in context.backend.exchanges:
        for start in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
            source, _, group = start.args
            start.target = context.backend.exchanges["all-reduce"]
            start.args = source, meta(start)["boxing"].ranks, group
    return module


def _sum_in_hosts(graph: fx.Graph, total: fx.Node, context: Context) -> None:
    """Replace the exchange of coded parts by one that codes the sum of each host's ranks."""
    (wait,) = total.all_input_nodes
    (start,) = wait.all_input_nodes
    (code,) = start.all_input_nodes
    change: Boxing = meta(start)["boxing"]
    if change.reduced is not None and change.reduced.feedback:
        # It needs the code of each rank's own part.
        return
    (parts,) = code.all_input_nodes
    with graph.inserting_before(code):
        exchange = context.backend.exchanges["reduce-scatter, coded"]
        reduced = emit_like(total, exchange, parts, *total.args[1:], change.ranks, start.args[-1])
    meta(reduced)["boxing"] = change
    with graph.inserting_before(total):
        total.replace_all_uses_with(emit_like(total, c10d.wait_tensor.default, reduced))
    for node in (total, wait, start, code):
        graph.erase_node(node)


def _sum_pieces(graph: fx.Graph, start: fx.Node, context: Context) -> None:
    """Replace a reduce-scatter by an exchange of pieces and a local sum."""
    change: Boxing = meta(start)["boxing"]
    (wait,) = start.users
    whole, group = operand(start), start.args[-1]
    with graph.inserting_before(start):
        pieces = emit_like(start, context.backend.exchanges["reduce-scatter"], whole, change.ranks, group)
    meta(pieces)["boxing"] = change
    rank = context.mesh.position[change.dim]
    size = whole.meta["val"].shape[0] // change.ranks
    with graph.inserting_before(wait):
        received = emit_like(start, c10d.wait_tensor.default, pieces)
        # The total has memory of its own, so the in-place addition below changes no other tensor.
        total = (
            emit_like(start, aten.select.int, received, 0, 0)
            if change.ranks == 2
            else emit_like(start, aten.sum.dim_IntList, received, [0], dtype=received.meta["val"].dtype)
        )
        place: RankArguments = {2: along(change.dim, size), 3: along(change.dim, size, size)}
        own = emit_like(start, aten.slice.Tensor, whole, 0, rank * size, (rank + 1) * size)
        meta(own)["rank_arguments"] = place
        total = emit_like(start, aten.add_.Tensor, total, own)
    replace_node(wait, total)
    graph.erase_node(start)
