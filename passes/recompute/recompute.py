"""recompute: recompute in backward what forward should not save.

``"blocks"`` saves of each block of the model its inputs, results of collectives and values that other blocks read, and
recomputes the other values, block by block, right before backward needs them. ``"auto"`` recomputes as many bytes as
the memory budget lacks. It takes the best choices of all segments (``min_cut``), those first that save the most bytes
for the least work; among equal blocks the first ones of the model, whose values would be saved the longest.

Weights are never recomputed here: ``reshard_after_forward`` derives what backward reads of a gathered bucket.

A recomputed value is bitwise the saved one: the copy of an operator reads the same inputs and draws the same random
numbers, which follow from the seed and the number of the draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.ir.rewrite import closure, drop_unused
from zerograph.passes.context import Context
from zerograph.passes.recompute.min_cut import Choice, Problem, choices, pose, read_in_backward
from zerograph.passes.recompute.segments import cut, producer, storage_node


def recompute(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Recompute in backward, right before its readers, what the configuration does not let forward save."""
    graph = module.graph
    if context.memory.recompute == "blocks":
        segments = [segment for segment in cut(graph, context.memory.blocks) if isinstance(segment.label, str)]
        recompute_values(graph, {value for segment in segments for value in segment.recomputable})
    elif context.memory.recompute == "auto" and context.memory.min_recompute_bytes:
        recompute_values(graph, _least_work(graph, context))
    return module


def _least_work(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """Return the values to recompute so that ``min_recompute_bytes`` bytes less are saved, or as many as there are."""
    best: dict[Problem, list[Choice]] = {}
    segments = cut(graph, context.memory.blocks)
    read = read_in_backward(graph, segments)
    problems = [pose(segment, read, context.mesh) for segment in segments]
    steps: list[tuple[float, int, int, int]] = []
    for number, (problem, _) in enumerate(problems):
        if problem not in best:
            best[problem] = choices(problem)
        options = best[problem]
        for index in range(1, len(options)):
            saved = options[index - 1].bytes - options[index].bytes
            more_work = options[index].work - options[index - 1].work
            steps.append((more_work / saved, number, index, saved))
    chosen = [0] * len(problems)
    missing = context.memory.min_recompute_bytes
    for _, number, index, saved in sorted(steps):
        if missing <= 0:
            break
        chosen[number] = index
        missing -= saved
    return {
        nodes[value]
        for (problem, nodes), index in zip(problems, chosen, strict=True)
        for value in best[problem][index].recomputed
    }


def recompute_values(graph: fx.Graph, values: set[fx.Node]) -> None:
    """Let backward read copies of these values of forward, computed right before their first reader there."""
    recomputed = _with_views(graph, values)
    copies: dict[fx.Node, fx.Node] = {}
    for reader in list(graph.nodes):
        if origin(reader).phase == "forward" or recomputed.isdisjoint(reader.all_input_nodes):
            continue
        read = [source for source in reader.all_input_nodes if source in recomputed]
        with graph.inserting_before(reader):
            for node in sorted(_uncopied(read, recomputed, copies)):
                copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
                _move_to_backward(copies[node])
        for source in read:
            reader.replace_input_with(source, copies[source])
    drop_unused(graph)


def _with_views(graph: fx.Graph, values: set[fx.Node]) -> set[fx.Node]:
    """Return the values, forward's views of them, and the operators of which they are results."""
    nodes = set(values) | {producer(value) for value in values}
    nodes |= {node for node in graph.nodes if origin(node).phase == "forward" and storage_node(node) in values}
    return nodes


def _uncopied(wanted: Iterable[fx.Node], recomputed: set[fx.Node], copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the nodes of ``recomputed`` without a copy that ``wanted`` need, themselves included."""

    def uncopied(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node in recomputed and node not in copies]

    return closure(uncopied(wanted), lambda node: uncopied(node.all_input_nodes))


def _move_to_backward(copy: fx.Node) -> None:
    meta(copy)["origin"] = replace(origin(copy), phase="backward")
    meta(copy)["recomputed"] = True
    boxing = boxing_of(copy)
    if boxing is not None:
        meta(copy)["boxing"] = replace(boxing, phase="backward")
