"""box: where a tensor's SBP is not the one that its reader needs, one boxing node stands between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from zerograph.passes.boxing import boxing
from zerograph.passes.context import Context
from zerograph.passes.edit import emit
from zerograph.passes.place import needed
from zerograph.sbp import NdSbp, show
from zerograph.step_graph import Boxing, nbytes, origin, role


def box(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Every operator reads its inputs in the SBP of its signature; readers with the same need share a boxing node."""
    graph = module.graph
    made: dict[tuple[fx.Node, NdSbp], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is boxing and node.args[0].meta["sbp"] == node.meta["sbp"]:
            # A gradient that build() made whole itself needs no reduction.
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.target is boxing:
            _describe(node, node.meta["tensor"])
            continue
        inputs = [_boxed(graph, given, sbp, node, made) for given, sbp in needed(node)]
        _replace_tensors(node, inputs)
    return module


def _boxed(
    graph: fx.Graph, given: fx.Node, sbp: NdSbp, reader: fx.Node, made: dict[tuple[fx.Node, NdSbp], fx.Node]
) -> fx.Node:
    """``given`` in the SBP that ``reader`` needs; ``made`` remembers the boxing nodes so far."""
    if given.meta["sbp"] == sbp:
        return given
    if (given, sbp) not in made:
        with graph.inserting_before(reader):
            node = made[given, sbp] = emit(graph, boxing, (given, show(sbp)), origin(reader))
        node.meta["sbp"] = sbp
        _describe(node, _name_of(given))
    return made[given, sbp]


def _replace_tensors(node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """By position, not by name: an operator may need one tensor in two SBPs."""
    remaining = iter(inputs)

    def replaced(argument: fx.Node) -> fx.Node:
        return next(remaining) if isinstance(argument.meta.get("val"), Tensor) else argument

    if inputs:
        args, kwargs = fx.map_arg((node.args, node.kwargs), replaced)
        node.args, node.kwargs = args, kwargs


def _describe(node: fx.Node, tensor: str) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    node.meta["boxing"] = Boxing(
        source.meta["sbp"], node.meta["sbp"], tensor, nbytes(node.meta["val"]), origin(node).phase
    )


def _name_of(node: fx.Node) -> str:
    found = role(node)
    if found is not None:
        return found.name if found.kind in ("bucket", "state", "buffer") else str(found)
    where = origin(node)
    return f"{node.name} of {where.module or where.source or 'the step'}"
