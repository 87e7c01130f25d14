"""trace: a graph run node by node, to find what first made a number that is not finite.

The graph is one that only makes values (up to pass ``loop``), of which as much is run as the wanted node needs:
collectives, on all ranks alike, and nothing that writes state. Every value that is not finite has a *cause*: the first
node, in the order of execution, that made such a number, and that the value follows from. Infinities that the user
wrote, such as those of a mask, are a cause only if nothing else is: what makes NaN of them is its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.ir.alias import WAIT
from zerograph.ir.finite_check import has_fractions
from zerograph.ir.loop import Loop, accumulate, collect, loop_of
from zerograph.ir.metadata import Boxing, Origin, Role, meta, origin, role
from zerograph.ir.rewrite import ancestors

aten = torch.ops.aten


@dataclass(frozen=True)
class Cause:
    """What made the first number that is not finite.

    Attributes:
        order: its place in the order of execution, equal on all ranks for the same node.
        what: the operator; of an input of the graph its role.
        origin: phase, module and line of an operator.
        nans, infinities, elements: how many of its elements, on this rank, are not a number, are infinite, are there.
        turn: in which micro-batch, from 0; None outside of them.
        written: these are infinities that were meant: numbers in the code, or in a buffer.
        index: one of those elements, in the value's shape on this rank.
        of: where the infinities came from that an operator made NaN of, if they were meant.
    """

    order: tuple[int, ...]
    what: Role | str
    origin: Origin
    nans: int
    infinities: int
    elements: int
    turn: int | None = None
    written: bool = False
    index: tuple[int, ...] = ()
    of: Cause | None = None


@dataclass
class Trace:
    """Runs what ``wanted``, a node of the graph, needs. Call it with the graph's inputs; ``cause`` is then that of it.

    Attributes:
        cause: None where the value came out finite.
    """

    graph: fx.Graph
    wanted: fx.Node
    cause: Cause | None = None

    @functools.cached_property
    def needed(self) -> frozenset[fx.Node]:
        """The nodes that are run, and the inputs that are read."""
        return frozenset({self.wanted} | ancestors([self.wanted]))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        run = _Run()
        run.follow(self.graph, inputs, [None] * len(inputs), self.needed, keep={self.wanted})
        self.cause = run.causes.get(self.wanted)
        return [run.values[self.wanted]]


@dataclass
class _Run:
    """One run of a graph or of a loop's body.

    Attributes:
        values, causes: of the nodes that somebody still reads.
        of_results: the cause of each result of a loop.
        before: the order of the node whose body this is, and the micro-batch.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    causes: dict[fx.Node, Cause] = field(default_factory=dict)
    of_results: dict[fx.Node, list[Cause | None]] = field(default_factory=dict)
    before: tuple[int, ...] = ()
    turn: int | None = None

    def follow(
        self,
        graph: fx.Graph,
        inputs: Sequence[Any],
        given: Sequence[Cause | None],
        needed: Iterable[fx.Node],
        keep: Iterable[fx.Node] = (),
    ) -> None:
        """Run the ``needed`` nodes; ``given`` are the causes of the inputs, where they are known."""
        wanted, kept = set(needed), set(keep)
        last = _last_uses([node for node in graph.nodes if node in wanted])
        fed = iter(zip(inputs, given, strict=True))
        for number, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self.values[node], known = next(fed)
                if node in wanted:
                    self._note(node, number, [] if known is None else [known])
                continue
            if node.op == "output" or node not in wanted:
                continue
            if (loop := loop_of(node)) is not None:
                self._loop(node, loop, number)
            else:
                self._run(node, number, graph)
            for done in last.get(node, ()):
                if done not in kept:
                    self.values.pop(done, None)
                    self.causes.pop(done, None)

    def _run(self, node: fx.Node, number: int, graph: fx.Graph) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        causes = self._known(node.all_input_nodes)
        if node.op == "get_attr":
            self.values[node] = getattr(graph.owning_module, str(node.target))
        elif node.op == "call_module":
            assert graph.owning_module is not None
            self.values[node] = graph.owning_module.get_submodule(str(node.target))(*args, **kwargs)
        else:
            assert callable(node.target)
            self.values[node] = node.target(*args, **kwargs)
        if node.target in (accumulate, collect):
            # What it wrote is the loop's result from here on; what was there before counts for a sum alone.
            place = node.args[0]
            assert isinstance(place, fx.Node)
            fresh = self.turn == 0 and node.target is accumulate
            self.causes.pop(place, None)
            parts = [given for given in node.all_input_nodes if given is not place]
            self._note(place, number, self._known(parts) if fresh else causes, like=node)
        elif any(reader.target is WAIT for reader in node.users):
            # There is no value before it has been waited for.
            if causes:
                self.causes[node] = _first(causes)
        elif node.target is getitem and node.args[0] in self.of_results:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            result = self.of_results[source][index]
            self._note(node, number, [] if result is None else [result])
        else:
            self._note(node, number, causes)

    def _loop(self, node: fx.Node, loop: Loop, number: int) -> None:
        operands = [self.values[given] for given in node.args if isinstance(given, fx.Node)]
        causes = [self.causes.get(given) for given in node.args if isinstance(given, fx.Node)]
        results = tuple(one.zero_() for one in loop.make_results())
        found: list[Cause | None] = [None] * len(results)
        places = _results(loop.body.graph)
        for turn in range(loop.micro_batches):
            inner = _Run(before=(*self.before, number, turn), turn=turn)
            parts = loop.parts(operands, turn)
            inputs = [*parts, *results, torch.tensor(turn)]
            body = loop.body.graph
            inner.follow(body, inputs, [*causes, *found, None], body.nodes, keep=places)
            found = [inner.causes.get(place) for place in places]
        self.values[node], self.of_results[node] = results, found

    def _known(self, nodes: Iterable[fx.Node]) -> list[Cause]:
        return [self.causes[node] for node in nodes if node in self.causes]

    def _note(self, node: fx.Node, number: int, before: Sequence[Cause], like: fx.Node | None = None) -> None:
        """Note the cause of a value that is not finite: one of ``before``, or the node itself (``like``)."""
        if node.target in _UNWRITTEN or ((found := role(node)) is not None and found.kind == "result" and not like):
            if before:
                self.causes[node] = _first(before)
            return
        counted = _count(self.values[node])
        if counted is None:
            return
        nans, infinities, elements, index = counted
        meant = [one for one in before if one.written]
        if before and (not nans or len(meant) < len(before)):
            self.causes[node] = _first([one for one in before if not one.written] or before)
            return
        made = like or node
        written = not nans and _is_meant(made)
        of = _first(meant) if meant else None
        kept = nans, infinities, elements, self.turn, written, index, of
        self.causes[node] = Cause((*self.before, number), _what(made), origin(made), *kept)


def _what(node: fx.Node) -> Role | str:
    known = role(node)
    if node.op == "placeholder" and known is not None:
        return known
    if node.target is WAIT:
        found = meta(node.all_input_nodes[0]).get("boxing")
        if isinstance(found, Boxing):
            return f"the {found.kind} of {found.tensor}"
    return str(node.target)


# Operators whose result nobody has written yet.
_UNWRITTEN = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


def _first(causes: Sequence[Cause]) -> Cause:
    return min(causes, key=lambda one: one.order)


def _results(body: fx.Graph) -> list[fx.Node]:
    return [node for node in body.find_nodes(op="placeholder") if (found := role(node)) and found.kind == "result"]


def _last_uses(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """For each node the values that nobody reads after it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        for given in (node, *node.all_input_nodes):
            if given not in seen:
                seen.add(given)
                found.setdefault(node, []).append(given)
    return found


def _is_meant(node: fx.Node) -> bool:
    """Whether infinities that the node makes are the user's: of a constant, of a buffer, such as a mask."""
    known = role(node)
    if node.op == "get_attr" or (node.op == "placeholder" and known is not None and known.kind == "buffer"):
        return True
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return any(isinstance(one, float) and one in (float("inf"), float("-inf")) for one in leaves)


def _count(value: Any) -> tuple[int, int, int, tuple[int, ...]] | None:
    """How many elements are not a number, how many infinite, how many there are, and where one of those is.

    None: all are finite.
    """
    nans = infinities = elements = 0
    index: tuple[int, ...] = ()
    for one in pytree.tree_leaves(value):
        if not isinstance(one, Tensor) or not has_fractions(one) or not one.numel():
            continue
        # Some eight-bit formats know no isfinite.
        wide = one.float() if one.is_floating_point() and one.element_size() == 1 else one
        elements += one.numel()
        bad = wide.isfinite().logical_not()
        if not bool(bad.any()):
            continue
        here = int(wide.isnan().sum())
        nans, infinities = nans + here, infinities + int(bad.sum()) - here
        index = index or tuple(int(at) for at in bad.nonzero()[0])
    return (nans, infinities, elements, index) if nans + infinities else None
