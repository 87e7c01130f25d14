"""A step's nodes in the order in which they run, those in bodies of loops in the loop's place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from zerograph.ir.loop import loop_of
from zerograph.ir.memory import Profile
from zerograph.ir.metadata import role


@dataclass(frozen=True, eq=False)
class Placed:
    """A node in the sequence.

    Attributes:
        node: of the graph, or of a loop's body.
        name: unique in the sequence: a body's nodes have the loop's name in front.
        inputs: names of what it reads, of the sequence too: a body reads what its loop is given.
        times: how often it runs in a step.
    """

    node: fx.Node
    name: str
    inputs: tuple[str, ...]
    times: int = 1


@dataclass
class Sequenced:
    """The sequence, and where each position of a graph lies in it.

    Attributes:
        places: the nodes, without outputs and without what bodies take.
        returned: names of what the graph returns.
        spans: by graph, (first, last) in ``places`` of each of its positions: a loop spans its body.
    """

    places: list[Placed] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)
    spans: dict[fx.Graph, list[tuple[int, int]]] = field(default_factory=dict)


def sequence(graph: fx.Graph) -> Sequenced:
    """Lay the nodes of a graph, and of the loops in it, one behind the other."""
    found = Sequenced()
    _lay(graph, found, "", {}, 1)
    return found


def _lay(graph: fx.Graph, found: Sequenced, prefix: str, given: Mapping[str, str], times: int) -> list[str]:
    """Names of what the graph writes into what it was given to write."""
    spans: list[tuple[int, int]] = []
    written: list[str] = []
    for node in graph.nodes:
        first = len(found.places)
        inputs = tuple(named for one in node.all_input_nodes if (named := _name(one, prefix, given)) is not None)
        if node.op == "output":
            if not prefix:
                found.returned |= set(inputs)
        elif not (prefix and node.op == "placeholder" and (node.name in given or _is_written(node))):
            if (loop := loop_of(node)) is not None:
                inside = loop.body.graph
                passed = {
                    taken.name: name
                    for taken, one in zip(inside.find_nodes(op="placeholder"), node.args, strict=False)
                    if isinstance(one, fx.Node) and (name := _name(one, prefix, given)) is not None
                }
                yields = _lay(inside, found, f"{prefix}{node.name}.", passed, times * loop.micro_batches)
                inputs = tuple(dict.fromkeys((*inputs, *yields)))
            if prefix and any(_is_written(one) for one in node.all_input_nodes):
                written.append(f"{prefix}{node.name}")
            found.places.append(Placed(node, f"{prefix}{node.name}", inputs, times))
        last = len(found.places) - 1
        spans.append((min(first, max(last, 0)), max(last, 0)))
    found.spans[graph] = spans
    return written


def _name(node: fx.Node, prefix: str, given: Mapping[str, str]) -> str | None:
    if prefix and node.op == "placeholder":
        if node.name in given:
            return given[node.name]
        if _is_written(node):
            return None
    return f"{prefix}{node.name}"


def _is_written(node: fx.Node) -> bool:
    """Whether it is what a loop gives its body to write its results into."""
    found = role(node)
    return node.op == "placeholder" and found is not None and found.kind == "result"


@dataclass(frozen=True)
class Held:
    """Memory over the sequence: ``bytes`` of one kind, taken by the node at ``owner``, from ``born`` to ``dies``."""

    bytes: int
    kind: str
    owner: int
    born: int
    dies: int


def held(profile: Profile, graph: fx.Graph, found: Sequenced) -> Sequence[Held]:
    """What a step holds over its sequence, what operators need for a moment included."""
    return list(_held(profile, graph, found, inside=False))


def _held(profile: Profile, graph: fx.Graph, found: Sequenced, *, inside: bool) -> Iterator[Held]:
    spans = found.spans[graph]
    position = {node: number for number, node in enumerate(profile.nodes)}
    seen: set[int] = set()
    for node, storages in profile.of.items():
        for one in storages:
            if one is None or id(one) in seen or not one.bytes or (inside and one.is_input):
                continue
            seen.add(id(one))
            yield Held(one.bytes, one.kind, spans[position[node]][1], spans[one.born][0], spans[one.dies][1])
    for number, needed in enumerate(profile.temporary):
        if number in profile.bodies:
            loop = loop_of(profile.nodes[number])
            assert loop is not None
            yield from _held(profile.bodies[number], loop.body.graph, found, inside=True)
        elif needed:
            yield Held(needed, "temporary", spans[number][1], *spans[number])
