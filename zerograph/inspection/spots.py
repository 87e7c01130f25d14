"""Where every node of a step stands: in the graph and in the bodies of its loops, as one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from zerograph.ir.loop import accumulate, collect, loop_of
from zerograph.ir.memory import Profile, Storage, profile


@dataclass(frozen=True)
class Spot:
    """A node, its place counted through all bodies, and how often it runs in a step."""

    node: fx.Node
    at: int
    times: int


class Spots:
    """All nodes of a graph and of the bodies of its loops in order, and how values pass between them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graphs: list[fx.Graph] = []
        self._spots: dict[fx.Node, Spot] = {}
        self._profiles: dict[fx.Graph, Profile] = {}
        self._loops: dict[fx.Graph, fx.Node] = {}
        self._positions: dict[fx.Node, int] = {}
        self._add(graph, 1, profile(graph))

    def _add(self, graph: fx.Graph, times: int, found: Profile) -> None:
        self.graphs.append(graph)
        self._profiles[graph] = found
        for position, node in enumerate(found.nodes):
            self._positions[node] = position
            self._spots[node] = Spot(node, len(self._spots), times)
            if (loop := loop_of(node)) is not None:
                self._loops[loop.body.graph] = node
                self._add(loop.body.graph, times * loop.micro_batches, found.bodies[position])

    def __iter__(self) -> Iterator[Spot]:
        return iter(self._spots.values())

    def __getitem__(self, node: fx.Node) -> Spot:
        return self._spots[node]

    def at(self, node: fx.Node) -> int:
        """The node's place."""
        return self._spots[node].at

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Who reads the value, in order: into the body of a loop that is given it, and out of one that yields it."""
        found: dict[fx.Node, None] = {}
        for user in node.users:
            loop = loop_of(user)
            if loop is not None:
                given = loop.body.graph.find_nodes(op="placeholder", sort=True)
                for index, operand in enumerate(user.args):
                    if operand is node:
                        found |= dict.fromkeys(self.readers(given[index]))
            elif user.target in (accumulate, collect) and user.args[1] is node:
                found |= dict.fromkeys([user, *self._yielded(user)])
            else:
                found[user] = None
        return sorted(found, key=self.at)

    def _yielded(self, write: fx.Node) -> list[fx.Node]:
        """What stands for the result outside of the loop."""
        loop_node = self._loops[write.graph]
        loop = loop_of(loop_node)
        assert loop is not None
        place = write.args[0]
        given = write.graph.find_nodes(op="placeholder", sort=True)
        index = next(number for number, one in enumerate(given) if one is place) - len(loop_node.args)
        return [user for user in loop_node.users if user.args[1] == index]

    def storage(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """The last node at which the value's memory is held, and its bytes; None for what outlives the graph."""
        one = self._storage(node)
        found = self._profiles[node.graph]
        if one is None or one.is_input or not one.bytes or one.dies == len(found.nodes) - 1:
            return None
        return found.nodes[one.dies], one.bytes

    def same_memory(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two values of one graph lie in the same memory."""
        if one is other:
            return True
        if one.graph is not other.graph:
            return False
        first = self._storage(one)
        return first is not None and first is self._storage(other)

    def _storage(self, node: fx.Node) -> Storage | None:
        held = self._profiles[node.graph].of.get(node, ())
        return held[0] if held else None
