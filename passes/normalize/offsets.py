"""offsets: make offsets of embedding bags count from the first index of the whole batch, not of one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.errors import PlacementError
from zerograph.ir.dims import Size
from zerograph.ir.mesh import piece_count
from zerograph.ir.metadata import has_role, meta, origin
from zerograph.ir.rewrite import emit, operand
from zerograph.ir.sbp import NdSbp, Split, broadcast
from zerograph.ir.sizes import sizes_of
from zerograph.ops.rows import shift_offsets
from zerograph.passes.context import Context

aten = torch.ops.aten

# Operators that read indices in bags; the positions of the arguments for indices and offsets.
BAGS: dict[Any, tuple[int, int]] = {
    aten._embedding_bag.default: (1, 2),
    aten._embedding_bag_forward_only.default: (1, 2),
    aten._embedding_bag_backward.default: (1, 2),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3),
}


def offsets(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Make the offsets of bags that each rank counts from its own first index count in the whole batch.

    If a later rank's offsets begin at 0, they count within its part. Offsets that count within the whole batch begin
    where the bags of the ranks before end. Both are thus right in every step, whatever the first step had.
    """
    if context.has_time:
        # The batch is cut twice: ``check_indices`` refuses such offsets.
        return module
    for node in list(module.graph.nodes):
        positions = BAGS.get(node.target)
        if positions is None or not counts_from_whole(node, context.batch.inputs):
            continue
        indices, starts = (operand(node, position) for position in positions)
        sbp = _input_sbp(starts, context.batch.inputs)
        assert sbp is not None
        if piece_count(sbp, context.mesh) > 1:
            with module.graph.inserting_before(node):
                counts = [_parts(node, one, sbp, context) for one in (starts, indices)]
                shifted = emit(module.graph, shift_offsets, (starts, *counts), origin(node))
            node.update_arg(positions[1], shifted)
    return module


def counts_from_whole(node: fx.Node, inputs: Sequence[NdSbp]) -> bool:
    """Return whether :func:`offsets` makes the offsets of this operator of ``BAGS`` count in the whole batch.

    Indices and offsets must be unchanged inputs, split alike along dimension 0.

    Args:
        node: an operator of ``BAGS``.
        inputs: SBP of each input of the step, in order.
    """
    indices, starts = (node.args[position] for position in BAGS[node.target])
    if not isinstance(indices, fx.Node) or not isinstance(starts, fx.Node):
        return False
    sbp = _input_sbp(starts, inputs)
    if sbp is None or sbp != _input_sbp(indices, inputs):
        return False
    return Split(0) in sbp and all(placement in (Split(0), broadcast) for placement in sbp)


def _input_sbp(node: fx.Node, inputs: Sequence[NdSbp]) -> NdSbp | None:
    """Return the SBP of the input that the node is a copy or view of; None for any other node."""
    while node.target in _UNCHANGED:
        node = node.all_input_nodes[0]
    return inputs[int(meta(node)["role"].name)] if has_role(node, "input") else None


_UNCHANGED: set[Any] = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.view.default,
}


def _parts(node: fx.Node, tensor: fx.Node, sbp: NdSbp, context: Context) -> list[Size]:
    """Return how many entries of an input each rank has.

    Raises:
        PlacementError: they may differ, and several mesh dimensions split the input.
    """
    size, ranks = meta(tensor)["val"].shape[0], piece_count(sbp, context.mesh)
    if isinstance(size, int):
        return [size // ranks] * ranks
    split = [dim for dim, one in enumerate(sbp) if isinstance(one, Split) and context.mesh.shape[dim] > 1]
    if len(split) > 1:
        raise PlacementError(
            f"{node.target} has offsets into a batch whose size differs, which several mesh dimensions split\n"
            f"{origin(node).line}\nPass bags of equal size (2-D indices), padded with padding_idx."
        )
    return sizes_of(size).parts(size, ranks, split[0])
