"""Where the greedy choice pays for a boxing, the cheapest placement of the chain of operators around it.

With the rest of the graph held as it is, the placements of a chain are the paths through a graph with one layer for
each operator and one node for each of its signatures; an edge costs the boxing between the two. The shortest path is
then exact. A change is kept only if the true cost, chains that meet themselves again included, is lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
from torch import fx

from zerograph.passes.cost import signature_cost
from zerograph.passes.line import Line, Made
from zerograph.passes.rules import Signature
from zerograph.sbp import Sbp

Candidates = dict[fx.Node, tuple[Signature, ...]]


def improve(line: Line, candidates: Candidates) -> None:
    """Chains of operators around a boxing could not be placed more cheaply while the rest stays as it is.

    Args:
        candidates: the signatures of each operator whose placement is free.
    """
    order = {node: index for index, node in enumerate(line.graph.nodes)}
    settled: set[tuple[fx.Node, ...]] = set()
    paying = {reader: found for reader in candidates if (found := _paid(line, reader))}
    waiting = [(reader, made) for reader in paying for made in paying[reader]]
    for _ in range(_MOST_CHAINS):
        if not waiting:
            return
        chain = tuple(_chain(line, *waiting.pop(), candidates, order))
        if chain not in settled:
            settled.add(chain)
            if _solve(line, chain, candidates):
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


def _solve(line: Line, chain: Sequence[fx.Node], candidates: Candidates) -> bool:
    """Place the chain along the shortest path; False, and nothing changed, where that is no cheaper."""
    # Signatures by number: networkx hashes its nodes all the time.
    options = [candidates[node] for node in chain]
    layers = nx.DiGraph()
    for number, first in enumerate(options[0]):
        layers.add_edge("start", (0, number), cost=_inner(line, chain, 0, first))
    for index in range(1, len(chain)):
        others = [_other_needs(line, chain[index - 1], before, chain[index]) for before in options[index - 1]]
        for number, here in enumerate(options[index]):
            inner = _inner(line, chain, index, here)
            for other, before in enumerate(options[index - 1]):
                between = _outputs(line, chain[index - 1], before, others[other], chain[index], here)
                if (cost := inner + between) < math.inf:
                    layers.add_edge((index - 1, other), (index, number), cost=cost)
    last = len(chain) - 1
    for number, signature in enumerate(options[last]):
        needs = _other_needs(line, chain[last], signature, None)
        layers.add_edge((last, number), "end", cost=_outputs(line, chain[last], signature, needs))
    path = nx.shortest_path(layers, "start", "end", weight="cost")[1:-1]
    new = [options[index][number] for index, number in path]
    old = [line.signature[node] for node in chain]
    cost = _true_cost(line, chain)
    _apply(line, chain, new)
    if _true_cost(line, chain) < cost - 1e-9:
        return True
    _apply(line, chain, old)
    return False


def _inner(line: Line, chain: Sequence[fx.Node], index: int, signature: Signature) -> float:
    """What the operator reads from outside the chain, and the signature itself."""
    node, total = chain[index], signature_cost(signature)
    if signature != line.signature[node]:
        total += _CHANGED
    previous = chain[index - 1] if index else None
    for made in dict.fromkeys(line.inputs(node)):
        if made[0] is not previous:
            have = line.sbp[made[0]][made[1]]
            others = set(line.needs(made, have, but=node))
            wanted = set(line.needed_by(node, signature, made))
            total += line.cost(made, have, wanted - others)
    return total


def _other_needs(line: Line, node: fx.Node, signature: Signature, reader: fx.Node | None) -> list[frozenset[Sbp]]:
    """Of each tensor that ``node`` yields under ``signature``, how all but ``reader`` need it."""
    return [frozenset(line.needs((node, at), have, but=reader)) for at, have in enumerate(signature.outputs)]


def _outputs(
    line: Line,
    node: fx.Node,
    signature: Signature,
    others: Sequence[frozenset[Sbp]],
    reader: fx.Node | None = None,
    here: Signature | None = None,
) -> float:
    """All boxing of what ``node`` yields under ``signature``, its reader in the chain being placed as ``here``."""
    total = 0.0
    for index, have in enumerate(signature.outputs):
        made, needs = (node, index), others[index]
        if reader is not None and here is not None:
            needs = needs.union(line.needed_by(reader, here, made))
        total += line.cost(made, have, needs)
    return total


def _true_cost(line: Line, chain: Sequence[fx.Node]) -> float:
    tensors = {made for node in chain for made in line.inputs(node)}
    tensors |= {(node, index) for node in chain for index in range(len(line.values[node]))}
    return sum(map(line.tensor_cost, tensors)) + sum(signature_cost(line.signature[node]) for node in chain)


def _apply(line: Line, chain: Sequence[fx.Node], signatures: list[Signature]) -> None:
    for node, signature in zip(chain, signatures, strict=True):
        line.choose(node, signature)
