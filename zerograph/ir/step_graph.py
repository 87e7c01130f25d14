"""The step as a graph: what capture returns, and how to find inputs, outputs, writes and collectives in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Boxing, Role, RoleKind, meta, role


def restore_origins(graph: fx.Graph) -> None:
    """What a trace noted of each node's origin becomes its origin."""
    for node in graph.nodes:
        custom = node.meta.pop("custom", {})
        node.meta |= {key: custom[key] for key in ("origin", "recomputed") if key in custom}


def source_bucket(node: fx.Node) -> Role | None:
    """The bucket that the node is at rest, or whose part at rest it casts to the compute dtype."""
    if node.target is torch.ops.aten._to_copy.default:
        node = node.all_input_nodes[0]
    found = role(node)
    return found if found is not None and found.kind == "bucket" else None


def placeholders(graph: fx.Graph, *kinds: RoleKind) -> list[fx.Node]:
    """Placeholders in order, those of the given kinds only if any are given."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if not kinds or ((found := role(node)) is not None and found.kind in kinds)
    ]


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph returns, in order."""
    returned = graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    return [node for node in returned if isinstance(node, fx.Node)]


FOUND_INF = "found_inf"


def found_infs(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return, by optimizer, the number that is not 0 where one of its scaled gradients overflowed.

    After ``skip_overflowed_update`` it is not 0 where the optimizer is to change nothing. A graph of one optimizer, or
    one that scales no loss, has one number for all, under ``""``; a graph that scales no loss and checks nothing has
    none.
    """
    roles = meta(graph.output_node())["roles"]
    return {
        found_inf_optimizer(r.name): node
        for node, r in zip(output_nodes(graph), roles, strict=True)
        if r.kind == "scaler"
    }


def found_inf_optimizer(name: str) -> str:
    """Return the optimizer of the number that the graph returns under this name."""
    return name.removeprefix(FOUND_INF).removeprefix(".")


def found_inf_role(optimizer: str) -> Role:
    """Return the role of that number as an output of the graph."""
    return Role("scaler", f"{FOUND_INF}.{optimizer}" if optimizer else FOUND_INF)


def output_with_role(graph: fx.Graph, kind: RoleKind, name: str) -> fx.Node | None:
    """What the graph returns under this role, if it does."""
    roles = meta(graph.output_node())["roles"]
    return next((node for node, r in zip(output_nodes(graph), roles, strict=True) if r == Role(kind, name)), None)


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(copy_ node, placeholder, new value) for each state that the step writes."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[0], node.args[1]
        if isinstance(target, fx.Node) and isinstance(value, fx.Node) and target.op == "placeholder":
            yield node, target, value


def collective_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that send something, in order: all that change an SBP but slices."""
    return [
        node
        for node in graph.nodes
        if isinstance(meta(node).get("boxing"), Boxing) and meta(node)["boxing"].kind != "slice"
    ]


def collective_runs(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """The nodes that send something, those in bodies of loops among them, each with how often it runs in a step."""
    found: list[tuple[fx.Node, int]] = []
    own = set(collective_nodes(graph))
    for node in graph.nodes:
        loop = loop_of(node)
        if node in own:
            found.append((node, 1))
        elif loop is not None:
            inner = collective_runs(loop.body.graph)
            found += [(one, times * loop.micro_batches) for one, times in inner]
    return found


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
