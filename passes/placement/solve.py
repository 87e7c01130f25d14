"""Where the greedy choice pays for a boxing, the cheapest placement of the chain of operators around it.

With the rest of the graph held as it is, the placements of a chain are the paths through a graph with one layer for
each operator and one node for each of its signatures; an edge costs the boxing between the two. The shortest path is
then exact. A change is kept only if the true cost, chains that meet themselves again included, is lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
from torch import fx

from zerograph.ir.sbp import Sbp, Signature
from zerograph.passes.placement.cost import signature_cost
from zerograph.passes.placement.line import Line, Made

Candidates = dict[fx.Node, tuple[Signature, ...]]

# Chains overlap, and few of them change anything: costs around a node, and what they follow from.
_Known = dict[tuple[Any, ...], tuple[Any, list[list[float]]]]


def improve(line: Line, candidates: Candidates) -> None:
    """Chains of operators around a boxing could not be placed more cheaply while the rest stays as it is.

    Args:
        candidates: the signatures of each operator whose placement is free.
    """
    order = {node: index for index, node in enumerate(line.graph.nodes)}
    settled: set[tuple[fx.Node, ...]] = set()
    known: _Known = {}
    paying = {reader: found for reader in candidates if (found := _paid(line, reader))}
    waiting = [(reader, made) for reader in paying for made in paying[reader]]
    for _ in range(_MOST_CHAINS):
        if not waiting:
            return
        chain = tuple(_chain(line, *waiting.pop(), candidates, order))
        if chain not in settled:
            settled.add(chain)
            if _solve(line, chain, candidates, known):
                # That may open a better way for the chains that it meets, and moves boxings.
                settled = {one for one in settled if set(chain).isdisjoint(one)}
                for reader in _around(line, chain):
                    paying[reader] = _paid(line, reader) if reader in candidates else []
                waiting = [
                    (reader, made) for reader in sorted(paying, key=order.__getitem__) for made in paying[reader]
                ]


# Most operators of a chain on either side of the boxing: farther ones seldom have a say, and cost compile time.
_REACH = 16

# Of two that cost the same the placement that is there stays: what else is in the chain shall not decide.
_CHANGED = 1e-7

# A step that pays for more boxings than this is no data-parallel one, and would compile for minutes.
_MOST_CHAINS = 100


def _paid(line: Line, reader: fx.Node) -> list[Made]:
    """The tensors that an operator reads under another SBP than they have."""
    return [
        made
        for made, need in zip(line.inputs(reader), line.signature[reader].inputs, strict=True)
        if need != (have := line.sbp[made[0]][made[1]]) and line.cost(made, have, (need,))
    ]


def _around(line: Line, chain: Sequence[fx.Node]) -> set[fx.Node]:
    """The chain, and what reads it: boxings elsewhere are as they were."""
    outputs = [(node, index) for node in chain for index in range(len(line.values[node]))]
    return {*chain, *(reader for made in outputs for reader in line.readers(made))}


def _chain(line: Line, reader: fx.Node, made: Made, candidates: Candidates, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The operators before and behind a boxing, along the largest tensors."""
    chain = [reader]
    source: fx.Node | None = made[0]
    while source is not None and source in candidates and len(chain) < _REACH:
        chain.insert(0, source)
        above = [one for one in line.inputs(source) if one[0] in candidates]
        source = max(above, key=line.nbytes)[0] if above else None
    node: fx.Node | None = reader
    while node is not None and len(chain) < 2 * _REACH:
        outputs = [(node, index) for index in range(len(line.values[node]))]
        below = [(line.nbytes(one), -order[user], user) for one in outputs for user in line.readers(one)]
        below = [entry for entry in below if entry[2] in candidates and entry[2] not in chain]
        node = max(below)[2] if below else None
        if node is not None:
            chain.append(node)
    return chain


def _solve(line: Line, chain: Sequence[fx.Node], candidates: Candidates, known: _Known) -> bool:
    """Place the chain along the shortest path; False, and nothing changed, where that is no cheaper."""
    # Signatures by number: networkx hashes its nodes all the time.
    options = [candidates[node] for node in chain]
    layers = nx.DiGraph()
    for number, inner in enumerate(_inner(line, chain, 0, options[0], known)):
        layers.add_edge("start", (0, number), cost=inner)
    for index in range(1, len(chain)):
        between = _between(line, chain[index - 1], options[index - 1], chain[index], options[index], known)
        for number, inner in enumerate(_inner(line, chain, index, options[index], known)):
            for other, boxings in enumerate(between[number]):
                if (cost := inner + boxings) < math.inf:
                    layers.add_edge((index - 1, other), (index, number), cost=cost)
    last = len(chain) - 1
    for number, signature in enumerate(options[last]):
        needs = _other_needs(line, chain[last], signature.outputs, None)
        layers.add_edge((last, number), "end", cost=_outputs(line, chain[last], signature.outputs, needs))
    path = nx.shortest_path(layers, "start", "end", weight="cost")[1:-1]
    new = [options[index][number] for index, number in path]
    old = [line.signature[node] for node in chain]
    if new == old:
        return False
    cost = _true_cost(line, chain)
    _apply(line, chain, new)
    if _true_cost(line, chain) < cost - 1e-9:
        return True
    _apply(line, chain, old)
    return False


def _inner(
    line: Line, chain: Sequence[fx.Node], index: int, options: Sequence[Signature], known: _Known
) -> list[float]:
    """Under each signature: what the operator reads from outside the chain, and the signature itself."""
    node, previous = chain[index], chain[index - 1] if index else None
    outside = []
    for made in dict.fromkeys(line.inputs(node)):
        if made[0] is not previous:
            have = line.sbp[made[0]][made[1]]
            outside.append((made, have, frozenset(line.needs(made, have, but=node))))

    def read() -> list[list[float]]:
        return [
            [
                line.cost(made, have, frozenset(line.needed_by(node, one, made)) - others)
                for made, have, others in outside
            ]
            for one in options
        ]

    costs = _once(known, ("inner", node, previous), outside, read)
    chosen = line.signature[node]
    own = [signature_cost(one) if one == chosen else signature_cost(one) + _CHANGED for one in options]
    return [sum(each, start) for each, start in zip(costs, own, strict=True)]


def _between(
    line: Line,
    node: fx.Node,
    before: Sequence[Signature],
    reader: fx.Node,
    here: Sequence[Signature],
    known: _Known,
) -> list[list[float]]:
    """For each signature of ``reader``, and each of ``node``: all boxing of what ``node`` yields.

    Many signatures yield the same, or need the same of it: what that costs is worked out once.
    """
    yielded = [signature.outputs for signature in before]
    others = {outputs: _other_needs(line, node, outputs, reader) for outputs in dict.fromkeys(yielded)}

    def costs() -> list[list[float]]:
        rows: dict[tuple[frozenset[Sbp], ...], list[float]] = {}
        found = []
        for signature in here:
            wanted = tuple(
                frozenset(line.needed_by(reader, signature, (node, at))) for at in range(len(line.values[node]))
            )
            if wanted not in rows:
                each = {
                    outputs: _outputs(line, node, outputs, [a | b for a, b in zip(needs, wanted, strict=True)])
                    for outputs, needs in others.items()
                }
                rows[wanted] = [each[outputs] for outputs in yielded]
            found.append(rows[wanted])
        return found

    return _once(known, ("between", node, reader), others, costs)


def _once(
    known: _Known, key: tuple[Any, ...], given: Any, work_out: Callable[[], list[list[float]]]
) -> list[list[float]]:
    """What is known of ``key`` while it follows from the same ``given``."""
    if key not in known or known[key][0] != given:
        known[key] = given, work_out()
    return known[key][1]


def _other_needs(line: Line, node: fx.Node, outputs: Sequence[Sbp], reader: fx.Node | None) -> list[frozenset[Sbp]]:
    """Of each tensor that ``node`` yields as ``outputs``, how all but ``reader`` need it."""
    return [frozenset(line.needs((node, at), have, but=reader)) for at, have in enumerate(outputs)]


def _outputs(line: Line, node: fx.Node, outputs: Sequence[Sbp], needs: Sequence[frozenset[Sbp]]) -> float:
    """All boxing of what ``node`` yields as ``outputs`` and is needed as ``needs``."""
    return sum(line.cost((node, at), have, needs[at]) for at, have in enumerate(outputs))


def _true_cost(line: Line, chain: Sequence[fx.Node]) -> float:
    tensors = {made for node in chain for made in line.inputs(node)}
    tensors |= {(node, index) for node in chain for index in range(len(line.values[node]))}
    return sum(map(line.tensor_cost, tensors)) + sum(signature_cost(line.signature[node]) for node in chain)


def _apply(line: Line, chain: Sequence[fx.Node], signatures: list[Signature]) -> None:
    for node, signature in zip(chain, signatures, strict=True):
        line.choose(node, signature)
