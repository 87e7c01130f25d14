"""box: insert a boxing node wherever a tensor's SBP is not the one that its reader needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from zerograph.ir.metadata import Boxing, TensorRef, meta, origin, role
from zerograph.ir.rewrite import emit, operand, replace_node
from zerograph.ir.sbp import NdSbp, Split, broadcast, show
from zerograph.ir.sizes import hints, largest
from zerograph.passes.accumulation.time_boxing import pack_output, packed_sbp, route_with_time
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.place import needed
from zerograph.passes.placement.route import held_bytes, route


def box(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Insert one boxing node where a reader needs another SBP; readers with the same need share it."""
    graph = module.graph
    boxed: dict[tuple[fx.Node, NdSbp], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is boxing:
            _split_steps(graph, node, context)
            continue
        if node.op == "output" and context.batch.packed:
            _pack_outputs(graph, node, context)
        inputs = [_boxed(graph, tensor, sbp, node, boxed, context) for tensor, sbp in needed(node)]
        _replace_tensors(node, inputs)
    return module


def _pack_outputs(graph: fx.Graph, output: fx.Node, context: Context) -> None:
    """Return the values that micro-batches compute of an output stacked, one entry per micro-batch."""
    with graph.inserting_before(output):
        pairs = [
            (tensor, sbp)
            if meta(tensor)["sbp"][-1] == broadcast
            else (pack_output(graph, tensor, context), packed_sbp((*sbp[:-1], broadcast)))
            for tensor, sbp in needed(output)
        ]
    output.args = (tuple(tensor for tensor, _ in pairs),)
    meta(output)["needs"] = [sbp for _, sbp in pairs]


def _boxed(
    graph: fx.Graph,
    source: fx.Node,
    sbp: NdSbp,
    reader: fx.Node,
    boxed: dict[tuple[fx.Node, NdSbp], fx.Node],
    context: Context,
) -> fx.Node:
    """Return ``source`` in the SBP that ``reader`` needs. ``boxed`` maps tensors and SBPs to boxing nodes."""
    current = source
    for step in _route(source, sbp, context, ranks_first=False):
        if (source, step) not in boxed:
            with graph.inserting_before(reader):
                boxed[source, step] = emit(graph, boxing, (current, show(step)), origin(reader), sbp=step)
            _describe(boxed[source, step], _tensor_ref(source), context)
        current = boxed[source, step]
    return current


def _split_steps(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    """Replace a boxing node of an earlier pass by one node for each step of its route."""
    source = operand(node)
    current = source
    target: NdSbp = meta(node)["sbp"]
    # With reduce_early, the part of a split gradient that a micro-batch adds is reduce-scattered at once.
    # Sums over slices are added in one tree, of which each rank computes a node by itself.
    early = context.policy.split and context.policy.reduce_early and context.batch.slices is None
    ranks_first = early and isinstance(target[context.policy.dims[0]], Split)
    for step in _route(source, target, context, ranks_first=ranks_first)[:-1]:
        with graph.inserting_before(node):
            current = emit(graph, boxing, (current, show(step)), origin(node), sbp=step)
        meta(current)["tensor"] = meta(node)["tensor"]
        _describe(current, meta(node)["tensor"], context)
    node.replace_input_with(source, current)
    if meta(current)["sbp"] == meta(node)["sbp"]:
        replace_node(node, current)
    else:
        _describe(node, meta(node)["tensor"], context)


def _route(source: fx.Node, sbp: NdSbp, context: Context, *, ranks_first: bool) -> tuple[NdSbp, ...]:
    value: Tensor = source.meta["val"]
    tensor = hints(value.shape), value.element_size(), context.mesh_of_rows, context.policy.dims[0]
    if context.has_time:
        return route_with_time(meta(source)["sbp"], sbp, *tensor, ranks_first=ranks_first)
    return route(meta(source)["sbp"], sbp, *tensor)


def _replace_tensors(node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """Replace tensor arguments by position: an operator may need one tensor in two SBPs."""
    remaining = iter(inputs)

    def replaced(argument: fx.Node) -> fx.Node:
        return next(remaining) if isinstance(argument.meta.get("val"), Tensor) else argument

    if inputs:
        args, kwargs = fx.map_arg((node.args, node.kwargs), replaced)
        node.args, node.kwargs = args, kwargs


def _describe(node: fx.Node, tensor: TensorRef, context: Context) -> None:
    """Record the change of SBP that a boxing node makes."""
    source = operand(node)
    before: NdSbp = meta(source)["sbp"]
    after: NdSbp = meta(node)["sbp"]
    value: Tensor = node.meta["val"]
    dim = next(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    held = held_bytes(before, dim, largest(value.shape), value.element_size(), context.mesh)
    meta(node)["boxing"] = Boxing(before, after, dim, context.mesh.shape[dim], tensor, held, origin(node).phase)


def _tensor_ref(node: fx.Node) -> TensorRef:
    node_role = role(node)
    if node_role is None:
        return TensorRef("value", f"{node.name} of {origin(node).place}")
    if node_role.kind == "bucket":
        return TensorRef("bucket", node_role.name)
    return TensorRef("value", node_role.name if node_role.kind in ("state", "buffer") else str(node_role))
