"""Improve a greedy placement: solve the chain of operators around a boxing that costs something.

With the rest of the graph held fixed, the placements of a chain are the paths through a graph with one layer per
operator and one node per signature. An edge costs the boxing between two operators. The shortest path is then exact.
A change is kept only if the true cost is lower, which also counts chains that meet themselves again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zerograph.ir.sbp import Sbp, Signature
from zerograph.passes.placement.cost import signature_cost
from zerograph.passes.placement.problem import PlacementProblem, TensorId

Candidates = dict[fx.Node, tuple[Signature, ...]]

# Costs around a node, with the inputs that they were computed from. Chains overlap, and few costs change in between.
_Cache = dict[tuple[Any, ...], tuple[Any, list[list[float]]]]

# Maximum number of operators of a chain on either side of the boxing. Farther ones seldom matter, and take time.
_REACH = 16

# Added to a signature other than the present one, so that of equal placements the present one stays.
_CHANGED = 1e-7

# A data-parallel step pays for fewer boxings than this. Other steps would compile for minutes.
_MOST_CHAINS = 100


def improve(problem: PlacementProblem, candidates: Candidates) -> None:
    """Place chains of operators around boxings more cheaply, until none can be improved while the rest stays.

    Args:
        problem: a complete placement, which is changed.
        candidates: the signatures of each operator whose placement is free.
    """
    solved: set[tuple[fx.Node, ...]] = set()
    cache: _Cache = {}
    boxed = {reader: tensors for reader in candidates if (tensors := _boxed_inputs(problem, reader))}
    pending = [(reader, tensor) for reader in boxed for tensor in boxed[reader]]
    for _ in range(_MOST_CHAINS):
        if not pending:
            return
        chain = tuple(_chain(problem, *pending.pop(), candidates))
        if chain not in solved:
            solved.add(chain)
            if _solve(problem, chain, candidates, cache):
                # The change moves boxings, and may allow a better placement of the chains that share a node.
                solved = {other for other in solved if set(chain).isdisjoint(other)}
                for reader in _chain_and_readers(problem, chain):
                    boxed[reader] = _boxed_inputs(problem, reader) if reader in candidates else []
                pending = [(reader, tensor) for reader in sorted(boxed) for tensor in boxed[reader]]


def _boxed_inputs(problem: PlacementProblem, reader: fx.Node) -> list[TensorId]:
    """Return the tensors that an operator reads under another SBP than they have, at a cost."""
    return [
        tensor
        for tensor, need in zip(problem.inputs(reader), problem.signature[reader].inputs, strict=True)
        if need != (have := problem.sbp_of(tensor)) and problem.cost(tensor, have, (need,))
    ]


def _chain_and_readers(problem: PlacementProblem, chain: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose boxings a change of the chain moves."""
    outputs = [tensor for node in chain for tensor in problem.tensors_of(node)]
    return {*chain, *(reader for tensor in outputs for reader in problem.readers(tensor))}


def _chain(problem: PlacementProblem, reader: fx.Node, tensor: TensorId, candidates: Candidates) -> list[fx.Node]:
    """Return the operators before and after the boxing of ``tensor`` for ``reader``, along the largest tensors."""
    chain = [reader]
    source: fx.Node | None = tensor[0]
    while source is not None and source in candidates and len(chain) < _REACH:
        chain.insert(0, source)
        inputs = [tensor for tensor in problem.inputs(source) if tensor[0] in candidates]
        source = max(inputs, key=problem.nbytes)[0] if inputs else None
    node: fx.Node | None = reader
    while node is not None and len(chain) < 2 * _REACH:
        users = [
            (-problem.nbytes(output), user)
            for output in problem.tensors_of(node)
            for user in problem.readers(output)
            if user in candidates and user not in chain
        ]
        node = min(users)[1] if users else None
        if node is not None:
            chain.append(node)
    return chain


def _solve(problem: PlacementProblem, chain: Sequence[fx.Node], candidates: Candidates, cache: _Cache) -> bool:
    """Place the chain along the shortest path. Return False, with nothing changed, if that is no cheaper."""
    new = _shortest_path(problem, chain, [candidates[node] for node in chain], cache)
    old = [problem.signature[node] for node in chain]
    if new == old:
        return False
    cost = _true_cost(problem, chain)
    _apply(problem, chain, new)
    if _true_cost(problem, chain) < cost - 1e-9:
        return True
    _apply(problem, chain, old)
    return False


def _shortest_path(
    problem: PlacementProblem, chain: Sequence[fx.Node], options: Sequence[Sequence[Signature]], cache: _Cache
) -> list[Signature]:
    """Return the signature of each operator along the shortest path, layer by layer."""
    # Length of the shortest path to each signature of the present layer.
    lengths = _inner_costs(problem, chain, 0, options[0], cache)
    # By layer after the first: the signature before each signature on its shortest path.
    before: list[list[int]] = []
    for index in range(1, len(chain)):
        between = _costs_between(problem, chain[index - 1], options[index - 1], chain[index], options[index], cache)
        inner = _inner_costs(problem, chain, index, options[index], cache)
        shortest: dict[int, tuple[float, int]] = {}
        layer = []
        for cost, boxings in zip(inner, between, strict=True):
            # Signatures that need the same inputs share a row.
            if id(boxings) not in shortest:
                shortest[id(boxings)] = min(zip(map(operator.add, lengths, boxings), range(len(boxings)), strict=True))
            length, number = shortest[id(boxings)]
            layer.append((length + cost, number))
        lengths, before = [length for length, _ in layer], [*before, [number for _, number in layer]]
    last = chain[-1]
    ends = [
        length + _output_cost(problem, last, outputs, _needs_of_others(problem, last, outputs, None))
        for length, outputs in zip(lengths, (signature.outputs for signature in options[-1]), strict=True)
    ]
    path = [ends.index(min(ends))]
    for numbers in reversed(before):
        path.insert(0, numbers[path[0]])
    return [signatures[number] for signatures, number in zip(options, path, strict=True)]


def _inner_costs(
    problem: PlacementProblem, chain: Sequence[fx.Node], index: int, options: Sequence[Signature], cache: _Cache
) -> list[float]:
    """Return, per signature of ``chain[index]``, its own cost and that of inputs from outside the chain."""
    node, previous = chain[index], chain[index - 1] if index else None
    outside = []
    for tensor in dict.fromkeys(problem.inputs(node)):
        if tensor[0] is not previous:
            have = problem.sbp_of(tensor)
            outside.append((tensor, have, frozenset(problem.needs(tensor, have, exclude=node))))

    def input_costs() -> list[list[float]]:
        return [
            [
                problem.cost(tensor, have, frozenset(problem.needed_by(node, signature, tensor)) - others)
                for tensor, have, others in outside
            ]
            for signature in options
        ]

    costs = _cached(cache, ("inner", node, previous), outside, input_costs)
    chosen = problem.signature[node]
    own = [
        signature_cost(signature) if signature == chosen else signature_cost(signature) + _CHANGED
        for signature in options
    ]
    return [sum(each, start) for each, start in zip(costs, own, strict=True)]


def _costs_between(
    problem: PlacementProblem,
    node: fx.Node,
    node_options: Sequence[Signature],
    reader: fx.Node,
    reader_options: Sequence[Signature],
    cache: _Cache,
) -> list[list[float]]:
    """Return the cost of boxing what ``node`` yields for ``reader``.

    The table has a row per signature of ``reader``, and a column per signature of ``node``.

    Many signatures yield the same outputs, or need the same inputs. Each combination is computed once.
    """
    yielded = [signature.outputs for signature in node_options]
    others = {outputs: _needs_of_others(problem, node, outputs, reader) for outputs in dict.fromkeys(yielded)}

    def costs() -> list[list[float]]:
        rows: dict[tuple[frozenset[Sbp], ...], list[float]] = {}
        table = []
        for signature in reader_options:
            wanted = tuple(
                frozenset(problem.needed_by(reader, signature, output)) for output in problem.tensors_of(node)
            )
            if wanted not in rows:
                each = {
                    outputs: _output_cost(problem, node, outputs, [a | b for a, b in zip(needs, wanted, strict=True)])
                    for outputs, needs in others.items()
                }
                rows[wanted] = [each[outputs] for outputs in yielded]
            table.append(rows[wanted])
        return table

    return _cached(cache, ("between", node, reader), others, costs)


def _cached(
    cache: _Cache, key: tuple[Any, ...], inputs: Any, compute: Callable[[], list[list[float]]]
) -> list[list[float]]:
    """Return the cached costs of ``key``; compute them if they were computed from other ``inputs``."""
    if key not in cache or cache[key][0] != inputs:
        cache[key] = inputs, compute()
    return cache[key][1]


def _needs_of_others(
    problem: PlacementProblem, node: fx.Node, outputs: Sequence[Sbp], reader: fx.Node | None
) -> list[frozenset[Sbp]]:
    """Return, for each output of ``node``, the SBPs that its readers other than ``reader`` need."""
    return [frozenset(problem.needs((node, index), have, exclude=reader)) for index, have in enumerate(outputs)]


def _output_cost(
    problem: PlacementProblem, node: fx.Node, outputs: Sequence[Sbp], needs: Sequence[frozenset[Sbp]]
) -> float:
    """Return the cost of boxing the outputs of ``node`` from ``outputs`` to ``needs``."""
    return sum(problem.cost((node, index), have, needs[index]) for index, have in enumerate(outputs))


def _true_cost(problem: PlacementProblem, chain: Sequence[fx.Node]) -> float:
    tensors = {tensor for node in chain for tensor in (*problem.inputs(node), *problem.tensors_of(node))}
    # Ranks iterate over a set in other orders, in which a plain sum of large costs would round otherwise.
    return math.fsum(map(problem.tensor_cost, tensors)) + sum(signature_cost(problem.signature[node]) for node in chain)


def _apply(problem: PlacementProblem, chain: Sequence[fx.Node], signatures: list[Signature]) -> None:
    for node, signature in zip(chain, signatures, strict=True):
        problem.choose(node, signature)
