"""A step's nodes in the order in which they run: a loop after the nodes of its body; and memory over that order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from zerograph.inspection.sequence import loop_inputs, positions
from zerograph.ir.loop import loop_of
from zerograph.ir.memory import Profile
from zerograph.ir.metadata import role


@dataclass(frozen=True, eq=False)
class OrderedNode:
    """A node in the order.

    Attributes:
        node: of the graph, or of a loop's body.
        name: unique in the order: names in a body are prefixed with the loop's name.
        inputs: names of its inputs, in the order too: a body reads the values that its loop passes to it.
        times: number of runs per step.
    """

    node: fx.Node
    name: str
    inputs: tuple[str, ...]
    times: int = 1


@dataclass
class Order:
    """Nodes in the order in which they run.

    Attributes:
        nodes: without outputs, and without the placeholders of bodies.
        returned: names of the values that the graph returns.
        spans: by graph, (first, last) index in ``nodes`` of each of its nodes: a loop spans its body.
    """

    nodes: list[OrderedNode] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)
    spans: dict[fx.Graph, list[tuple[int, int]]] = field(default_factory=dict)


def run_order(graph: fx.Graph) -> Order:
    """Return the nodes of a graph, and of the loops in it, in the order in which they run."""
    order = Order()
    # The name of each value; None for a placeholder into which a body writes a result.
    names: dict[fx.Node, str | None] = {}
    # For each open loop: its node, the index of its body's first node, names of nodes that write its results.
    loops: list[tuple[OrderedNode, int, list[str]]] = []

    def close() -> None:
        loop, first, results = loops.pop()
        inputs = tuple(dict.fromkeys((*loop.inputs, *results)))
        order.nodes.append(OrderedNode(loop.node, loop.name, inputs, loop.times))
        order.spans[loop.node.graph].append((first, len(order.nodes) - 1))

    for position in positions(graph):
        while len(loops) > len(position.loops):
            close()
        node, in_body = position.node, bool(position.loops)
        spans = order.spans.setdefault(node.graph, [])
        inputs = tuple(name for source in node.all_input_nodes if (name := names[source]) is not None)
        # Placeholders of a body are named when their loop opens.
        named = node in names
        if node.op == "output" or named:
            if node.op == "output" and not in_body:
                order.returned |= set(inputs)
        else:
            names[node] = name = ".".join([*(loop.name for loop in position.loops), node.name])
            placed = OrderedNode(node, name, inputs, position.times)
            if loops and any(names[source] is None for source in node.all_input_nodes):
                loops[-1][2].append(name)
            if loop_of(node) is not None:
                loops.append((placed, len(order.nodes), []))
                _name_placeholders(node, names)
                continue
            order.nodes.append(placed)
        last = max(len(order.nodes) - 1, 0)
        spans.append((last, last))
    while loops:
        close()
    return order


def _name_placeholders(node: fx.Node, names: dict[fx.Node, str | None]) -> None:
    """Name the placeholders of a loop's body after the loop's operands; those for results have no name."""
    loop = loop_of(node)
    assert loop is not None
    for placeholder in loop.body.graph.find_nodes(op="placeholder"):
        if (value := role(placeholder)) is not None and value.kind == "result":
            names[placeholder] = None
    names |= {placeholder: name for operand, placeholder in loop_inputs(node) if (name := names[operand]) is not None}


@dataclass(frozen=True)
class Allocation:
    """Memory of one kind: ``bytes`` allocated by the node at ``owner`` and live from ``born`` to ``dies``, indices."""

    bytes: int
    kind: str
    owner: int
    born: int
    dies: int


def allocations(profile: Profile, graph: fx.Graph, order: Order) -> Sequence[Allocation]:
    """Return the memory of a step over its order, temporary memory of operators included."""
    return list(_allocations(profile, graph, order, in_body=False))


def _allocations(profile: Profile, graph: fx.Graph, order: Order, *, in_body: bool) -> Iterator[Allocation]:
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
            yield from _allocations(profile.bodies[number], loop.body.graph, order, in_body=True)
        elif temporary:
            yield Allocation(temporary, "temporary", spans[number][1], *spans[number])
