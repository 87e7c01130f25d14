"""reinplace: gradients are written into their bucket as they are made, and updates into the state they replace."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import base_of, is_view, viewed
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, drop_unused, emit, emit_like, in_place_of, keywords, occurrences
from zerograph.ir.step_graph import writes
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def reinplace(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Gradients are made in their bucket where they can be, and a step never holds two copies of its state."""
    graph = module.graph
    for node in list(graph.nodes):
        # Rows lie in no one piece: they are joined where the gradients are complete.
        if "gradient" in node.meta and node.meta["val"].dim() == 1:
            _fill(graph, node)
    for write, state, new in list(writes(graph)):
        _update_in_place(graph, write, state, new)
    in_place = context.backend.exchanges.get("all-reduce in place", c10d.all_reduce_.default)
    for start in graph.find_nodes(
        op="call_function", target=context.backend.exchanges.get("all-reduce", c10d.all_reduce.default)
    ):
        _reduce_in_place(start, in_place)
    drop_unused(graph)
    return module


def _fill(graph: fx.Graph, joined: fx.Node) -> None:
    """An empty bucket before the first gradient; each is made in its place there, or copied in and freed."""
    parts = list(joined.all_input_nodes)
    if len(parts) == 1 and parts[0].target is not aten.constant_pad_nd.default:
        joined.replace_all_uses_with(parts[0])
        meta(parts[0])["gradient"] = meta(joined).pop("gradient")
        return
    pieces = [_gaps(part) for part in parts]
    # One that had to change its SBP first comes flat from a collective.
    gradients = [flat.all_input_nodes[0] if flat.target is aten.reshape.default else flat for flat, _, _ in pieces]
    makers = [_maker(gradient) for gradient in gradients]
    first = min(maker or gradient for maker, gradient in zip(makers, gradients, strict=True))
    flat: Tensor = joined.meta["val"]
    with graph.inserting_before(first):
        bucket = emit_like(joined, aten.empty.memory_format, list(flat.shape), dtype=flat.dtype, device=flat.device)
    offset = 0
    for gradient, maker, (_, before, behind) in zip(gradients, makers, pieces, strict=True):
        made = maker or gradient
        value: Tensor = made.meta["val"]
        offset = _zero(graph, bucket, joined, offset, offset + before)
        with graph.inserting_before(maker or _behind(gradient, bucket)):
            put = functools.partial(emit, graph, origin=origin(made), sbp=meta(joined)["sbp"])
            part = put(aten.slice.Tensor, (bucket, 0, offset, offset + value.numel()))
            view = put(aten.view.default, (part, list(value.shape)))
            if maker is None:
                put(aten.copy_.default, (view, gradient))
            else:
                put(_OUT[maker.target], maker.args, **keywords(maker), out=view)
        offset += value.numel()
        offset = _zero(graph, bucket, joined, offset, offset + behind)
    joined.replace_all_uses_with(bucket)
    meta(bucket)["gradient"] = meta(joined).pop("gradient")


# Operators whose kernels write a result of its natural layout wherever they are told.
_OUT: dict[Any, OpOverload] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
}


def _maker(gradient: fx.Node) -> fx.Node | None:
    """The operator that could make the gradient in the bucket: nobody else reads it, and its elements lie as there."""
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
    """A bucket of gradients that nobody reads any more becomes their sum over the ranks."""
    source = start.args[0]
    assert isinstance(source, fx.Node)
    if "gradient" not in source.meta and "accumulated" not in source.meta:
        return
    source = base_of(source)
    if source.op != "placeholder" and all(reader <= start for reader in _readers(source)):
        start.target = in_place


def _gaps(part: fx.Node) -> tuple[fx.Node, int, int]:
    """A flat gradient, and how many unused elements of the bucket lie before and behind it."""
    if part.target is not aten.constant_pad_nd.default:
        return part, 0, 0
    flat, gaps = part.args[:2]
    assert isinstance(flat, fx.Node)
    assert isinstance(gaps, (list, tuple))
    before, behind = gaps
    assert isinstance(before, int)
    assert isinstance(behind, int)
    return flat, before, behind


def _zero(graph: fx.Graph, bucket: fx.Node, joined: fx.Node, start: int, end: int) -> int:
    """Fill what lies between two gradients right behind the allocation; the end of it."""
    if start < end:
        with graph.inserting_before(bucket.next):
            put = functools.partial(emit, graph, origin=origin(joined), sbp=meta(joined)["sbp"])
            put(aten.zero_.default, (put(aten.slice.Tensor, (bucket, 0, start, end)),))
    return end


def _behind(node: fx.Node, bucket: fx.Node) -> fx.Node:
    """The place right behind ``node``, or behind the bucket's own allocation for a gradient that is an input."""
    return bucket.next if node.op == "placeholder" else node.next


def _update_in_place(graph: fx.Graph, write: fx.Node, state: fx.Node, new: fx.Node) -> None:
    """Turn the operators that lead from the state to its new value into their in-place forms, if nobody notices."""
    if graph.output_node() in _readers(new):
        return  # what the user was given must not change with the next step
    chain: list[fx.Node] = []
    node = new
    while node is not state:
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node) or in_place_of(node, source) is None:
            return
        chain.append(node)
        node = source
    for node in chain:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if any(reader >= node for reader in _readers(source) if reader not in (node, write)):
            return
        # A part of what is written over would change while it is read.
        if occurrences(node, source) > 1 or not _views(source).isdisjoint(node.all_input_nodes):
            return
    for node in chain:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.target = in_place_of(node, source)  # type: ignore[assignment]
    graph.erase_node(write)


def _readers(node: fx.Node) -> set[fx.Node]:
    """Everything that reads the node's memory: its users, and those of its views."""
    return {user for one in (node, *_views(node)) for user in one.users}


def _views(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose values lie in the node's memory: its views, and their views."""
    return closure([node], lambda source: (user for user in source.users if viewed(user) is source)) - {node}
