"""offsets: where a bag begins is counted from the first index of the whole batch, not from that of one rank's part."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import Split
from zerograph.passes.context import Context

aten = torch.ops.aten

# Operators that read indices in bags that begin at offsets, and where these stand among their arguments.
BAGS: dict[Any, tuple[int, int]] = {
    aten._embedding_bag.default: (1, 2),
    aten._embedding_bag_forward_only.default: (1, 2),
    aten._embedding_bag_backward.default: (1, 2),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3),
}


def offsets(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Offsets of bags that each rank counts from its own first index count from the first of the whole batch.

    A rank after the first whose offsets begin at 0 counts within its part; one that counts within the whole batch
    begins where the bags before it end. Both are thus right, in every step, whatever was compared at the first.
    """
    if context.rank_dims != 1 or context.timed:
        # Parts of parts: ``check_indices`` refuses such offsets among a graph's plain inputs.
        return module
    ranks = context.mesh.shape[0]
    for node in list(module.graph.nodes):
        places = BAGS.get(node.target)
        if places is None or ranks == 1:
            continue
        indices, begins = (node.args[place] for place in places)
        if (
            isinstance(indices, fx.Node)
            and isinstance(begins, fx.Node)
            and all(_is_part(one, context) for one in (indices, begins))
        ):
            node.update_arg(places[1], _in_whole(node, begins, meta(indices)["val"].shape[0] // ranks, ranks))
    return module


def _is_part(node: fx.Node, context: Context) -> bool:
    """Return whether the node holds an input that is split along dimension 0, as it was given."""
    while node.target in (aten._to_copy.default, aten.view.default, aten.alias.default, aten.detach.default):
        node = node.all_input_nodes[0]
    found = role(node)
    return found is not None and found.kind == "input" and context.batch.inputs[int(found.name)] == (Split(0),)


def _in_whole(node: fx.Node, begins: fx.Node, part: int, ranks: int) -> fx.Node:
    """Emit the offsets from the first index of the whole batch, of which each rank brings ``part`` indices."""
    graph, value, where = node.graph, meta(begins)["val"], origin(node)
    with graph.inserting_before(node):
        rows = emit(graph, aten.view.default, (begins, [ranks, -1]), where)
        first = emit(graph, aten.slice.Tensor, (rows, 1, 0, 1), where)
        options = {"dtype": value.dtype, "device": value.device}
        starts = emit(graph, aten.arange.default, (ranks,), where, **options)
        starts = emit(graph, aten.mul.Tensor, (starts, part), where)
        starts = emit(graph, aten.unsqueeze.default, (starts, 1), where)
        own = emit(graph, aten.eq.Scalar, (first, 0), where)
        shifted = emit(graph, aten.add.Tensor, (rows, starts), where)
        chosen = emit(graph, aten.where.self, (own, shifted, rows), where)
        return emit(graph, aten.view.default, (chosen, list(value.shape)), where)
