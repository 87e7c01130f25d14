"""reinplace: compute gradients directly in their bucket, and write updates directly into the state."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import base_of, is_view, readers, viewed
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, drop_unused, emit, emit_like, in_place_of, keywords, occurrences, operand
from zerograph.ir.step_graph import writes
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def reinplace(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Compute gradients in their bucket where possible; update state in place, without a second copy."""
    graph = module.graph
    for node in list(graph.nodes):
        # The rows of a 2-D bucket are not contiguous: they are concatenated once the gradients are complete.
        if "gradient" in node.meta and node.meta["val"].dim() == 1:
            _fill_bucket(graph, node)
    for write, state, new in list(writes(graph)):
        _update_in_place(graph, write, state, new)
    in_place = context.backend.exchanges.get("all-reduce in place", c10d.all_reduce_.default)
    for start in graph.find_nodes(
        op="call_function", target=context.backend.exchanges.get("all-reduce", c10d.all_reduce.default)
    ):
        _reduce_in_place(start, in_place)
    drop_unused(graph)
    return module


def _fill_bucket(graph: fx.Graph, joined: fx.Node) -> None:
    """Allocate the bucket before the first gradient; compute each gradient in it, or copy it there and free it."""
    parts = list(joined.all_input_nodes)
    is_padded = parts[0].target is aten.constant_pad_nd.default
    # A column has gaps between its elements, which no collective sees.
    if len(parts) == 1 and not is_padded and parts[0].meta["val"].is_contiguous():
        joined.replace_all_uses_with(parts[0])
        meta(parts[0])["gradient"] = meta(joined).pop("gradient")
        return
    pieces = [_gaps(part) for part in parts]
    # A gradient that changed its SBP first comes flat from a collective.
    gradients = [flat.all_input_nodes[0] if flat.target is aten.reshape.default else flat for flat, _, _ in pieces]
    producers = [_out_operator(gradient) for gradient in gradients]
    first = min(producer or gradient for producer, gradient in zip(producers, gradients, strict=True))
    flat: Tensor = joined.meta["val"]
    with graph.inserting_before(first):
        bucket = emit_like(joined, aten.empty.memory_format, list(flat.shape), dtype=flat.dtype, device=flat.device)
    offset = 0
    for gradient, producer, (_, before, after) in zip(gradients, producers, pieces, strict=True):
        source = producer or gradient
        value: Tensor = source.meta["val"]
        offset = _zero(graph, bucket, joined, offset, offset + before)
        with graph.inserting_before(producer or _place_after(gradient, bucket)):
            put = functools.partial(emit, graph, origin=origin(source), sbp=meta(joined)["sbp"])
            part = put(aten.slice.Tensor, (bucket, 0, offset, offset + value.numel()))
            view = put(aten.view.default, (part, list(value.shape)))
            if producer is None:
                put(aten.copy_.default, (view, gradient))
            else:
                put(_OUT[producer.target], producer.args, **keywords(producer), out=view)
        offset += value.numel()
        offset = _zero(graph, bucket, joined, offset, offset + after)
    joined.replace_all_uses_with(bucket)
    meta(bucket)["gradient"] = meta(joined).pop("gradient")


# Operators whose kernels write a contiguous result to any memory.
_OUT: dict[Any, OpOverload] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
}


def _out_operator(gradient: fx.Node) -> fx.Node | None:
    """Return the operator that can compute the gradient in the bucket, or None.

    The layout must be the same, and nobody else may read the gradient.
    """
    node = gradient
    while is_view(node):
        source = node.all_input_nodes[0]
        if len(source.users) > 1 or source.meta["val"].numel() != node.meta["val"].numel():
            return None
        node = source
    if node.target not in _OUT or len(gradient.users) > 1:
        return None
    return node if gradient.meta["val"].is_contiguous() and node.meta["val"].is_contiguous() else None


def _reduce_in_place(start: fx.Node, in_place: OpOverload) -> None:
    """All-reduce a bucket of gradients in place if nobody reads it later."""
    source = operand(start)
    if "gradient" not in source.meta and "accumulated" not in source.meta:
        return
    source = base_of(source)
    if source.op != "placeholder" and all(reader <= start for reader in readers(source)):
        start.target = in_place


def _gaps(part: fx.Node) -> tuple[fx.Node, int, int]:
    """Return a flat gradient, and the numbers of unused elements of the bucket before and after it."""
    if part.target is not aten.constant_pad_nd.default:
        return part, 0, 0
    gaps: Any = part.args[1]
    return operand(part), *gaps


def _zero(graph: fx.Graph, bucket: fx.Node, joined: fx.Node, start: int, end: int) -> int:
    """Fill the gap between two gradients with zeros right after the allocation; return its end."""
    if start < end:
        with graph.inserting_before(bucket.next):
            put = functools.partial(emit, graph, origin=origin(joined), sbp=meta(joined)["sbp"])
            put(aten.zero_.default, (put(aten.slice.Tensor, (bucket, 0, start, end)),))
    return end


def _place_after(node: fx.Node, bucket: fx.Node) -> fx.Node:
    """Return the node after ``node``, or after the bucket's allocation for a gradient that is an input."""
    return bucket.next if node.op == "placeholder" else node.next


def _update_in_place(graph: fx.Graph, write: fx.Node, state: fx.Node, new: fx.Node) -> None:
    """Make the operators from the state to its new value in-place ones, if no other reader sees the change."""
    if graph.output_node() in readers(new):
        return  # the user's output must not change in the next step
    chain: list[fx.Node] = []
    node = new
    while node is not state:
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node) or in_place_of(node, source) is None:
            return
        chain.append(node)
        node = source
    for node in chain:
        source = operand(node)
        if any(reader >= node for reader in readers(source) if reader not in (node, write)):
            return
        # Another operand that shares the memory would change while it is read.
        if occurrences(node, source) > 1 or not _views(source).isdisjoint(node.all_input_nodes):
            return
    for node in chain:
        node.target = in_place_of(node, operand(node))  # type: ignore[assignment]
    graph.erase_node(write)


def _views(node: fx.Node) -> set[fx.Node]:
    """Return the node's views, and their views."""
    return closure([node], lambda source: (user for user in source.users if viewed(user) is source)) - {node}
