"""Dispatch of tokens to the ranks of their experts, and back: the nodes that replace it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.dims import Size
from zerograph.ir.mesh import global_shape
from zerograph.ir.metadata import Boxing, TensorRef, meta, origin
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, Split, broadcast, partial_sum
from zerograph.ir.step_graph import nbytes
from zerograph.ops.dispatch import COMBINE, DISPATCH, GATHER_IDS, PACK, ROUTES, UNPACK
from zerograph.ops.rows import exchange_rows
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.lower.lowering import Lowering, c10d, with_entry
from zerograph.passes.placement.experts import capacity_of, exchanged_along

aten = torch.ops.aten


def lower_dispatch(node: fx.Node, shape: Sequence[Size], context: Context) -> None:
    """Replace a node by an expansion over groups, by a sum over them, or by an exchange.

    Args:
        node: the node, which has its global value still.
        shape: shape of its local value.
        context: the context of the passes.
    """
    # It is the signature of the operator that the node had.
    dim = exchanged_along(node, meta(node).pop("signature"))
    if dim is not None:
        _send(node, dim, context)
    elif node.target is GATHER_IDS:
        node.target = aten.alias.default
    elif node.target is DISPATCH:
        node.target, node.args = aten.expand.default, (node.args[0], [shape[0], -1, -1])
    else:
        node.target, node.args = aten.sum.dim_IntList, (node.args[0], [0])


def _send(node: fx.Node, dim: int, context: Context) -> None:
    """Exchange tokens, or gather them and reduce results where an exchange sends no less."""
    if node.target is not GATHER_IDS and context.batch.expert_capacity is not None:
        ranks, tokens = context.mesh.shape[dim], rules.arguments(node)["ids"].meta["val"].shape[0]
        limit = capacity_of(node, tokens // ranks, ranks, context)
        if limit * ranks < tokens:
            _exchange(node, dim, limit, context)
            return
    (source, *_), sbp = node.all_input_nodes, meta(node)["sbp"]
    held = nbytes(source.meta["val"])
    if node.target is COMBINE:
        change = _change(node, "results of experts", with_entry(sbp, dim, partial_sum), sbp, dim, held, context)
    else:
        what, moves = "experts of tokens", (with_entry(sbp, dim, Split(0)), with_entry(sbp, dim, broadcast))
        what = "tokens to experts" if node.target is DISPATCH else what
        change = _change(node, what, *moves, dim, held * context.mesh.shape[dim], context)
    with node.graph.inserting_before(node):
        lowering = Lowering(node.graph, node, context, change)
        if node.target is COMBINE:
            rows = lowering.contiguous(lowering.emit(aten.squeeze.dim, source, 0))
            sent = lowering.collective(c10d.reduce_scatter_tensor.default, rows, "sum", change.ranks)
        else:
            sent = lowering.gathered(source, 0)
    is_dispatch = node.target is DISPATCH
    node.target, node.kwargs = aten.unsqueeze.default if is_dispatch else aten.alias.default, {}
    node.args = (sent, 0) if is_dispatch else (sent,)


def _exchange(node: fx.Node, dim: int, limit: int, context: Context) -> None:
    """Let the node unpack the rows of a first round, and send the rows of a second one."""
    operator: Any = node.target
    rows, ids = rules.tensor_arguments(node)
    ranks, group, graph = context.mesh.shape[dim], context.mesh.groups[dim], node.graph
    tokens = ids.meta["val"].shape[0]
    numbers = context.mesh.position[dim], limit
    sbp: NdSbp = meta(node)["sbp"]
    routes = _routes_of(ids, node, ranks, context)
    with graph.inserting_before(node):
        packed = emit(graph, PACK[operator], (rows, routes, *numbers), origin(node), sbp=sbp)
        width = packed.meta["val"].shape[1]
        sizes = [limit * width] * ranks, [limit] * ranks, [ranks * limit, width]
        start = emit(graph, exchange_rows, (packed, *sizes, group), origin(node), sbp=sbp)
        wait = emit(graph, WAIT, (start,), origin(node), sbp=sbp)
    for emitted in (packed, start, wait):
        meta(emitted)["global"] = (ranks * ranks * limit, width)
    meta(packed)["rank_arguments"] = {2: along(dim, 1)}
    # Places in the order of tokens that are sent.
    meta(packed)["temporary"] = 8 * (tokens + ranks * limit)
    what = "tokens to experts" if operator is DISPATCH else "results of experts"
    moves = with_entry(sbp, dim, Split(0)), with_entry(sbp, dim, Split(1))
    meta(start)["boxing"] = _change(node, what, *moves, dim, ranks * nbytes(packed.meta["val"]), context)
    meta(node)["boxing"] = _change(node, what, *moves, dim, 0, context, ", above the capacity")
    meta(node)["rank_arguments"] = {3: along(dim, 1)}
    # Places of tokens; results of experts from one rank, before they are added.
    meta(node)["temporary"] = tokens * (8 + 2) + (nbytes(node.meta["val"]) // ranks if operator is COMBINE else 0)
    node.target, node.args, node.kwargs = UNPACK[operator], (wait, rows, routes, *numbers, group), {}


def _routes_of(ids: fx.Node, node: fx.Node, ranks: int, context: Context) -> fx.Node:
    """Return the node of the routes of these tokens, emitted before the first node that exchanges them."""
    known = next((user for user in ids.users if user.target is ROUTES), None)
    if known is not None:
        return known
    experts, tokens = rules.arguments(node)["experts"], ids.meta["val"].shape[0]
    sbp = tuple(Split(1) if isinstance(entry, Split) else entry for entry in meta(ids)["sbp"])
    with ids.graph.inserting_before(node):
        routes = emit(ids.graph, ROUTES, (ids, ranks, experts), origin(node), sbp=sbp)
    meta(routes)["global"] = global_shape(routes.meta["val"].shape, sbp, context.mesh)
    meta(routes)["temporary"] = 3 * tokens * ranks * 4
    return routes


def _change(
    node: fx.Node, what: str, before: NdSbp, after: NdSbp, dim: int, together: int, context: Context, more: str = ""
) -> Boxing:
    """Describe what ranks send of ``together`` bytes, which those along ``dim`` hold."""
    where = origin(node)
    tensor = TensorRef("value", f"{what} of {where.place}{more}")
    return Boxing(before, after, dim, context.mesh.shape[dim], tensor, together, where.phase)
