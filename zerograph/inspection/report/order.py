"""A step's nodes in the order in which they run: a loop after the nodes of its body; and memory over that order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from zerograph.inspection.node_table import NodeTable, Row, loop_inputs
from zerograph.ir.loop import loop_of
from zerograph.ir.memory import Profile
from zerograph.ir.step_graph import placeholders


class OrderedNode(NamedTuple):
    """A node in the order.

    Attributes:
        node: of the graph, or of a loop's body.
        name: unique in the order: names in a body are prefixed with the loop's name.
        inputs: names of its inputs, in the order too: a body reads the values that its loop passes to it.
        row: its row in the table.
    """

    node: fx.Node
    name: str
    inputs: tuple[str, ...]
    row: Row


class Order:
    """The nodes of a graph, and of the loops in it, in the order in which they run.

    Attributes:
        nodes: without outputs, and without the placeholders of bodies.
        returned: names of the values that the graph returns.
        spans: by graph, (first, last) index in ``nodes`` of each of its nodes: a loop spans its body.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[OrderedNode] = []
        self.returned: set[str] = set()
        self.spans: dict[fx.Graph, list[tuple[int, int]]] = defaultdict(list)
        # The name of each value; None for a placeholder into which a body writes a result.
        names: dict[fx.Node, str | None] = {}
        # Names of the nodes that write the results of each loop.
        results: dict[fx.Node, list[str]] = defaultdict(list)
        table = NodeTable(graph)
        for row in table:
            node = row.node
            inputs = tuple(name for source in node.all_input_nodes if (name := names[source]) is not None)
            if node.op == "output":
                self.returned |= set() if row.loops else set(inputs)
            elif node not in names:
                names[node] = name = row.name(".")
                if row.loops and any(names[source] is None for source in node.all_input_nodes):
                    results[row.loops[-1]].append(name)
                self.nodes.append(OrderedNode(node, name, inputs, row))
                if (loop := loop_of(node)) is not None:
                    # The body's placeholders are named after the loop's operands; those for results have no name.
                    names |= dict.fromkeys(placeholders(loop.body.graph, "result"))
                    names |= {each: names[operand] for operand, each in loop_inputs(node)}
        for index, each in enumerate(self.nodes):
            if written := results.get(each.node):
                self.nodes[index] = each._replace(inputs=tuple(dict.fromkeys((*each.inputs, *written))))
        self.nodes.sort(key=lambda each: each.row.done)
        done = [each.row.done for each in self.nodes]
        for row in table:
            before = bisect_right(done, row.index)
            last = max(before - 1, 0)
            span = (last, last) if loop_of(row.node) is None else (before, bisect_left(done, row.done))
            self.spans[row.node.graph].append(span)


class Allocation(NamedTuple):
    """Memory of one kind: ``bytes`` allocated by the node at ``owner`` and live from ``born`` to ``dies``, indices."""

    bytes: int
    kind: str
    owner: int
    born: int
    dies: int


def allocations(profile: Profile, graph: fx.Graph, order: Order, *, in_body: bool = False) -> Iterator[Allocation]:
    """Yield the memory of a step over its order, temporary memory of operators included."""
    spans = order.spans[graph]
    numbers = {node: number for number, node in enumerate(profile.nodes)}
    seen: set[int] = set()
    for node, storages in profile.of.items():
        for storage in storages:
            if storage is None or id(storage) in seen or not storage.bytes or (in_body and storage.is_input):
                continue
            seen.add(id(storage))
            born, dies = spans[storage.born][0], spans[storage.dies][1]
            yield Allocation(storage.bytes, storage.kind, spans[numbers[node]][1], born, dies)
    for number, temporary in enumerate(profile.temporary):
        if number in profile.bodies:
            loop = loop_of(profile.nodes[number])
            assert loop is not None
            yield from allocations(profile.bodies[number], loop.body.graph, order, in_body=True)
        elif temporary:
            yield Allocation(temporary, "temporary", spans[number][1], *spans[number])
