"""What a segment may keep and what it may make again: the best choices, from keeping all to making all again.

A choice is a cut of the segment's flow of data from where it is computed to where backward reads it. Each value is two
vertices with an edge between them: to cut it is to keep the value, and costs its bytes. An operator on the far side is
run again: an edge from the source to it costs its work. Backward's readers are the sink. The minimum of
``price * bytes + work`` is so a minimum cut, for any price of memory (after ``torch._functorch.partitioners``, which
asks for the fewest bytes and forbids making products again, where work here has its price).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
from torch import fx

from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import origin
from zerograph.passes.recompute.segments import Segment, is_weight, made_by, owner
from zerograph.passes.recompute.work import local_bytes, work

# Choices of one segment: halving the gaps between the best ones so often.
_HALVINGS = 4


@dataclass(frozen=True)
class Value:
    """A value of a segment, or one from outside that making it again reads.

    Attributes:
        bytes: what keeping it takes on a rank; 0 where it is kept anyway.
        read: backward reads it.
        operator: number of what makes it; None where it cannot be made again.
    """

    bytes: int
    read: bool
    operator: int | None


@dataclass(frozen=True)
class Operator:
    """What makes values: its work, and the numbers of the values that it reads."""

    work: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A segment in numbers: equal for equal blocks, whichever of the model's they are."""

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Choice:
    """Bytes kept, work done again, and which values are made again, by their numbers."""

    bytes: int
    work: int
    again: frozenset[int]


def pose(segment: Segment, read: Mapping[fx.Node, bool], mesh: Mesh) -> tuple[Problem, list[fx.Node]]:
    """The problem of a segment, and the nodes behind the numbers of its values.

    Args:
        read: every value of forward, and whether backward reads it.
    """
    stack = [value for value in segment.values if read[value] and value in segment.makeable]
    wanted = set(stack)
    while stack:
        for given in _read_by(made_by(stack.pop())):
            if given in read and given not in wanted and not is_weight(given):
                wanted.add(given)
                if given in segment.makeable:
                    stack.append(given)
    nodes = sorted(wanted)
    numbers = {node: number for number, node in enumerate(nodes)}
    makers = {node: made_by(node) for node in nodes if node in segment.makeable}
    operators = {maker: number for number, maker in enumerate(dict.fromkeys(makers.values()))}
    values = [
        Value(
            0 if read[node] and node not in makers else local_bytes(node, mesh),
            read[node] and node in makers,
            operators[makers[node]] if node in makers else None,
        )
        for node in nodes
    ]
    made = [
        Operator(work(maker, mesh), tuple(sorted({numbers[one] for one in _read_by(maker) if one in numbers})))
        for maker in operators
    ]
    return Problem(tuple(values), tuple(made)), nodes


def _read_by(maker: fx.Node) -> Iterator[fx.Node]:
    return (owner(given) for given in maker.all_input_nodes)


def choices(problem: Problem) -> list[Choice]:
    """From keeping all to keeping least, each with less bytes for more work; none is worse than a mix of two others."""
    all_kept = Choice(sum(value.bytes for value in problem.values if value.read), 0, frozenset())
    total = sum(one.work for one in problem.operators)
    least = _cheapest(problem, total + 1, 1)
    if least.bytes >= all_kept.bytes:
        return [all_kept]
    return [all_kept, *_between(problem, all_kept, least, _HALVINGS), least]


def _between(problem: Problem, one: Choice, other: Choice, halvings: int) -> list[Choice]:
    """The best choices between two: at the price at which these two cost the same."""
    price, unit = other.work - one.work, one.bytes - other.bytes
    found = _cheapest(problem, price, unit)
    if halvings == 0 or price * found.bytes + unit * found.work >= price * one.bytes + unit * one.work:
        return []
    before = _between(problem, one, found, halvings - 1)
    return [*before, found, *_between(problem, found, other, halvings - 1)]


def _cheapest(problem: Problem, price: int, unit: int) -> Choice:
    """The choice with the least ``price * bytes + unit * work``."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for number, value in enumerate(problem.values):
        graph.add_edge((number, "made"), (number, "there"), capacity=price * value.bytes)
        if value.operator is None:
            graph.add_edge("source", (number, "made"))
        else:
            graph.add_edge(("operator", value.operator), (number, "made"))
        if value.read:
            graph.add_edge((number, "there"), "sink")
    for number, operator in enumerate(problem.operators):
        graph.add_edge("source", ("operator", number), capacity=unit * operator.work)
        for given in operator.reads:
            graph.add_edge((given, "there"), ("operator", number))
    _, far = networkx.minimum_cut(graph, "source", "sink")[1]
    return _choice(problem, far)


def _choice(problem: Problem, far: set[Any]) -> Choice:
    again = frozenset(number for number in range(len(problem.values)) if (number, "made") in far)
    kept = [number for number in range(len(problem.values)) if (number, "there") in far and number not in again]
    done = {problem.values[number].operator for number in again}
    return Choice(
        sum(problem.values[number].bytes for number in kept),
        sum(problem.operators[number].work for number in done if number is not None),
        again,
    )


def read_in_backward(graph: fx.Graph, segments: Sequence[Segment]) -> dict[fx.Node, bool]:
    """Every value of the segments, and whether a node behind forward reads it."""
    found = {value: False for segment in segments for value in segment.values}
    for reader in graph.nodes:
        if reader.op == "call_function" and origin(reader).phase != "forward":
            for given in reader.all_input_nodes:
                made = owner(given)
                if made in found:
                    found[made] = True
    return found
