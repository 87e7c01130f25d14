"""fit_memory_budget: the memory budget is kept, and used up for what costs the wire least time.

Everything here moves a collective's start or wait, or lets a gathered bucket live on, and each of these changes what is
held over one stretch of the graph by the bytes of one bucket. So the profile of the graph is taken once, and every
choice is a sum over a stretch of it. The order of choices is fixed and follows from shapes alone, which are equal on
all ranks:

1. where too much is held, reductions are waited for earlier and gathers start later;
2. gathered buckets live from forward into backward, which saves their second gather: those with the shortest stretch
   between first, the last layers of forward;
3. reductions stay in flight longer, so that backward does not wait for the wire;
4. gathers start earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerograph.errors import VerificationError
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.memory import Memory, MemoryKind, Profile, Storage, profile, show_bytes
from zerograph.ir.memory_budget import Shortage
from zerograph.ir.metadata import boxing_of, meta
from zerograph.ir.offload_operators import FETCH, TRANSFER
from zerograph.ir.step_graph import source_bucket
from zerograph.passes.context import Context

# Gathers on the wire at once, where there is room. One more than needed hides a layer that computes too shortly.
_GATHERS_AHEAD = 3


def fit_memory_budget(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No more is held than the memory budget allows, and what it allows is used to spare and to hide collectives.

    Where the budget cannot be kept the step holds as little as it can, and the output node has a ``shortage``.
    """
    budget = context.memory.budget
    if budget is None:
        return module
    around = profile(module.graph)
    for position, body in around.bodies.items():
        # What the graph around a loop holds meanwhile, its body cannot.
        outside = around.bytes[position] - around.temporary[position]
        _fit(body.nodes[0].graph, budget - outside + sum(one.bytes for one in body.storages if one.given))
    _fit(module.graph, budget)
    memory = profile(module.graph).memory()
    if memory.peak > budget:
        meta(module.graph.output_node())["shortage"] = _shortage(memory, budget, context)
    return module


def _fit(graph: fx.Graph, budget: int) -> None:
    """Keep the budget and use it; where it cannot be kept, hold as little as can be."""
    plan = _Plan(profile(graph), budget)
    plan.shrink()
    fits = plan.peak <= budget
    if fits:
        plan.keep()
        plan.reduce_later()
        plan.gather_earlier()
    plan.apply(graph)
    graph.lint()
    found = profile(graph).peak
    if fits and found > budget:
        raise VerificationError(f"fit planned for {plan.peak:,} bytes, and its graph holds {found:,}")


@dataclass(eq=False)
class _Flight:
    """An asynchronous collective from its start to its wait.

    Attributes:
        begins, ends: the first position at which it holds memory, and the first at which it no longer does: start and
            wait go before the nodes that are there.
        holds: bytes that a flight of that length costs: of a gather its result, of a reduction its input.
        sends: of a gather the bytes of a cast to the compute dtype, which is made just before it.
        bucket: the bucket that it gathers; None for other collectives.
        until: position at which what it gathered is read last.
    """

    start: fx.Node
    wait: fx.Node
    begins: int
    ends: int
    holds: int
    sends: int
    bucket: str | None
    until: int


class _Plan:
    """What is held at each position, and which collectives start and end where."""

    def __init__(self, found: Profile, budget: int) -> None:
        self.budget = budget
        self.nodes = found.nodes
        self.position = {node: index for index, node in enumerate(found.nodes)}
        self.held = torch.tensor(found.bytes, dtype=torch.int64)
        waits = [node for node in found.nodes if node.target is WAIT]
        # What is gathered from elsewhere keeps its place: the transfer before it has its own.
        flights = [self._flight(node, found) for node in waits if not _from_elsewhere(node.all_input_nodes[0])]
        self.gathers = sorted((one for one in flights if one.bucket is not None), key=lambda one: one.begins)
        self.others = [one for one in flights if one.bucket is None and one.holds]
        self.kept: list[tuple[_Flight, _Flight]] = []

    @property
    def peak(self) -> int:
        return int(self.held.max())

    def shrink(self) -> None:
        """Where too much is held, nothing is in flight that need not be."""
        for one in self.others:
            over = self._over(one.begins + 1, one.ends, 0)
            if len(over):
                early = one.begins + 1 + int(over[0])
                self.held[early : one.ends] -= one.holds
                one.ends = early
        for one in self.gathers:
            over = self._over(one.begins, self.position[one.wait], 0)
            if len(over):
                late = one.begins + int(over[-1]) + 1
                self.held[one.begins : late] -= one.holds
                self._move_cast(one, late)
                one.begins = late

    def keep(self) -> None:
        """Buckets that are gathered twice live on in between, as many as there is room for."""
        first: dict[str | None, _Flight] = {}
        twice = [(first[two.bucket], two) for two in self.gathers if first.setdefault(two.bucket, two) is not two]
        for one, two in sorted(twice, key=lambda pair: pair[1].begins - pair[0].until):
            if not len(self._over(one.until + 1, two.begins, one.holds)):
                self.held[one.until + 1 : two.begins] += one.holds
                self.kept.append((one, two))
                self.gathers.remove(two)

    def reduce_later(self) -> None:
        """Reductions are waited for when their result is read, or before there is no room for them."""
        for one in self.others:
            read = min((self.position[user] for user in one.wait.users), default=one.ends)
            over = self._over(one.ends, read, one.holds)
            late = one.ends + int(over[0]) if len(over) else read
            if late > one.ends:
                self.held[one.ends : late] += one.holds
                one.ends = late

    def gather_earlier(self) -> None:
        """Gathers start behind the wait of an earlier one, or as soon as there is room."""
        for index in range(_GATHERS_AHEAD, len(self.gathers)):
            one = self.gathers[index]
            earlier = self.gathers[index - _GATHERS_AHEAD].wait
            early = max(self.position[node] for node in (earlier, *_needs(one.start))) + 1
            over = self._over(early, one.begins, one.holds + one.sends)
            if len(over):
                early += int(over[-1]) + 1
            if early < one.begins:
                self.held[early : one.begins] += one.holds
                self._move_cast(one, early)
                one.begins = early

    def _move_cast(self, one: _Flight, begins: int) -> None:
        """What a gather sends is made where it starts."""
        for cast in _cast(one.start):
            made = self.position[cast] if one.begins == self.position[one.start] else one.begins
            self.held[made:begins] -= one.sends
            self.held[begins:made] += one.sends

    def apply(self, graph: fx.Graph) -> None:
        """Change the graph as planned."""
        gone = {node for _, two in self.kept for node in (two.start, two.wait)}
        moves = [(one.ends, 0, one.wait) for one in self.others if one.ends != self.position[one.wait] + 1]
        moves += [(one.begins, 1, one.start) for one in self.gathers if one.begins != self.position[one.start]]
        moving = {node for _, _, node in moves} | {cast for _, _, node in moves for cast in _cast(node)}
        # What frees memory goes before what takes it.
        for place, _, node in sorted(moves, key=lambda move: move[:2]):
            while self.nodes[place] in moving or self.nodes[place] in gone:
                place += 1
            self.nodes[place].prepend(node)
            for cast in _cast(node):
                node.prepend(cast)
        for one, two in self.kept:
            _join(graph, one, two)

    def _over(self, start: int, end: int, more: int) -> Tensor:
        """Places, counted from ``start``, up to ``end`` where ``more`` bytes would be too many."""
        return torch.nonzero(self.held[start:end] + more > self.budget).flatten()

    def _flight(self, wait: fx.Node, found: Profile) -> _Flight:
        start = wait.all_input_nodes[0]
        begins, ends = self.position[start], self.position[wait]
        boxing = boxing_of(start)
        made = found.of[start][0]
        assert made is not None
        if boxing is not None and made.kind == "gathered":
            sends = sum(one.bytes for cast in _cast(start) for one in found.of[cast] if one is not None)
            return _Flight(start, wait, begins, ends + 1, made.bytes, sends, boxing.tensor.name, made.dies)
        held = {one for given in start.all_input_nodes for one in found.of[given] if _held_by(one, begins, ends)}
        return _Flight(start, wait, begins, ends + 1, sum(one.bytes for one in held if one), 0, None, ends)


def _needs(start: fx.Node) -> list[fx.Node]:
    """What must be there before a gather may start; a cast to the compute dtype goes with it."""
    return [given for cast in _cast(start) for given in cast.all_input_nodes] or start.all_input_nodes[:1]


def _cast(node: fx.Node) -> list[fx.Node]:
    """The cast of a bucket that a gather sends: it goes where the gather goes."""
    sent = node.all_input_nodes[0]
    return [sent] if sent.op != "placeholder" and source_bucket(sent) is not None else []


def _from_elsewhere(start: fx.Node) -> bool:
    """Whether what it sends comes from a file or another device, perhaps cast to the compute dtype."""
    sent = start.all_input_nodes[0]
    return any(node.target in (FETCH, TRANSFER) for node in (sent, *sent.all_input_nodes))


def _held_by(one: Storage | None, begins: int, ends: int) -> bool:
    """Whether nothing but the flight from ``begins`` to ``ends`` keeps it alive so long."""
    return one is not None and one.read <= begins and one.dies == ends


def _join(graph: fx.Graph, one: _Flight, two: _Flight) -> None:
    """Readers of the second gather read the first."""
    two.wait.replace_all_uses_with(one.wait)
    stack = [two.wait, two.start, *two.start.all_input_nodes]
    for node in stack:
        if node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    _join_views(graph, one.wait)


def _join_views(graph: fx.Graph, source: fx.Node) -> None:
    """Equal views of it are one."""
    known: dict[str, fx.Node] = {}
    # In the graph's order: the first is there for all.
    for user in sorted(source.users):
        if not is_view(user):
            continue
        same = known.setdefault(f"{user.target} {user.args} {user.kwargs}", user)
        if same is not user:
            user.replace_all_uses_with(same)
            graph.erase_node(user)
    for view in known.values():
        _join_views(graph, view)


def _shortage(memory: Memory, budget: int, context: Context) -> Shortage:
    where, kinds = memory.where, memory.kinds
    place = f"{memory.node} ({where.phase}{f', {where.module}' if where.module else ''})"
    shown = ", ".join(f"{kind} {show_bytes(count)}" for kind, count in kinds.items())
    return Shortage(
        peak=memory.peak,
        budget=budget,
        activations=kinds.get("activations", 0),
        in_buckets=kinds.get("gathered", 0) + kinds.get("gradients", 0),
        explanation=(
            f"  most is held at {place}: {shown}\n"
            f"  {where.source}   {where.code}\n"
            f"What would help: {'; '.join(_helps(memory, context))}."
        ),
    )


def _helps(least: Memory, context: Context) -> list[str]:
    """What makes less of each kind at the peak, the largest kind first."""
    policy = context.policy

    def count(*kinds: MemoryKind) -> int:
        return sum(least.kinds.get(kind, 0) for kind in kinds)

    found = [
        (count("inputs", "activations"), "activations and inputs", "a smaller batch"),
        (count("activations"), "activations", "more micro-batches (config.set_gradient_accumulation_steps)"),
    ]
    if context.memory.recompute != "auto" and context.updates:
        found.append((count("activations"), "activations", "config.recompute = 'auto', which computes them again"))
    at_rest = count("parameters", "optimizer state"), "parameters and optimizer state"
    if any(bucket.storage.state is None for bucket in context.buckets):
        in_files = "config.offload_optimizer('nvme', ...), which lets it rest in files"
        found.append((count("optimizer state"), "optimizer state", in_files))
    if policy.split:
        found.append((*at_rest, "more ranks, which share them"))
        if not policy.reshard_after_forward:
            found.append((count("gathered"), "gathered parameters", "ZeRO stage 3, which gathers them layer by layer"))
        if not policy.reduce_early:
            found.append((count("gradients"), "gradients", "ZeRO stage 2, which reduces them bucket by bucket"))
        elif any(len(bucket.slots) > 1 for bucket in context.buckets):
            held = count("gathered", "gradients") if policy.reshard_after_forward else count("gradients")
            found.append((held, "buckets at work", "a smaller config.bucket_size"))
    elif context.updates:
        found.append((*at_rest, "ZeRO stage 3 over several ranks, which splits them"))
    return [f"{what} ({kind}: {show_bytes(size)})" for size, kind, what in sorted(found, reverse=True) if size]
