"""recompute: backward makes again what it is not to be given by forward.

``"blocks"`` keeps of a block of the model what enters it, what a collective brought it, and what others read of it, and
makes the rest again, block by block, each right before backward needs it. ``"auto"`` gives up as many bytes as the
memory budget lacks: of all segments' best choices (``min_cut``) those first that give up the most bytes for the least
work, and among equal blocks the first ones of the model, whose values would be held the longest.

Weights are never among them: what backward reads of a gathered bucket, ``reshard_after_forward`` derives again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerograph.ir.mesh import Mesh
from zerograph.passes.context import Context
from zerograph.passes.recompute.make_again import make_again
from zerograph.passes.recompute.min_cut import Choice, Problem, choices, pose, read_in_backward
from zerograph.passes.recompute.segments import Segment, cut


def recompute(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """What the configuration says is not kept from forward for backward is made again right before it is read there."""
    if context.memory.recompute == "blocks":
        segments = [one for one in cut(module.graph, context.memory.blocks) if isinstance(one.label, str)]
        make_again(module.graph, {value for one in segments for value in one.makeable})
    elif context.memory.recompute == "auto" and context.memory.min_recompute_bytes:
        make_again(module.graph, _least_work(module.graph, context))
    return module


def _least_work(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """Return the values to recompute so that ``min_recompute_bytes`` bytes less are saved, or as many as there are."""
    known: dict[Problem, list[Choice]] = {}
    posed = _posed(cut(graph, context.memory.blocks), graph, context.mesh)
    steps: list[tuple[float, int, int, int]] = []
    for number, (problem, _) in enumerate(posed):
        found = known[problem] if problem in known else known.setdefault(problem, choices(problem))
        for index in range(1, len(found)):
            saved = found[index - 1].bytes - found[index].bytes
            more = found[index].work - found[index - 1].work
            steps.append((more / saved, number, index, saved))
    chosen = [0] * len(posed)
    missing = context.memory.min_recompute_bytes
    for _, number, index, saved in sorted(steps):
        if missing <= 0:
            break
        chosen[number] = index
        missing -= saved
    return {
        nodes[value]
        for (problem, nodes), index in zip(posed, chosen, strict=True)
        for value in known[problem][index].again
    }


def _posed(segments: Sequence[Segment], graph: fx.Graph, mesh: Mesh) -> list[tuple[Problem, list[fx.Node]]]:
    read = read_in_backward(graph, segments)
    return [pose(segment, read, mesh) for segment in segments]
