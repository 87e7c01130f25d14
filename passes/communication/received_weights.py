"""Gathers that send differences: a rank codes its shard less what all ranks have received of it, which it has too.

All ranks add the decoded differences to the weights of the last gather, so all have the same bits. The master shard
stays exact. Errors do not add up: the next difference is taken from what the ranks really have, so it contains the
error of the last code. What remains is the error of one code, of a difference as large as an update.
"""

from __future__ import annotations

from torch import fx

from zerograph.errors import PlacementError
from zerograph.ir.metadata import Boxing, Role, meta, role
from zerograph.ir.rewrite import fake, first_computed
from zerograph.ir.step_graph import placeholders
from zerograph.passes.context import Context


def receive(node: fx.Node, change: Boxing, context: Context) -> None:
    """Add an input for the weights that all ranks have; ``lower_coded`` reads and writes it.

    Args:
        node: the boxing node that gathers a bucket.
        change: its change of SBP.
        context: the context of the passes.

    Raises:
        PlacementError: gathered weights are freed, or gathered twice.
    """
    if context.policy.reshard_after_forward:
        raise PlacementError(
            "config.precision.wire: gathers with feedback=True send differences from the last gathered weights, which "
            f"stage 3 frees ({change.tensor})\nChoose stage 1 or 2, or a format without feedback for 'gather'."
        )
    bucket = next(bucket for bucket in context.buckets if bucket.name == change.tensor.name)
    if len(bucket.zero_dims) > 1:
        raise PlacementError(
            "config.precision.wire: gathers with feedback=True send differences from what all ranks have received. "
            f"With config.zero.shard_dims = {bucket.zero_dims} no single gather reaches all ranks\n"
            "Name one mesh dimension there, or choose a format without feedback for 'gather'."
        )
    graph, received = node.graph, Role("received", f"{change.tensor.name}.received")
    if any(role(other) == received for other in placeholders(graph, "received")):
        raise PlacementError(
            f"config.precision.wire: {change.tensor} is gathered twice in a step, which a format with feedback=True "
            "does not allow\nChoose a format without feedback for 'gather'."
        )
    value = node.meta["val"]
    with graph.inserting_before(first_computed(graph)):
        copy = graph.placeholder(f"{change.tensor.name}_received")
    meta(copy).update(
        {"role": received, "val": fake(graph, tuple(value.shape), value.dtype, value.device), "sbp": change.target}
    )


def received_input(graph: fx.Graph, change: Boxing) -> fx.Node:
    """Return the input that :func:`receive` added."""
    return next(node for node in placeholders(graph, "received") if meta(node)["role"].bucket == change.tensor.name)
