"""Boxing along time: the operands and results of the loop over micro-batches.

Nothing is sent. A tensor that leaves the loop is complete only after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.errors import PlacementError
from zerograph.ir.dims import Size
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing, boxing_of, has_role, meta, origin
from zerograph.ir.rewrite import emit, fake
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Split, broadcast, show
from zerograph.ir.sizes import sizes_of
from zerograph.passes.context import Context
from zerograph.passes.placement.route import route

aten = torch.ops.aten


def enter(x: Tensor, along: int, micro_batches: int, start: Size = 0, size: Size | None = None) -> Tensor:
    """Return a micro-batch's part of ``x``. Until ``loop``, marks where ``x`` is cut for each micro-batch.

    Args:
        x: the tensor of all micro-batches, [..., micro_batches * size, ...] if they are equal.
        along: the dimension that is cut.
        micro_batches: number of micro-batches.
        start, size: begin and size of the part, symbols of each micro-batch; by default all are equal.

    Returns:
        [..., size, ...]
    """
    return x.narrow(along, start, x.shape[along] // micro_batches if size is None else size)


def leave(
    x: Tensor, along: int | None, micro_batches: int, start: Size | None = None, whole: Size | None = None
) -> Tensor:
    """Return the sum of ``x`` over the micro-batches, or all parts end to end. Until ``loop``, marks a result of it.

    Args:
        x: the tensor of one micro-batch, [..., size, ...].
        along: the dimension along which the parts are concatenated; None for a sum.
        micro_batches: number of micro-batches.
        start: begin of the part, a symbol of each micro-batch; None if all are equal.
        whole: size of all parts together; None if all are equal.

    Returns:
        [..., whole, ...], or the shape of ``x`` for a sum.
    """
    shape: list[Size] = list(x.shape)
    if along is not None:
        shape[along] = shape[along] * micro_batches if whole is None else whole
    return x.new_empty(shape)


def pack(x: Tensor, sbp: str) -> Tensor:
    """Stack the ``x`` of every micro-batch in a new first dimension. Stands in the graph until ``localize``."""
    raise NotImplementedError("pack only marks a node that localize replaces")


def route_with_time(
    source: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, mesh: Mesh, first: int, *, ranks_first: bool
) -> tuple[NdSbp, ...]:
    """Return the SBPs from ``source`` (left out) to ``target``, where the last mesh dimension is time.

    Args:
        source, target: SBPs of the global tensor.
        shape, itemsize: shape and bytes per element of the global tensor.
        mesh: the ranks, and time as the last dimension.
        first: see :func:`route`.
        ranks_first: tensors that leave the loop are moved between the ranks in each micro-batch; else once, after the
            last one.
    """
    before, after = source[-1], target[-1]
    ranks = Mesh(mesh.shape[:-1], mesh.position[:-1], mesh.groups[:-1])
    if mesh.slices is None:
        between_ranks = route(source[:-1], target[:-1], shape, itemsize, ranks, first)
    else:
        between_ranks = (target[:-1],) if source[:-1] != target[:-1] else ()
    inside_loop = before == after or (after == broadcast and ranks_first)
    if inside_loop and not _cuts_finer(source, target, mesh):
        inside = tuple((*step, before) for step in between_ranks)
        return inside if before == after else (*inside, target)
    leaving = () if before == broadcast else ((*source[:-1], broadcast),)
    entering = () if after == broadcast else (target,)
    return (*leaving, *((*step, broadcast) for step in between_ranks), *entering)


def _cuts_finer(source: NdSbp, target: NdSbp, mesh: Mesh) -> bool:
    """Return whether time splits a dimension that ranks split either before or after, but not both.

    The parts of a rank in one micro-batch are then not contiguous slices.
    """
    time, ranks = source[-1], zip(source[:-1], target[:-1], mesh.shape[:-1], strict=True)
    return isinstance(time, Split) and any(
        before != after and time in (before, after) and size > 1 for before, after, size in ranks
    )


def pack_output(graph: fx.Graph, output: fx.Node, context: Context) -> fx.Node:
    """Emit a node that stacks an output of all micro-batches in a new first dimension, [micro_batches, ...].

    A sum over the micro-batches is scaled by their number, so that the mean of the entries is the sum.
    """
    before: NdSbp = meta(output)["sbp"]
    value: Tensor = output.meta["val"]
    shape, source = list(value.shape), output
    if isinstance(before[-1], PartialSum):
        source = emit(graph, aten.mul.Tensor, (output, context.batch.micro_batches), origin(output), sbp=before)
    elif isinstance(before[-1], Split):
        rows = shape[before[-1].dim]
        if not isinstance(rows, int) and sizes_of(rows).is_rows(rows):
            raise PlacementError(
                "config.accumulation_outputs = 'packed' stacks an output of all micro-batches, which may be of unequal "
                "sizes\nSet it to 'whole', or give each rank a number of rows that gradient_accumulation_steps divides."
            )
        shape[before[-1].dim] //= context.batch.micro_batches
    after = packed_sbp((*before[:-1], broadcast))
    node = graph.call_function(pack, (source, show(after)))
    stacked = fake(graph, (context.batch.micro_batches, *shape), value.dtype, value.device)
    meta(node).update({"val": stacked, "sbp": after, "origin": origin(output)})
    return node


def packed_sbp(sbp: NdSbp) -> NdSbp:
    """Return the SBP of a tensor after a dimension is added at its front."""
    return tuple(map(_shifted, sbp))


def _shifted(sbp: Sbp) -> Sbp:
    return Split(sbp.dim + 1) if isinstance(sbp, Split) else sbp


def batch_only_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that are computed from inputs, buffers, random numbers and constants only."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            from_batch = has_role(node, "input", "buffer", "seed", "scaler")
        else:
            from_batch = node.op in ("call_function", "get_attr") and nodes.issuperset(node.all_input_nodes)
        if from_batch:
            nodes.add(node)
    return frozenset(nodes)


def sbps(node: fx.Node) -> Sequence[NdSbp]:
    """Return the SBP of each tensor that the node yields."""
    sbp: Any = meta(node).get("sbp", ())
    return sbp if not sbp or isinstance(sbp[0], tuple) else (sbp,)


def change_sbps(node: fx.Node, change: Callable[[NdSbp], NdSbp]) -> None:
    """Apply ``change`` to the SBP of each tensor that the node yields."""
    changed = tuple(map(change, sbps(node)))
    if changed:
        meta(node)["sbp"] = changed if isinstance(meta(node)["sbp"][0], tuple) else changed[0]


def time_boxing(node: fx.Node, context: Context) -> Boxing | None:
    """Return the change of SBP that a node makes, if it is along time."""
    boxing = boxing_of(node)
    return boxing if boxing is not None and boxing.dim == context.time_dim else None
