"""schedule: collectives start as soon as they may and are waited for as late as memory allows."""

from __future__ import annotations

from collections import deque

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import accumulate, collect
from zerograph.ir.metadata import meta, role
from zerograph.ir.rewrite import ancestors, move_after, move_before, positions
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import placeholders, source_bucket
from zerograph.passes.context import Context

c10d = torch.ops._c10d_functional

# One bucket of gradients being filled while another is on the wire.
_GRADIENT_BUCKETS = 2


def schedule(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Gathers start before their bucket's turn, reductions as soon as they can; few gradient buckets are whole."""
    graph = module.graph
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        if wait.users:
            move_before(wait, _first_user(wait))
    for start in _starts(graph):
        if not _reads_bucket(start):
            _move_early(start, start.all_input_nodes)
    if not placeholders(graph):
        # Nothing is gathered or reduced of constants.
        return module
    begun = _advance_what_the_batch_tells(graph)
    _prefetch_gathers(graph, begun, one_by_one=context.policy.reshard_after_forward)
    if context.policy.split and context.policy.reduce_early:
        _bound_gradient_buckets(graph)
    for target in (accumulate, collect):
        for node in graph.find_nodes(op="call_function", target=target):
            # What a micro-batch leaves behind is freed as soon as it is added, or copied.
            _move_early(node, node.all_input_nodes)
    return module


def _starts(graph: fx.Graph) -> list[fx.Node]:
    return [wait.all_input_nodes[0] for wait in graph.find_nodes(op="call_function", target=WAIT)]


def _reads_bucket(start: fx.Node) -> bool:
    return source_bucket(start.all_input_nodes[0]) is not None


def _advance_what_the_batch_tells(graph: fx.Graph) -> fx.Node:
    """What follows from the batch alone travels from the step's beginning on: scalars, and rows that were looked up.

    A count of valid tokens, made where the model reads it, would let each rank wait for the slowest in the middle of
    the step; rows would stand behind all the gathers that are on the wire already. Returns the last node of these.
    """
    order = positions(graph)
    place = placeholders(graph)[-1]
    moved: set[fx.Node] = set()
    for start in _starts(graph):
        looked_up = "looked_up" in start.all_input_nodes[0].meta
        if start.meta["val"].dim() and not looked_up:
            continue
        cone = sorted(ancestors([start]), key=order.__getitem__)
        if all(_leads_to_rows(node) if looked_up else _follows_from_batch(node) for node in cone):
            moving = [node for node in (*cone, start) if node.op != "placeholder" and node not in moved]
            place = move_after(moving, place)
            moved.update(moving)
    return place


def _follows_from_batch(node: fx.Node) -> bool:
    if node.op == "placeholder":
        found = role(node)
        return found is not None and found.kind == "input"
    return node.op == "call_function" and "boxing" not in node.meta and node.target is not WAIT


def _leads_to_rows(node: fx.Node) -> bool:
    """Whether a lookup may need it and yet start at once: indices, gathered, and the rows of this rank."""
    if node.op == "placeholder":
        found = role(node)
        return found is not None and found.kind in ("input", "bucket")
    return node.op == "call_function" and not ("boxing" in node.meta and _reads_bucket(node))


def _prefetch_gathers(graph: fx.Graph, begun: fx.Node, *, one_by_one: bool) -> None:
    """All gathers are on the wire from behind ``begun`` on, in order: what they hold is held at the step's peak anyway.

    ``one_by_one``: it is not, so each starts when the one before it has arrived, one in use and one on the wire.
    """
    order = positions(graph)
    gathers = sorted((start for start in _starts(graph) if _reads_bucket(start)), key=order.__getitem__)
    previous: fx.Node | None = None
    for start in gathers:
        if previous is None:
            _move_early(start, [begun])
        else:
            (_wait_of(previous) if one_by_one else previous).append(start)
        cast = start.all_input_nodes[0]
        if cast.op != "placeholder" and cast.next is not start:
            start.prepend(cast)
        previous = start


def _bound_gradient_buckets(graph: fx.Graph) -> None:
    """Before another bucket's first gradient is made, the oldest reduction in flight ends, which frees its input."""
    order = positions(graph)
    reduced = set(_starts(graph))
    joined = [node for node in graph.nodes if "gradient" in node.meta and not reduced.isdisjoint(node.users)]
    opened = {node: min(_partial_sources(node), key=order.__getitem__) for node in joined}
    starts = {node: next(user for user in node.users if user in reduced) for node in joined}
    events = [(order[opened[node]], 0, node) for node in joined] + [(order[starts[node]], 1, node) for node in joined]
    filling = 0
    in_flight: deque[fx.Node] = deque()
    for _, closing, node in sorted(events, key=lambda event: event[:2]):
        if closing:
            filling -= 1
            in_flight.append(starts[node])
            continue
        while in_flight and filling + len(in_flight) >= _GRADIENT_BUCKETS:
            wait = _wait_of(in_flight.popleft())
            # One that a second collective reads, along another mesh dimension, may have come already.
            if order[wait] > order[opened[node]]:
                move_before(wait, opened[node])
        filling += 1


def _partial_sources(joined: fx.Node) -> list[fx.Node]:
    """Where a bucket's gradient begins: the first partial sums on the way to it (several for a tied weight)."""
    found, seen, stack = [], {joined}, [joined]
    while stack:
        node = stack.pop()
        partial = [n for n in node.all_input_nodes if _is_partial(n)]
        if not partial:
            found.append(node)
        stack += [n for n in partial if n not in seen]
        seen.update(partial)
    return found


def _is_partial(node: fx.Node) -> bool:
    return any(isinstance(one, PartialSum) for one in meta(node).get("sbp", ()))


def _wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if user.target is WAIT)


def _first_user(node: fx.Node) -> fx.Node:
    return min(node.users)


def _move_early(node: fx.Node, inputs: list[fx.Node]) -> None:
    """Move the node right after the last of its inputs, and after all placeholders."""
    last = max(inputs)
    move_after([node], placeholders(node.graph)[-1] if last.op == "placeholder" else last)
