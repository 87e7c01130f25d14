"""Make values of forward again in backward: copies of the nodes that make them, right before their first reader there.

A copy draws the same random numbers (they follow from the seed and the draw's number), reads the same inputs and runs
the same operator: bit by bit the value is the one that forward made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from zerograph.ir.metadata import Boxing, meta, origin
from zerograph.ir.rewrite import closure, drop_unused
from zerograph.passes.recompute.segments import made_by, owner


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
    """Return the nodes of ``again`` that have no copy yet and that ``wanted`` need, themselves included."""

    def uncopied(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node in again and node not in copies]

    return closure(uncopied(wanted), lambda node: uncopied(node.all_input_nodes))


def _describe(copy: fx.Node) -> None:
    meta(copy)["origin"] = replace(origin(copy), phase="backward")
    meta(copy)["recomputed"] = True
    if isinstance(found := meta(copy).get("boxing"), Boxing):
        meta(copy)["boxing"] = replace(found, phase="backward")
