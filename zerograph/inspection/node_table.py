"""The nodes of a step in one sequence: those of the graph and of the bodies of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from zerograph.ir.loop import accumulate, collect, loop_of
from zerograph.ir.memory import Profile, Storage, profile


@dataclass(frozen=True)
class Position:
    """A node in the sequence.

    Attributes:
        index: from 0; a loop comes before the nodes of its body.
        times: number of runs per step.
        loops: the loop nodes around it, outermost first.
    """

    node: fx.Node
    index: int
    times: int
    loops: tuple[fx.Node, ...]


def positions(graph: fx.Graph) -> list[Position]:
    """Return all nodes of a graph and of the bodies of its loops, in order."""
    sequence: list[Position] = []
    _add(graph, 1, (), sequence)
    return sequence


def _add(graph: fx.Graph, times: int, loops: tuple[fx.Node, ...], sequence: list[Position]) -> None:
    for node in graph.nodes:
        sequence.append(Position(node, len(sequence), times, loops))
        if (loop := loop_of(node)) is not None:
            _add(loop.body.graph, times * loop.micro_batches, (*loops, node), sequence)


def loop_inputs(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return (operand, placeholder of the body) for each node that a loop passes to its body."""
    loop = loop_of(node)
    assert loop is not None
    inputs = zip(node.args, loop.body.graph.find_nodes(op="placeholder", sort=True), strict=False)
    return [(operand, placeholder) for operand, placeholder in inputs if isinstance(operand, fx.Node)]


class NodeSequence:
    """The sequence of a graph with its dataflow: readers, across loop boundaries, and storages."""

    def __init__(self, graph: fx.Graph) -> None:
        self._positions = {position.node: position for position in positions(graph)}
        self._profiles: dict[fx.Graph, Profile] = {}
        self._loops: dict[fx.Graph, fx.Node] = {}
        self._add_profile(graph, profile(graph))

    def _add_profile(self, graph: fx.Graph, memory: Profile) -> None:
        self._profiles[graph] = memory
        for number, node in enumerate(memory.nodes):
            if (loop := loop_of(node)) is not None:
                self._loops[loop.body.graph] = node
                self._add_profile(loop.body.graph, memory.bodies[number])

    @property
    def graphs(self) -> list[fx.Graph]:
        """The graph, then the bodies of its loops."""
        return list(self._profiles)

    def __iter__(self) -> Iterator[Position]:
        return iter(self._positions.values())

    def __getitem__(self, node: fx.Node) -> Position:
        return self._positions[node]

    def index(self, node: fx.Node) -> int:
        """Return the node's index."""
        return self._positions[node].index

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that read a value, in order: also in the body of a loop, and after the loop it leaves."""
        readers: dict[fx.Node, None] = {}
        for user in node.users:
            if loop_of(user) is not None:
                for operand, placeholder in loop_inputs(user):
                    if operand is node:
                        readers |= dict.fromkeys(self.readers(placeholder))
            elif user.target in (accumulate, collect) and user.args[1] is node:
                readers |= dict.fromkeys([user, *self._loop_results(user)])
            else:
                readers[user] = None
        return sorted(readers, key=self.index)

    def _loop_results(self, write: fx.Node) -> list[fx.Node]:
        """Return the nodes outside a loop that stand for a result that ``write`` writes."""
        loop_node = self._loops[write.graph]
        placeholders: list[Any] = list(write.graph.find_nodes(op="placeholder", sort=True))
        index = placeholders.index(write.args[0]) - len(loop_node.args)
        return [user for user in loop_node.users if user.args[1] == index]

    def storage(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return the node after which a value's memory is freed, and its bytes; None if it outlives the graph."""
        storage = self._storage(node)
        nodes = self._profiles[node.graph].nodes
        if storage is None or storage.is_input or not storage.bytes or storage.dies == len(nodes) - 1:
            return None
        return nodes[storage.dies], storage.bytes

    def same_memory(self, first: fx.Node, second: fx.Node) -> bool:
        """Return True if two values of one graph share memory."""
        if first is second:
            return True
        if first.graph is not second.graph:
            return False
        storage = self._storage(first)
        return storage is not None and storage is self._storage(second)

    def _storage(self, node: fx.Node) -> Storage | None:
        storages = self._profiles[node.graph].of.get(node, ())
        return storages[0] if storages else None
