"""recompute_cheap: recompute in backward what passes over memory compute, where that saves more than it costs.

Activation functions, gates, norms, casts, rotations and expansions of a value read memory once and compute little.
Backward recomputes them from the values that it has anyway, or from smaller ones: by the same operators from the same
numbers, bitwise. What is saved and what is recomputed is a minimum cut (``min_cut``), as in ``torch.compile``.

Recomputation that saves most bytes for its work comes first, up to a share of the segment's own work. Work counts in
bytes moved; operations of products count as the bytes that the device moves in the same time. So a narrow model, whose
products take little time, recomputes less than a wide one, and a machine with fast products less than one with fast
memory. Inductor fuses recomputed operators with those that read them: most of what they move in eager mode then never
is in memory.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import COPIES
from zerograph.passes.context import Context
from zerograph.passes.recompute.cost import local_bytes, operator_work
from zerograph.passes.recompute.min_cut import Choice, Problem, cheapest, parts, pose, read_in_backward
from zerograph.passes.recompute.recompute import recompute_values
from zerograph.passes.recompute.segments import Segment, cut_nearby, producer

aten = torch.ops.aten

# Minimum bytes on a rank to recompute a value.
_MIN_BYTES = 2**16
# Bytes of work that a byte less in memory may cost, from the cheapest recomputation to the dearest. The lowest is free.
_PRICES = (0, 1, 2, 3, 4, 6, 9, 12, 16)
# Recomputation takes at most this share of a segment's work in forward and backward.
_SHARE, _FUSED_SHARE = 1 / 24, 1 / 4
# Operators beside pointwise ones that pass over memory once.
_PASSES_OVER_MEMORY = COPIES | {aten.native_layer_norm.default, aten.native_group_norm.default, aten.cat.default}
# Where they are fused with their gradients, only the sums of rows are in memory a second time.
_FUSED_SOFTMAX = {aten._softmax.default, aten._log_softmax.default}


def recompute_cheap(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Recompute activation functions, norms, casts and the like in backward where that saves memory for little work."""
    graph = module.graph
    fuses = not context.backend.node_by_node

    def is_cheap(value: fx.Node) -> bool:
        return _is_cheap(producer(value), fuses) and local_bytes(value, context.mesh) >= _MIN_BYTES

    segments = cut_nearby(graph, context.memory.blocks, is_cheap)
    read = read_in_backward(graph, segments)
    share = _FUSED_SHARE if fuses else _SHARE
    known: dict[tuple[Problem, int], Choice] = {}
    recomputed: set[fx.Node] = set()
    for segment in segments:
        problem, nodes = pose(segment, read, context.mesh)
        if problem.operators:
            limit = round(share * _work(segment, context))
            recomputed |= {nodes[number] for number in _recomputed(problem, limit, known)}
    recompute_values(graph, recomputed)
    return module


def _is_cheap(node: fx.Node, fuses: bool) -> bool:
    return isinstance(node.target, OpOverload) and (
        torch.Tag.pointwise in node.target.tags
        or node.target in _PASSES_OVER_MEMORY
        or (fuses and node.target in _FUSED_SOFTMAX)
    )


def _work(segment: Segment, context: Context) -> int:
    """Return the work of a segment in forward and backward; backward takes twice as long as forward."""
    return 3 * sum(operator_work(node, context.mesh) for node in dict.fromkeys(map(producer, segment.values)))


def _recomputed(problem: Problem, limit: int, known: dict[tuple[Problem, int], Choice]) -> set[int]:
    """Return the numbers of the values to recompute: what is worth most first, while the work is within the limit."""
    independent, numbers = zip(*parts(problem), strict=True)

    def choice(part: Problem, price: int) -> Choice:
        if (part, price) not in known:
            known[part, price] = cheapest(part, price, 1)
        return known[part, price]

    chosen = [choice(part, _PRICES[-1]) for part in independent]
    work = sum(each.work for each in chosen)
    if work > limit:
        chosen = [choice(part, _PRICES[0]) for part in independent]
        work = sum(each.work for each in chosen)
        for price, (index, part) in itertools.product(_PRICES[1:], enumerate(independent)):
            more = choice(part, price)
            if work + more.work - chosen[index].work <= limit:
                work += more.work - chosen[index].work
                chosen[index] = more
    return {places[number] for each, places in zip(chosen, numbers, strict=True) for number in each.recomputed}
