"""Edit a graph, as several passes do: add inputs and copies, move nodes, join changes of SBP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from zerograph.ir.metadata import Boxing, Origin, Role, TensorRef, boxing_of, meta, origin
from zerograph.ir.rewrite import emit, fake, first_computed
from zerograph.ir.sbp import NdSbp


def add_input(
    graph: fx.Graph,
    role: Role,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str = "",
    sbp: NdSbp | None = None,
) -> fx.Node:
    """Add an input after those that the graph has.

    Args:
        graph: the graph.
        role: its role.
        shape, dtype, device: of its value.
        name: name of the node; by default as in its role.
        sbp: its SBP, in a graph that is placed.
    """
    with graph.inserting_before(first_computed(graph)):
        node = graph.placeholder(name or re.sub(r"\W", "_", role.name.replace("]", "")))
    meta(node).update({"role": role, "val": fake(graph, shape, dtype, device)})
    if sbp is not None:
        meta(node)["sbp"] = sbp
    return node


def on_device(node: fx.Node, device: torch.device, new_origin: Origin) -> fx.Node:
    """Return a tensor on a device: a copy that is added at the graph's insertion point, if it is on another one."""
    if node.meta["val"].device == device:
        return node
    return emit(node.graph, torch.ops.aten._to_copy.default, (node,), new_origin, like=node, device=device)


def copy_for(reader: fx.Node, node: fx.Node, copies: Mapping[fx.Node, fx.Node] = MappingProxyType({})) -> fx.Node:
    """Copy a node to directly before a reader, with the reader's origin; inputs that have copies are those."""
    with node.graph.inserting_before(reader):
        copy = node.graph.node_copy(node, lambda source: copies.get(source, source))
    meta(copy)["origin"] = origin(reader)
    if (change := boxing_of(node)) is not None:
        meta(copy)["boxing"] = replace(change, phase=origin(reader).phase)
    return copy


def move_before(node: fx.Node, place: fx.Node) -> None:
    """Move a node directly before ``place``."""
    if node.next is not place:
        place.prepend(node)


def move_after(nodes: Sequence[fx.Node], place: fx.Node) -> fx.Node:
    """Move nodes directly after ``place``, in their order; return the last of them, or ``place``."""
    for node in nodes:
        if place.next is not node:
            place.append(node)
        place = node
    return place


def joined_boxing(changes: Sequence[Boxing]) -> Boxing:
    """Return the change of SBP of one collective in place of several, over the same ranks."""
    tensor = TensorRef("value", f"{changes[0].tensor} and {len(changes) - 1} more")
    return replace(changes[0], bytes=sum(change.bytes for change in changes), tensor=tensor)
