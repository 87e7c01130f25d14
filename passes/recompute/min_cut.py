"""The best choices of what a segment saves and what it recomputes, from saving all to recomputing all.

A choice is a cut of the segment's data flow between its inputs and its readers in backward. Each value is two vertices
with an edge between them: cutting it means saving the value, and costs its bytes. An operator on the far side is run
again: the edge from the source to it costs its work. The readers in backward are the sink. For any price of memory, the
minimum of ``price * bytes + work`` is therefore a minimum cut. (``torch._functorch.partitioners`` does the same for the
fewest bytes, and never recomputes products; here work has a price.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import closure
from zerograph.passes.recompute.cost import local_bytes, operator_work
from zerograph.passes.recompute.segments import Segment, is_weight, producer, storage_node

# Number of times that the gaps between the best choices of a segment are halved.
_HALVINGS = 4


@dataclass(frozen=True)
class Value:
    """A value of a segment, or an input that recomputing one reads.

    Attributes:
        bytes: bytes on a rank to save it; 0 if it is saved anyway.
        read: whether backward reads it.
        operator: number of the operator that computes it; None if it cannot be recomputed.
    """

    bytes: int
    read: bool
    operator: int | None


@dataclass(frozen=True)
class Operator:
    """An operator of a segment.

    Attributes:
        work: bytes that running it moves, or that take as long.
        reads: numbers of the values that it reads.
    """

    work: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A segment in numbers. Equal blocks of the model have equal problems."""

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Choice:
    """A choice of what a segment saves and what it recomputes.

    Attributes:
        bytes: bytes saved.
        work: work done again.
        recomputed: numbers of the values that are recomputed.
    """

    bytes: int
    work: int
    recomputed: frozenset[int]


def pose(segment: Segment, read: Mapping[fx.Node, bool], mesh: Mesh) -> tuple[Problem, list[fx.Node]]:
    """Return the problem of a segment, and the nodes of its values.

    Args:
        segment: the segment.
        read: every value of forward, and whether backward reads it.
        mesh: the ranks.
    """

    def sources(value: fx.Node) -> list[fx.Node]:
        again = value in segment.recomputable
        return [one for one in _read_by(producer(value)) if one in read and not is_weight(one)] if again else []

    nodes = sorted(closure((one for one in segment.values if read[one] and one in segment.recomputable), sources))
    numbers = {node: number for number, node in enumerate(nodes)}
    makers = {node: producer(node) for node in nodes if node in segment.recomputable}
    operators = {maker: number for number, maker in enumerate(dict.fromkeys(makers.values()))}
    values = [
        Value(
            0 if read[node] and node not in makers else local_bytes(node, mesh),
            read[node] and node in makers,
            operators[makers[node]] if node in makers else None,
        )
        for node in nodes
    ]
    problem_operators = [
        Operator(
            operator_work(maker, mesh),
            tuple(sorted({numbers[source] for source in _read_by(maker) if source in numbers})),
        )
        for maker in operators
    ]
    return Problem(tuple(values), tuple(problem_operators)), nodes


def _read_by(maker: fx.Node) -> Iterator[fx.Node]:
    return (storage_node(source) for source in maker.all_input_nodes)


def parts(problem: Problem) -> list[tuple[Problem, tuple[int, ...]]]:
    """Return the independent parts of a problem, and the numbers of the values of each.

    Parts share no operator, and no value that takes bytes to save. Small problems are solved faster, and more of them
    are equal.
    """
    import networkx

    results: defaultdict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(problem.values):
        if value.operator is not None:
            results[value.operator].append(number)
    groups = [
        (*results[operator], *(read for read in entry.reads if problem.values[read].bytes))
        for operator, entry in enumerate(problem.operators)
    ]
    joined = networkx.utils.UnionFind()
    for group in groups:
        joined.union(*group)
    operators: defaultdict[int, list[int]] = defaultdict(list)
    for operator, group in enumerate(groups):
        operators[joined[group[0]]].append(operator)
    return [_part(problem, own, results) for own in operators.values()]


def _part(
    problem: Problem, operators: Sequence[int], results: Mapping[int, Sequence[int]]
) -> tuple[Problem, tuple[int, ...]]:
    """Return these operators of a problem with the values that they compute and read."""
    numbers = sorted(
        {number for operator in operators for number in (*results[operator], *(problem.operators[operator].reads))}
    )
    places = {number: place for place, number in enumerate(numbers)}
    new_operators = {operator: place for place, operator in enumerate(operators)}
    values = tuple(
        replace(value, operator=None if value.operator is None else new_operators.get(value.operator))
        for value in (problem.values[number] for number in numbers)
    )
    kept = tuple(
        Operator(entry.work, tuple(places[read] for read in entry.reads))
        for entry in (problem.operators[operator] for operator in operators)
    )
    return Problem(values, kept), tuple(numbers)


def choices(problem: Problem) -> list[Choice]:
    """Return the best choices of a problem, from saving all to saving least: each saves less, for more work.

    No choice is worse than a mix of two others.
    """
    all_saved = Choice(sum(value.bytes for value in problem.values if value.read), 0, frozenset())
    total = sum(operator.work for operator in problem.operators)
    least = cheapest(problem, total + 1, 1)
    if least.bytes >= all_saved.bytes:
        return [all_saved]
    return [all_saved, *_between(problem, all_saved, least, _HALVINGS), least]


def _between(problem: Problem, more: Choice, fewer: Choice, halvings: int) -> list[Choice]:
    """Return the best choices between two: those at the price at which the two cost the same."""
    price, unit = fewer.work - more.work, more.bytes - fewer.bytes
    middle = cheapest(problem, price, unit)
    if halvings == 0 or price * middle.bytes + unit * middle.work >= price * more.bytes + unit * more.work:
        return []
    before = _between(problem, more, middle, halvings - 1)
    return [*before, middle, *_between(problem, middle, fewer, halvings - 1)]


def cheapest(problem: Problem, price: int, unit: int) -> Choice:
    """Return the choice with the least ``price * bytes + unit * work``."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for number, value in enumerate(problem.values):
        graph.add_edge((number, "computed"), (number, "saved"), capacity=price * value.bytes)
        if value.operator is None:
            graph.add_edge("source", (number, "computed"))
        else:
            graph.add_edge(("operator", value.operator), (number, "computed"))
        if value.read:
            graph.add_edge((number, "saved"), "sink")
    for number, operator in enumerate(problem.operators):
        graph.add_edge("source", ("operator", number), capacity=unit * operator.work)
        for read in operator.reads:
            graph.add_edge((read, "saved"), ("operator", number))
    _, far = networkx.minimum_cut(graph, "source", "sink")[1]
    return _choice(problem, far)


def _choice(problem: Problem, far: set[Any]) -> Choice:
    recomputed = frozenset(number for number in range(len(problem.values)) if (number, "computed") in far)
    saved = [number for number in range(len(problem.values)) if (number, "saved") in far and number not in recomputed]
    rerun = {problem.values[number].operator for number in recomputed}
    return Choice(
        sum(problem.values[number].bytes for number in saved),
        sum(problem.operators[number].work for number in rerun if number is not None),
        recomputed,
    )


def read_in_backward(graph: fx.Graph, segments: Sequence[Segment]) -> dict[fx.Node, bool]:
    """Return every value of the segments, and whether a node after forward reads it."""
    read = {value: False for segment in segments for value in segment.values}
    for reader in graph.nodes:
        if reader.op == "call_function" and origin(reader).phase != "forward":
            for source in reader.all_input_nodes:
                value = storage_node(source)
                if value in read:
                    read[value] = True
    return read
