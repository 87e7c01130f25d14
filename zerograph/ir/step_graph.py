"""Find inputs, outputs, writes and collectives in the graph of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Role, RoleKind, boxing_of, has_role, meta, origin, role
from zerograph.ir.sizes import elements
from zerograph.ops import blocks


def restore_origins(graph: fx.Graph) -> None:
    """Move the origins that a trace recorded in torch's ``custom`` metadata to the keys of :class:`NodeMeta`."""
    for node in graph.nodes:
        custom = node.meta.pop("custom", {})
        node.meta |= {key: custom[key] for key in ("origin", "recomputed") if key in custom}


def source_bucket(node: fx.Node) -> Role | None:
    """Return the role of the bucket whose shard the node is, as stored, cast or coded for the wire; else None."""
    node_role = role(stored_form(node))
    return node_role if node_role is not None and node_role.kind == "bucket" else None


def gathers_bucket(node: fx.Node) -> bool:
    """Return whether the node gathers a bucket along a mesh dimension, of which it may be a part gathered already."""
    change = boxing_of(node)
    return change is not None and change.kind == "all-gather" and change.tensor.kind == "bucket"


_FORMS_OF_SHARDS = (blocks.encode, blocks.difference, torch.ops.aten._to_copy.default)


def stored_form(node: fx.Node) -> fx.Node:
    """Return the tensor that a node casts or codes for a gather, or the node itself."""
    while node.target in _FORMS_OF_SHARDS:
        node = node.all_input_nodes[0]
    return node


def sent_forms(start: fx.Node) -> list[fx.Node]:
    """Return the nodes that cast or code a bucket's shard for the gather ``start``, which move with it, last first."""
    forms: list[fx.Node] = []
    node = start.all_input_nodes[0]
    while node.target in _FORMS_OF_SHARDS and source_bucket(node) is not None:
        forms.append(node)
        node = node.all_input_nodes[0]
    return forms


def placeholders(graph: fx.Graph, *kinds: RoleKind) -> list[fx.Node]:
    """Return the placeholders of some kinds in order; without ``kinds`` all placeholders."""
    return [node for node in graph.find_nodes(op="placeholder") if not kinds or has_role(node, *kinds)]


def inputs_by_name(graph: fx.Graph, *kinds: RoleKind) -> dict[str, fx.Node]:
    """Return the placeholders of some kinds by the names of their roles."""
    return {meta(node)["role"].name: node for node in placeholders(graph, *kinds)}


def used_once(graph: fx.Graph) -> set[str]:
    """Return the parameters that one node of forward reads, whatever the number of their names."""
    return {
        meta(node)["role"].name
        for node in placeholders(graph, "parameter")
        if sum(origin(user).phase == "forward" for user in node.users) == 1
    }


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the graph returns, in order."""
    returned = graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    return [node for node in returned if isinstance(node, fx.Node)]


FOUND_INF = "found_inf"


def found_infs(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the overflow flag of each optimizer by name, 0-d: not 0 if one of its scaled gradients overflowed.

    After ``skip_overflowed_update`` a flag that is not 0 means that the optimizer changes nothing. A graph of one
    optimizer, or without loss scaling, has one flag under ``""``. A graph without loss scaling and checks has none.
    """
    roles = meta(graph.output_node())["roles"]
    return {
        found_inf_optimizer(r.name): node
        for node, r in zip(output_nodes(graph), roles, strict=True)
        if r.kind == "scaler"
    }


def found_inf_optimizer(name: str) -> str:
    """Return the optimizer whose overflow flag the graph returns under this name."""
    return name.removeprefix(FOUND_INF).removeprefix(".")


def found_inf_role(optimizer: str) -> Role:
    """Return the role of an optimizer's overflow flag as an output of the graph."""
    return Role("scaler", f"{FOUND_INF}.{optimizer}" if optimizer else FOUND_INF)


def output_with_role(graph: fx.Graph, kind: RoleKind, name: str) -> fx.Node | None:
    """Return the node that the graph returns under this role, or None."""
    roles = meta(graph.output_node())["roles"]
    return next((node for node, r in zip(output_nodes(graph), roles, strict=True) if r == Role(kind, name)), None)


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Yield (``copy_`` node, placeholder, new value) for each state that the step writes."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[0], node.args[1]
        if isinstance(target, fx.Node) and isinstance(value, fx.Node) and target.op == "placeholder":
            yield node, target, value


def is_collective(node: fx.Node) -> bool:
    """Return whether the node changes an SBP by more than a slice."""
    return (boxing := boxing_of(node)) is not None and boxing.kind != "slice"


def runs(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes of the graph and of its loop bodies, each with the number of its runs in a step."""
    for node in graph.nodes:
        yield node, 1
        if (loop := loop_of(node)) is not None:
            yield from ((inner, count * loop.micro_batches) for inner, count in runs(loop.body.graph))


def collective_runs(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """Return the collectives of the graph and of its loop bodies, each with the number of its runs in a step."""
    return [(node, count) for node, count in runs(graph) if is_collective(node)]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the tensors in a node's value: one, or several."""
    value = node.meta.get("val")
    return [part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, Tensor)]


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes, at the largest dynamic dimensions seen or declared."""
    return elements(tensor) * tensor.element_size()
