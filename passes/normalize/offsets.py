"""offsets: where a bag begins is counted from the first index of the whole batch, not from that of one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.mesh import piece_count
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, Split, broadcast
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
    if context.timed:
        # Parts of parts: ``check_indices`` refuses such offsets among a graph's plain inputs.
        return module
    for node in list(module.graph.nodes):
        places = BAGS.get(node.target)
        if places is None or not counts_from_whole(node, context.batch.inputs):
            continue
        indices, begins = (node.args[place] for place in places)
        assert isinstance(indices, fx.Node)
        assert isinstance(begins, fx.Node)
        placed = _input_sbp(begins, context.batch.inputs)
        assert placed is not None
        ranks = piece_count(placed, context.mesh)
        if ranks > 1:
            node.update_arg(places[1], _in_whole(node, begins, meta(indices)["val"].shape[0] // ranks, ranks))
    return module


def counts_from_whole(node: fx.Node, inputs: Sequence[NdSbp]) -> bool:
    """Return whether :func:`offsets` makes the offsets of this operator of ``BAGS`` count in the whole batch.

    Indices and offsets must be inputs as they were given, split alike along dimension 0.

    Args:
        inputs: SBP of each input of the step, by its number.
    """
    indices, begins = (node.args[place] for place in BAGS[node.target])
    if not isinstance(indices, fx.Node) or not isinstance(begins, fx.Node):
        return False
    placed = _input_sbp(begins, inputs)
    if placed is None or placed != _input_sbp(indices, inputs):
        return False
    return Split(0) in placed and all(one in (Split(0), broadcast) for one in placed)


def _input_sbp(node: fx.Node, inputs: Sequence[NdSbp]) -> NdSbp | None:
    """Return the SBP of the input that the node holds as it was given; None for any other node."""
    while node.target in _AS_GIVEN:
        node = node.all_input_nodes[0]
    placed = role(node)
    return inputs[int(placed.name)] if placed is not None and placed.kind == "input" else None


_AS_GIVEN: set[Any] = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.view.default,
}


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
