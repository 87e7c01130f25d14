"""Where the greedy choice pays for a boxing, the cheapest placement of the chain of operators around it.

With the rest of the graph held as it is, the placements of a chain are the paths through a graph with one layer for
each operator and one node for each of its signatures; an edge costs the boxing between the two. The shortest path is
then exact. A change is kept only if the true cost, chains that meet themselves again included, is lower.
"""

from __future__ import annotations

import networkx as nx
from torch import fx

from zerograph.passes.cost import boxing_cost, signature_cost
from zerograph.passes.line import Line, Made
from zerograph.passes.rules import Signature

Candidates = dict[fx.Node, tuple[Signature, ...]]


def improve(line: Line, candidates: Candidates) -> None:
    """No chain of operators around a boxing could be placed more cheaply while the rest stays as it is.

    Args:
        candidates: the signatures of each operator whose placement is free.
    """
    order = {node: index for index, node in enumerate(line.graph.nodes)}
    settled: set[tuple[fx.Node, ...]] = set()
    while True:
        chains = [_chain(line, reader, made, candidates, order) for reader, made in _paying(line, candidates)]
        fresh = [chain for chain in chains if tuple(chain) not in settled]
        settled.update(map(tuple, fresh))
        # A change anywhere may open a better way elsewhere, also for chains that were settled before.
        if any(_solve(line, chain, candidates) for chain in fresh):
            settled.clear()
        else:
            return


def _paying(line: Line, candidates: Candidates) -> list[tuple[fx.Node, Made]]:
    """(reader, tensor) wherever an operator reads another operator's output under another SBP."""
    return [
        (reader, made)
        for reader in candidates
        for made, need in zip(line.inputs(reader), line.signature[reader].inputs, strict=True)
        if need != (have := line.sbp[made[0]][made[1]]) and boxing_cost(have, (need,), line.nbytes(made), line.ranks)
    ]


def _chain(line: Line, reader: fx.Node, made: Made, candidates: Candidates, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The operators before and behind a boxing, along the largest tensors."""
    chain = [reader]
    source: fx.Node | None = made[0]
    while source is not None and source in candidates:
        chain.insert(0, source)
        above = [one for one in line.inputs(source) if one[0] in candidates]
        source = max(above, key=line.nbytes)[0] if above else None
    node: fx.Node | None = reader
    while node is not None:
        outputs = [(node, index) for index in range(len(line.values[node]))]
        below = [(line.nbytes(one), -order[user], user) for one in outputs for user in line.readers(one)]
        below = [entry for entry in below if entry[2] in candidates and entry[2] not in chain]
        node = max(below)[2] if below else None
        if node is not None:
            chain.append(node)
    return chain


def _solve(line: Line, chain: list[fx.Node], candidates: Candidates) -> bool:
    """Place the chain along the shortest path; False, and nothing changed, where that is no cheaper."""
    layers = nx.DiGraph()
    for first in candidates[chain[0]]:
        layers.add_edge("start", (0, first), cost=_inner(line, chain, 0, first))
    for index in range(1, len(chain)):
        for here in candidates[chain[index]]:
            inner = _inner(line, chain, index, here)
            for before in candidates[chain[index - 1]]:
                between = _between(line, chain[index - 1], before, chain[index], here)
                if (cost := inner + between) < float("inf"):
                    layers.add_edge((index - 1, before), (index, here), cost=cost)
    last = len(chain) - 1
    for signature in candidates[chain[last]]:
        layers.add_edge((last, signature), "end", cost=_outputs(line, chain[last], signature, None, None))
    path = nx.shortest_path(layers, "start", "end", weight="cost")[1:-1]
    new = [signature for _, signature in path]
    old = [line.signature[node] for node in chain]
    cost = _true_cost(line, chain)
    _apply(line, chain, new)
    if _true_cost(line, chain) < cost - 1e-9:
        return True
    _apply(line, chain, old)
    return False


def _inner(line: Line, chain: list[fx.Node], index: int, signature: Signature) -> float:
    """What the operator reads from outside the chain, and the signature itself."""
    node, total = chain[index], signature_cost(signature)
    previous = chain[index - 1] if index else None
    for made in dict.fromkeys(line.inputs(node)):
        if made[0] is not previous:
            have = line.sbp[made[0]][made[1]]
            others = set(line.needs(made, have, but=node))
            wanted = set(line.needed_by(node, signature, made))
            total += boxing_cost(have, wanted - others, line.nbytes(made), line.ranks)
    return total


def _between(line: Line, node: fx.Node, signature: Signature, reader: fx.Node, here: Signature) -> float:
    return _outputs(line, node, signature, reader, here)


def _outputs(line: Line, node: fx.Node, signature: Signature, reader: fx.Node | None, here: Signature | None) -> float:
    """All boxing of what ``node`` yields under ``signature``, its reader in the chain being placed as ``here``."""
    total = 0.0
    for index, have in enumerate(signature.outputs):
        made = (node, index)
        needs = set(line.needs(made, have, but=reader))
        if reader is not None and here is not None:
            needs |= set(line.needed_by(reader, here, made))
        total += boxing_cost(have, needs, line.nbytes(made), line.ranks)
    return total


def _true_cost(line: Line, chain: list[fx.Node]) -> float:
    tensors = {made for node in chain for made in line.inputs(node)}
    tensors |= {(node, index) for node in chain for index in range(len(line.values[node]))}
    return sum(map(line.tensor_cost, tensors)) + sum(signature_cost(line.signature[node]) for node in chain)


def _apply(line: Line, chain: list[fx.Node], signatures: list[Signature]) -> None:
    for node, signature in zip(chain, signatures, strict=True):
        line.choose(node, signature)
