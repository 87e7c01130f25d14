"""Rewrite a graph: emit nodes with their metadata, walk it, replace and erase nodes.

From ``place`` on every tensor of a graph has an SBP, so :func:`emit` requires the SBP of each node that it adds to a
placed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, in_place_overload
from zerograph.errors import VerificationError
from zerograph.ir.evaluate import evaluate, mode_of
from zerograph.ir.metadata import Origin, meta, origin
from zerograph.ir.sbp import NdSbp, Split

T = TypeVar("T")

# ---- emitting ----


def emit(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    origin: Origin,
    *,
    like: fx.Node | None = None,
    sbp: NdSbp | None = None,
    local: bool = False,
    **kwargs: Any,
) -> fx.Node:
    """Add a ``call_function`` node at the graph's insertion point; compute its value on fake tensors.

    In a placed graph a node with a tensor as its result needs one of ``like``, ``sbp`` and ``local``.

    Args:
        graph: the graph.
        target: the operator.
        args: its arguments.
        origin: origin of the node.
        like: a node of the same global tensor, whose SBP and global shape the new node gets.
        sbp: SBP of the new node. After ``localize`` its global shape is its local one, unless it is split.
        local: the node is inside a local region and has no global tensor.
        kwargs: keyword arguments of the operator.

    Raises:
        VerificationError: the graph is placed, and the SBP of the node is missing.
    """
    node = graph.call_function(target, args, kwargs)
    meta(node)["origin"] = origin
    node.meta["val"] = evaluate(node)
    if local:
        meta(node)["local"] = True
    elif isinstance(node.meta["val"], Tensor):
        if like is not None:
            copy_placement(node, like)
        elif sbp is not None:
            meta(node)["sbp"] = sbp
            if is_localized(graph) and not any(isinstance(dim_sbp, Split) for dim_sbp in sbp):
                meta(node)["global"] = tuple(node.meta["val"].shape)
        elif is_placed(graph):
            raise VerificationError(
                f"emit({target}) adds a tensor without an SBP to a placed graph\n"
                "Pass like=, a node of the same global tensor, or sbp=."
            )
    return node


def emit_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a node with the origin, SBP and global shape of ``like``, at the insertion point of its graph."""
    return emit(like.graph, target, args, origin(like), like=like, **kwargs)


def keywords(node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments of a call, to emit another call with them."""
    return dict(node.kwargs)


def copy_placement(node: fx.Node, like: fx.Node) -> fx.Node:
    """Copy the SBP and global shape of ``like``, as far as it has them, to ``node``; return ``node``."""
    source = meta(like)
    if "sbp" in source:
        meta(node)["sbp"] = source["sbp"]
    if "global" in source:
        meta(node)["global"] = source["global"]
    return node


def is_placed(graph: fx.Graph) -> bool:
    """Return True after ``place``, which gives inputs an SBP."""
    return "sbp" in next(iter(graph.nodes)).meta


def is_localized(graph: fx.Graph) -> bool:
    """Return True after ``localize``, which gives inputs a global shape besides their local one."""
    return "global" in next(iter(graph.nodes)).meta


def fake(graph: fx.Graph, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a fake tensor in the fake mode of the graph's values."""
    with mode_of(graph):
        return torch.empty(shape, dtype=dtype, device=device)


# ---- walking ----


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """Return the node that is a positional argument of a node."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def closure(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return what is in ``start``, nodes for instance, and all that is reached from there through ``following``."""
    reached = set(start)
    stack = list(reached)
    while stack:
        fresh = [node for node in following(stack.pop()) if node not in reached]
        reached.update(fresh)
        stack += fresh
    return reached


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all ancestors of the nodes; a node itself only if it is an ancestor of another one."""
    return closure((source for node in nodes for source in node.all_input_nodes), lambda node: node.all_input_nodes)


def first_computed(graph: fx.Graph) -> fx.Node:
    """Return the first node that is not a placeholder."""
    node: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return node


def occurrences(node: fx.Node, source: fx.Node) -> int:
    """Return how many operands of the node are ``source``."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands.count(source)


def in_place_of(node: fx.Node, source: fx.Node) -> OpOverload | None:
    """Return the in-place operator that writes the value of ``node`` to ``source``, its first operand.

    Returns:
        The operator; None if ``node`` is not pointwise, or if its shape or dtype differs from that of ``source``.
    """
    target, value, old = node.target, node.meta.get("val"), source.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return None
    if value.shape != old.shape or value.dtype != old.dtype or torch.Tag.pointwise not in target.tags:
        return None
    return in_place_overload(target)


# ---- replacing and erasing ----


def replace_node(node: fx.Node, value: fx.Node) -> None:
    """Let all readers of a node read ``value``, and erase the node."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def drop_unused(graph: fx.Graph) -> None:
    """Erase nodes without users and side effects, then the nodes that only they used.

    ``fx.Graph.eliminate_dead_code`` does the same and lints the graph first, which takes longer.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
