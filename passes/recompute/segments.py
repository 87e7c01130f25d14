"""Segments of forward: stretches of it that backward can make again, each from what enters it.

A block of the model is one segment; what lies outside of all blocks is cut into as many equal stretches as each has
values, as without blocks so few kept values cost so little to compute from (Chen et al. 2016, Training deep nets with
sublinear memory cost). A value that another segment of forward reads is not made again: else making one segment again
would make all those before it.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable
from zerograph.ir.alias import shared_arguments
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.region import local
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.shard_embeddings import is_apart
from zerograph.passes.recompute.reshard_after_forward import COPIES

aten = torch.ops.aten

Label = str | int


@dataclass(frozen=True, eq=False)
class Segment:
    """One of them: ``values`` are its nodes of forward that take memory, ``makeable`` those that can be made again."""

    label: Label
    values: tuple[fx.Node, ...]
    makeable: frozenset[fx.Node]


def cut(graph: fx.Graph, blocks: Sequence[str]) -> list[Segment]:
    """The segments of a placed graph, in order of their first node. Those of blocks have the block's path as label."""
    forward = [node for node in graph.nodes if node.op == "call_function" and origin(node).phase == "forward"]
    labels = _labels(forward, frozenset(blocks))
    crossing = _crossing(graph, labels)
    found: defaultdict[Label, list[fx.Node]] = defaultdict(list)
    for node in forward:
        if takes_memory(node):
            found[labels[node]].append(node)
    return [
        Segment(label, tuple(values), frozenset(one for one in values if one not in crossing and _is_makeable(one)))
        for label, values in found.items()
    ]


def takes_memory(node: fx.Node) -> bool:
    """Whether the node's value is one tensor in memory of its own."""
    return isinstance(node.meta.get("val"), Tensor) and owner(node) is node


def owner(node: fx.Node) -> fx.Node:
    """The node that took the memory in which the node's value lies: itself, if it is no view."""
    while (source := _shown(node)) is not None:
        node = source
    return node


def _shown(view: fx.Node) -> fx.Node | None:
    """Return the node that a view shows, or None if it is no view."""
    shared = shared_arguments(view)
    return shared[0] if shared else None


def made_by(value: fx.Node) -> fx.Node:
    """The node that runs the operator of which ``value`` is a result."""
    made = value.args[0] if value.target is operator.getitem else value
    assert isinstance(made, fx.Node)
    return made


def is_weight(value: fx.Node) -> bool:
    """Whether it is a parameter or a bucket, gathered or cast: backward has it, or gathers it again."""
    node = value
    while node.op == "call_function" and (node.target is boxing or node.target in COPIES or _shown(node) is not None):
        node = node.all_input_nodes[0]
    found = role(node)
    return found is not None and found.kind in ("bucket", "parameter")


def _labels(forward: Sequence[fx.Node], blocks: frozenset[str]) -> dict[fx.Node, Label]:
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
        labels[node] = seen // length
        seen += takes_memory(node)
    # The results of an operator belong together.
    for node in forward:
        if node.target is operator.getitem:
            labels[node] = labels.get(made_by(node), labels[node])
    return labels


def _crossing(graph: fx.Graph, labels: dict[fx.Node, Label]) -> set[fx.Node]:
    """Values that forward reads in another segment, or that leave the step."""
    found: set[fx.Node] = set()
    for reader in graph.nodes:
        if origin(reader).phase == "forward" and _shown(reader) is None and reader.target is not operator.getitem:
            for given in reader.all_input_nodes:
                made = owner(given)
                if labels.get(made) != labels.get(reader):
                    found.add(made)
    return found


def _is_makeable(value: fx.Node) -> bool:
    """Whether a copy of its operator makes the value anew: no collective is sent twice."""
    made = made_by(value)
    target: Any = made.target
    if is_weight(value):
        return False  # reshard_after_forward's business
    if target is boxing:
        return bool(meta(made)["boxing"].kind == "slice")
    if target is local or not isinstance(target, OpOverload) or is_mutable(target):
        return False
    return "looked_up" not in made.meta and not is_apart(made)
