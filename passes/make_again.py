"""Make values of forward again in backward: copies of the nodes that make them, right before their first reader there.

A copy draws the same random numbers (they follow from the seed and the draw's number), reads the same inputs and runs
the same operator: bit by bit the value is the one that forward made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from zerograph.passes.edit import drop_unused
from zerograph.passes.segments import made_by, owner
from zerograph.step_graph import Boxing, origin


def make_again(graph: fx.Graph, values: set[fx.Node]) -> None:
    """Backward reads copies of these values of forward, made of copies and of what forward keeps."""
    again = _with_views(graph, values)
    copies: dict[fx.Node, fx.Node] = {}
    for reader in list(graph.nodes):
        if origin(reader).phase == "forward" or again.isdisjoint(reader.all_input_nodes):
            continue
        read = [given for given in reader.all_input_nodes if given in again]
        with graph.inserting_before(reader):
            for node in sorted(_missing(read, again, copies)):
                copies[node] = graph.node_copy(node, lambda given: copies.get(given, given))
                _describe(copies[node])
        for given in read:
            reader.replace_input_with(given, copies[given])
    drop_unused(graph)


def _with_views(graph: fx.Graph, values: set[fx.Node]) -> set[fx.Node]:
    """With the views of these values that forward makes, and the operators of which they are results."""
    again = set(values) | {made_by(value) for value in values}
    again |= {node for node in graph.nodes if origin(node).phase == "forward" and owner(node) in values}
    return again


def _missing(wanted: Iterable[fx.Node], again: set[fx.Node], copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in again and node not in copies and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _describe(copy: fx.Node) -> None:
    copy.meta["origin"] = replace(origin(copy), phase="backward")
    copy.meta["recomputed"] = True
    if isinstance(found := copy.meta.get("boxing"), Boxing):
        copy.meta["boxing"] = replace(found, phase="backward")
