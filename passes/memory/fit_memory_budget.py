"""fit_memory_budget: keep the memory budget, and use what it leaves for fewer and better hidden collectives.

Each choice moves the start or the wait of a collective, or keeps a gathered bucket alive, and so changes the memory in
use over one stretch of the graph by the bytes of one bucket. The profile of the graph is therefore taken once, and
every choice is a sum over a stretch of it. The order of choices is fixed and follows from shapes alone, which are equal
on all ranks:

1. where too much memory is in use, reductions are waited for earlier and gathers start later;
2. gathered buckets stay alive from forward into backward, which saves their second gather: those with the shortest
   stretch between first, the last layers of forward;
3. reductions stay in flight longer, so that backward does not wait for them;
4. gathers start earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerograph.errors import VerificationError
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.metadata import boxing_of
from zerograph.ir.rewrite import replace_node
from zerograph.ir.sbp import NdSbp
from zerograph.ir.step_graph import sent_forms, stored_form
from zerograph.ops.offload import FETCH, TRANSFER
from zerograph.passes.communication.pause_before_backward import start_after_pause
from zerograph.passes.context import Context

# Maximum gathers in flight. One more than needed hides a layer whose computation is too short.
_MAX_GATHERS = 3


def fit_memory_budget(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Keep the memory budget, and use what it leaves to avoid and to hide collectives.

    If the budget cannot be kept, the step uses as little memory as it can.
    """
    budget = context.memory.budget
    if budget is None:
        return module
    outer = profile(module.graph)
    for position, body in outer.bodies.items():
        # The body shares the budget with what the graph around the loop holds meanwhile.
        outside = outer.bytes[position] - outer.temporary[position]
        _fit(
            body.nodes[0].graph, budget - outside + sum(storage.bytes for storage in body.storages if storage.is_input)
        )
    _fit(module.graph, budget)
    return module


def _fit(graph: fx.Graph, budget: int) -> None:
    """Keep the budget and use it; if it cannot be kept, use as little memory as possible."""
    plan = _Plan(profile(graph), budget)
    plan.shrink()
    fits = plan.peak <= budget
    if fits:
        plan.keep()
        plan.reduce_later()
        plan.gather_earlier()
    plan.apply(graph)
    start_after_pause(graph)
    graph.lint()
    used = profile(graph).peak
    if fits and used > budget:
        raise VerificationError(f"fit_memory_budget planned for {plan.peak:,} bytes, and its graph holds {used:,}")


@dataclass(eq=False)
class _Flight:
    """An asynchronous collective from its start to its wait.

    Attributes:
        start, wait: its nodes.
        begins: first position at which it holds memory; the start is moved before the node there.
        ends: first position at which it no longer holds memory; the wait is moved before the node there.
        holds: bytes that the flight holds: the result of a gather, the input of a reduction.
        sends: bytes of a cast to the compute dtype, which comes just before a gather.
        bucket: name of the bucket that is gathered, and the SBP that it gets; None for other collectives.
        until: position of the last reader of the gathered bucket.
    """

    start: fx.Node
    wait: fx.Node
    begins: int
    ends: int
    holds: int
    sends: int
    bucket: tuple[str, NdSbp] | None
    until: int


class _Plan:
    """Memory in use at each position, and where each collective starts and ends.

    Attributes:
        budget: bytes.
        nodes: the nodes of the graph, in order.
        position: index of each node.
        held: bytes in use at each position, [nodes].
        gathers: gathers of buckets, in order.
        others: other collectives that hold memory.
        kept: pairs of gathers of one bucket; the second one is dropped.
    """

    def __init__(self, usage: Profile, budget: int) -> None:
        self.budget = budget
        self.nodes = usage.nodes
        self.position = {node: index for index, node in enumerate(usage.nodes)}
        self.held = torch.tensor(usage.bytes, dtype=torch.int64)
        waits = [node for node in usage.nodes if node.target is WAIT]
        # A gather of a tensor from elsewhere keeps its place, which goes with that of the transfer before it.
        flights = [self._flight(node, usage) for node in waits if not _from_elsewhere(node.all_input_nodes[0])]
        self.gathers = sorted(
            (flight for flight in flights if flight.bucket is not None), key=lambda flight: flight.begins
        )
        self.others = [flight for flight in flights if flight.bucket is None and flight.holds]
        self.kept: list[tuple[_Flight, _Flight]] = []

    @property
    def peak(self) -> int:
        """Maximum bytes in use."""
        return int(self.held.max())

    def shrink(self) -> None:
        """Shorten flights that hold memory where too much is in use."""
        for flight in self.others:
            over = self._over(flight.begins + 1, flight.ends, 0)
            if len(over):
                early = flight.begins + 1 + int(over[0])
                self.held[early : flight.ends] -= flight.holds
                flight.ends = early
        for flight in self.gathers:
            over = self._over(flight.begins, self.position[flight.wait], 0)
            if len(over):
                late = flight.begins + int(over[-1]) + 1
                self.held[flight.begins : late] -= flight.holds
                self._move_cast(flight, late)
                flight.begins = late

    def keep(self) -> None:
        """Keep buckets that are gathered twice alive in between, as many as fit."""
        earliest: dict[tuple[str, NdSbp] | None, _Flight] = {}
        twice = [
            (earliest[later.bucket], later)
            for later in self.gathers
            if earliest.setdefault(later.bucket, later) is not later
        ]
        for earlier, later in sorted(twice, key=lambda pair: pair[1].begins - pair[0].until):
            if not len(self._over(earlier.until + 1, later.begins, earlier.holds)):
                self.held[earlier.until + 1 : later.begins] += earlier.holds
                self.kept.append((earlier, later))
                self.gathers.remove(later)

    def reduce_later(self) -> None:
        """Wait for reductions when their result is read, or before their memory exceeds the budget."""
        for flight in self.others:
            read = min((self.position[user] for user in flight.wait.users), default=flight.ends)
            over = self._over(flight.ends, read, flight.holds)
            late = flight.ends + int(over[0]) if len(over) else read
            if late > flight.ends:
                self.held[flight.ends : late] += flight.holds
                flight.ends = late

    def gather_earlier(self) -> None:
        """Start gathers after the wait of an earlier one, or as soon as they fit."""
        for index in range(_MAX_GATHERS, len(self.gathers)):
            flight = self.gathers[index]
            earlier = self.gathers[index - _MAX_GATHERS].wait
            early = max(self.position[node] for node in (earlier, *_needs(flight.start))) + 1
            over = self._over(early, flight.begins, flight.holds + flight.sends)
            if len(over):
                early += int(over[-1]) + 1
            if early < flight.begins:
                self.held[early : flight.begins] += flight.holds
                self._move_cast(flight, early)
                flight.begins = early

    def _move_cast(self, flight: _Flight, new_position: int) -> None:
        """Move the cast or code that a gather sends to where the gather starts."""
        for sent in sent_forms(flight.start)[:1]:
            old_position = self.position[sent] if flight.begins == self.position[flight.start] else flight.begins
            self.held[old_position:new_position] -= flight.sends
            self.held[new_position:old_position] += flight.sends

    def apply(self, graph: fx.Graph) -> None:
        """Change the graph as planned."""
        dropped = {node for _, later in self.kept for node in (later.start, later.wait)}
        moves = [
            (flight.ends, 0, flight.wait) for flight in self.others if flight.ends != self.position[flight.wait] + 1
        ]
        moves += [
            (flight.begins, 1, flight.start) for flight in self.gathers if flight.begins != self.position[flight.start]
        ]
        moving = {node for _, _, node in moves} | {cast for _, _, node in moves for cast in sent_forms(node)}
        # At one position, waits, which free memory, come before starts, which allocate it.
        for place, _, node in sorted(moves, key=lambda move: move[:2]):
            while self.nodes[place] in moving or self.nodes[place] in dropped:
                place += 1
            self.nodes[place].prepend(node)
            for form in reversed(sent_forms(node)):
                node.prepend(form)
        for flight, later in self.kept:
            _join(graph, flight, later)

    def _over(self, start: int, end: int, more: int) -> Tensor:
        """Return the positions, counted from ``start``, up to ``end`` where ``more`` bytes would exceed the budget."""
        return torch.nonzero(self.held[start:end] + more > self.budget).flatten()

    def _flight(self, wait: fx.Node, usage: Profile) -> _Flight:
        start = wait.all_input_nodes[0]
        begins, ends = self.position[start], self.position[wait]
        boxing = boxing_of(start)
        result = usage.of[start][0]
        assert result is not None
        if boxing is not None and result.kind == "gathered":
            sends = sum(storage.bytes for form in sent_forms(start) for storage in usage.of[form] if storage)
            return _Flight(
                start, wait, begins, ends + 1, result.bytes, sends, (boxing.tensor.name, boxing.target), result.dies
            )
        inputs = {
            storage
            for source in start.all_input_nodes
            for storage in usage.of[source]
            if _held_by(storage, begins, ends)
        }
        return _Flight(
            start, wait, begins, ends + 1, sum(storage.bytes for storage in inputs if storage), 0, None, ends
        )


def _needs(start: fx.Node) -> list[fx.Node]:
    """Return the nodes that must run before a gather; casts and codes of the shard move with the gather."""
    return [start, *sent_forms(start)][-1].all_input_nodes[:1]


def _from_elsewhere(start: fx.Node) -> bool:
    """Return whether a gather sends a tensor from a file or another device, perhaps cast or coded."""
    sent = stored_form(start.all_input_nodes[0])
    return any(node.target in (FETCH, TRANSFER) for node in (sent, *sent.all_input_nodes))


def _held_by(storage: Storage | None, begins: int, ends: int) -> bool:
    """Return whether only the flight from ``begins`` to ``ends`` keeps the storage alive that long."""
    return storage is not None and storage.read <= begins and storage.dies == ends


def _join(graph: fx.Graph, first: _Flight, second: _Flight) -> None:
    """Let readers of the second gather read the first one."""
    second.wait.replace_all_uses_with(first.wait)
    stack = [second.wait, second.start, *sent_forms(second.start)]
    for node in stack:
        if node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    _join_views(graph, first.wait)


def _join_views(graph: fx.Graph, source: fx.Node) -> None:
    """Merge equal views of a node."""
    views: dict[str, fx.Node] = {}
    # In the graph's order: the first view precedes all readers.
    for user in sorted(source.users):
        if not is_view(user):
            continue
        view = views.setdefault(f"{user.target} {user.args} {user.kwargs}", user)
        if view is not user:
            replace_node(user, view)
    for first_view in views.values():
        _join_views(graph, first_view)
