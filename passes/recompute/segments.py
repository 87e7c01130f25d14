"""Segments of forward: stretches that backward can recompute, each from its inputs.

A block of the model is one segment. The nodes outside of all blocks are cut into n stretches of n values each: without
blocks, about the square root of all values is then saved and recomputed from (Chen et al. 2016, Training deep nets with
sublinear memory cost). A value that another segment of forward reads is not recomputed: otherwise recomputing one
segment would recompute all segments before it.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable
from zerograph.ir.alias import is_view_or_copy, shared_arguments
from zerograph.ir.metadata import has_role, meta, origin
from zerograph.ir.pause import GRADIENT_OF
from zerograph.ir.region import local
from zerograph.ir.rewrite import operand
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.experts import exchanged_along
from zerograph.passes.placement.shard_embeddings import is_sharded_embedding
from zerograph.passes.recompute.cost import flops

aten = torch.ops.aten

Label = str | int


@dataclass(frozen=True, eq=False)
class Segment:
    """One segment.

    Attributes:
        label: path of the block, or the number of the stretch.
        values: its nodes of forward that take memory.
        recomputable: those of ``values`` that can be recomputed.
    """

    label: Label
    values: tuple[fx.Node, ...]
    recomputable: frozenset[fx.Node]


def cut(graph: fx.Graph, blocks: Sequence[str]) -> list[Segment]:
    """Return the segments of a placed graph, in order of their first node.

    Args:
        graph: the graph.
        blocks: module paths of the blocks that the model repeats.
    """
    forward = _forward(graph)
    return _segments(forward, _labels(forward, frozenset(blocks)), lambda value: True)


def cut_nearby(graph: fx.Graph, blocks: Sequence[str], is_cheap: Callable[[fx.Node], bool]) -> list[Segment]:
    """Return the blocks, and a segment of all nodes outside of blocks. Only cheap values are recomputable.

    Outside of blocks, a value that a cheap operator reads after further products is not recomputable. Otherwise
    residual connections would lead recomputation through the whole model.

    Args:
        graph: the graph.
        blocks: module paths of the blocks that the model repeats.
        is_cheap: whether a value is cheap to recompute.
    """
    forward = _forward(graph)
    labels = _labels(forward, frozenset(blocks), by_stretch=False)
    far = _read_far(forward, labels, is_cheap)
    return _segments(forward, labels, lambda value: value not in far and is_cheap(value))


def _forward(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and origin(node).phase == "forward"]


def _segments(
    forward: Sequence[fx.Node], labels: dict[fx.Node, Label], may_recompute: Callable[[fx.Node], bool]
) -> list[Segment]:
    crossing = _crossing(forward[0].graph, labels) if forward else set()
    values: defaultdict[Label, list[fx.Node]] = defaultdict(list)
    for node in forward:
        if takes_memory(node):
            values[labels[node]].append(node)
    return [
        Segment(
            label,
            tuple(nodes),
            frozenset(
                value for value in nodes if value not in crossing and may_recompute(value) and _is_recomputable(value)
            ),
        )
        for label, nodes in values.items()
    ]


def _read_far(
    forward: Sequence[fx.Node], labels: dict[fx.Node, Label], is_cheap: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Return the values outside of blocks that a cheap operator reads after more than one further product."""
    products, before = 0, {}
    far = set()
    for node in forward:
        before[node] = products
        products += flops(node) > 0
        if isinstance(labels[node], int) and takes_memory(node) and is_cheap(node):
            for source in producer(node).all_input_nodes:
                value = storage_node(source)
                if products - before.get(value, products) > 1:
                    far.add(value)
    return far


def takes_memory(node: fx.Node) -> bool:
    """Return whether the node's value is one tensor in memory of its own."""
    return isinstance(node.meta.get("val"), Tensor) and storage_node(node) is node


def storage_node(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of this node's value: the node itself if it is no view."""
    while (source := _viewed_node(node)) is not None:
        node = source
    return node


def _viewed_node(view: fx.Node) -> fx.Node | None:
    """Return the node of which this one is a view, or None."""
    shared = shared_arguments(view)
    return shared[0] if shared else None


def producer(value: fx.Node) -> fx.Node:
    """Return the node that runs the operator of which ``value`` is a result."""
    return operand(value) if value.target is operator.getitem else value


def is_weight(value: fx.Node) -> bool:
    """Return whether the value is a parameter or a bucket, gathered or cast: backward has it, or gathers it again."""
    node = value
    while node.op == "call_function" and (
        node.target is boxing or is_view_or_copy(node) or _viewed_node(node) is not None
    ):
        node = node.all_input_nodes[0]
    return has_role(node, "bucket", "parameter")


def _labels(forward: Sequence[fx.Node], blocks: frozenset[str], *, by_stretch: bool = True) -> dict[fx.Node, Label]:
    labels: dict[fx.Node, Label] = {}
    outside = []
    for node in forward:
        path = origin(node).module
        while path and path not in blocks:
            path = path.rpartition(".")[0]
        labels[node] = path
        if not path:
            outside.append(node)
    count = sum(map(takes_memory, outside))
    length = math.isqrt(max(count - 1, 0)) + 1
    seen = 0
    for node in outside:
        labels[node] = seen // length if by_stretch else 0
        seen += takes_memory(node)
    # The results of an operator belong together.
    for node in forward:
        if node.target is operator.getitem:
            labels[node] = labels.get(producer(node), labels[node])
    return labels


def _crossing(graph: fx.Graph, labels: dict[fx.Node, Label]) -> set[fx.Node]:
    """Return the values that forward reads in another segment, or that leave the step."""
    crossing: set[fx.Node] = set()
    for reader in graph.nodes:
        if origin(reader).phase == "forward" and _viewed_node(reader) is None and reader.target is not operator.getitem:
            for source in reader.all_input_nodes:
                value = storage_node(source)
                if labels.get(value) != labels.get(reader):
                    crossing.add(value)
    return crossing


def _is_recomputable(value: fx.Node) -> bool:
    """Return whether a copy of the operator recomputes the value. Nothing is sent, or asked of the caller, twice."""
    node = producer(value)
    target: Any = node.target
    if is_weight(value):
        return False  # reshard_after_forward derives it again
    if target is boxing:
        return bool(meta(node)["boxing"].kind == "slice")
    if target in (local, GRADIENT_OF) or not isinstance(target, OpOverload) or is_mutable(target):
        return False
    if exchanged_along(node, meta(node).get("signature", ())) is not None:
        return False
    return "looked_up" not in node.meta and not is_sharded_embedding(node)
