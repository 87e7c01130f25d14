"""Making nodes: every node that a pass makes has a value, an origin and, if its SBP is known, that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, in_place_form
from zerograph.passes.evaluate import evaluate, mode_of
from zerograph.step_graph import Origin

aten = torch.ops.aten


def emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: Origin, **kwargs: Any) -> fx.Node:
    """A ``call_function`` node at the graph's insertion point, its value computed on fake tensors."""
    node = graph.call_function(target, args, kwargs)
    node.meta["origin"] = origin
    node.meta["val"] = evaluate(node)
    return node


def fake(graph: fx.Graph, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with mode_of(graph):
        return torch.empty(shape, dtype=dtype, device=device)


def first_computed(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return node


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Place of every node in execution order."""
    return {node: index for index, node in enumerate(graph.nodes)}


def in_place_of(node: fx.Node, source: fx.Node) -> OpOverload | None:
    """What computes ``node`` into ``source``, its first operand; None if it is not pointwise, or has another kind."""
    target, value, old = node.target, node.meta.get("val"), source.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return None
    if value.shape != old.shape or value.dtype != old.dtype or torch.Tag.pointwise not in target.tags:
        return None
    return in_place_form(target)


def occurrences(node: fx.Node, source: fx.Node) -> int:
    """How many of the node's operands ``source`` is."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found.count(source)


def drop_unused(graph: fx.Graph) -> None:
    """Erase what nobody reads and has no effect, and then what only that read.

    As ``fx.Graph.eliminate_dead_code``, which asks every node for its effects, and lints the graph first.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
