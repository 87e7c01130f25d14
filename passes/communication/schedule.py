"""schedule: start collectives as early as possible and wait for them as late as memory allows."""

from __future__ import annotations

from collections import deque

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import accumulate, collect
from zerograph.ir.metadata import has_role, meta
from zerograph.ir.rewrite import ancestors, closure
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import gathers_bucket, placeholders, sent_forms, source_bucket
from zerograph.ops import blocks
from zerograph.ops.tree_sum import accumulate_in_tree
from zerograph.passes.communication.pause_before_backward import start_after_pause
from zerograph.passes.context import Context
from zerograph.passes.edits import move_after, move_before

c10d = torch.ops._c10d_functional

# One bucket of gradients is filled while another one is reduced.
_GRADIENT_BUCKETS = 2


def schedule(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Start gathers before their bucket is needed and reductions at once; keep few gradient buckets whole."""
    graph = module.graph
    for target in (blocks.decode, blocks.sum_decoded):
        for node in graph.find_nodes(op="call_function", target=target):
            # The coded form is smaller.
            move_before(node, _first_user(node))
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        if wait.users:
            move_before(wait, _first_user(wait))
    for start in _starts(graph):
        if not _reads_bucket(start) and not (context.policy.reshard_after_forward and _gathers_further(start)):
            _move_after_inputs(start, start.all_input_nodes)
    if not placeholders(graph):
        # A graph of constants gathers and reduces nothing.
        return module
    place = _advance_batch_collectives(graph)
    _prefetch_gathers(graph, place, one_by_one=context.policy.reshard_after_forward)
    if context.policy.split and context.policy.reduce_early:
        _bound_gradient_buckets(graph)
    start_after_pause(graph)
    for target in (accumulate, accumulate_in_tree, collect):
        for node in graph.find_nodes(op="call_function", target=target):
            # A micro-batch's result is freed as soon as it is added, or copied.
            _move_after_inputs(node, node.all_input_nodes)
    return module


def _starts(graph: fx.Graph) -> list[fx.Node]:
    return [wait.all_input_nodes[0] for wait in graph.find_nodes(op="call_function", target=WAIT)]


def _reads_bucket(start: fx.Node) -> bool:
    return source_bucket(start.all_input_nodes[0]) is not None


def _gathers_further(start: fx.Node) -> bool:
    """Return whether a gather reads what a gather along another mesh dimension has made of a bucket."""
    return gathers_bucket(start) and not _reads_bucket(start)


def _advance_batch_collectives(graph: fx.Graph) -> fx.Node:
    """Start collectives that depend on the batch alone at the beginning of the step; return the last moved node.

    These are sums of scalars and lookups of rows. A count of valid tokens, summed where the model reads it, would let
    each rank wait for the slowest in the middle of the step. Rows would wait for all gathers that started before.
    """
    place = placeholders(graph)[-1]
    moved: set[fx.Node] = set()
    for start in _starts(graph):
        looked_up = "looked_up" in start.all_input_nodes[0].meta
        if start.meta["val"].dim() and not looked_up:
            continue
        sources = sorted(ancestors([start]))
        if all(_leads_to_rows(node) if looked_up else _depends_on_batch(node) for node in sources):
            moving = [node for node in (*sources, start) if node.op != "placeholder" and node not in moved]
            place = move_after(moving, place)
            moved.update(moving)
    return place


def _depends_on_batch(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return has_role(node, "input")
    return node.op == "call_function" and "boxing" not in node.meta and node.target is not WAIT


def _leads_to_rows(node: fx.Node) -> bool:
    """Return whether a lookup at the beginning may depend on the node: indices, gathered, and this rank's rows."""
    if node.op == "placeholder":
        return has_role(node, "input", "bucket")
    return node.op == "call_function" and not ("boxing" in node.meta and _reads_bucket(node))


def _prefetch_gathers(graph: fx.Graph, place: fx.Node, *, one_by_one: bool) -> None:
    """Start gathers early, in order, after the node ``place``.

    Args:
        graph: the graph.
        place: the node after which gathers may start.
        one_by_one: start each gather when the one before has arrived, so that one bucket is in use and one on the wire.
            Else all start at once, but those that gather further: gathered buckets are alive at the step's peak anyway.
            A gather whose result is gathered further starts one bucket earlier, so that both overlap computation.
    """
    starts = [start for start in _starts(graph) if _reads_bucket(start) or (one_by_one and _gathers_further(start))]
    gathers = sorted(starts)
    sources: dict[fx.Node, fx.Node] = {}
    for start in gathers:
        if _gathers_further(start) and _reads_bucket(origin := _source_gather(start)):
            # Backward gathers what is here since forward.
            sources.setdefault(origin, start)
    source_of = {start: origin for origin, start in sources.items()}
    previous: fx.Node | None = None
    moved: set[fx.Node] = set()
    for start in (start for start in gathers if start not in sources):
        if (source := source_of.get(start)) is not None:
            place = move_after([*reversed(sent_forms(source)), source], place)
        if previous is not None:
            place = _wait_of(previous) if one_by_one else previous
        forms = _forms_after_wait(start, moved) if _gathers_further(start) else sent_forms(start)
        waits = [] if source is None else [_wait_of(source)]
        place = move_after([*waits, *reversed(forms), start], place)
        moved.update(forms)
        previous = start


def _source_gather(start: fx.Node) -> fx.Node:
    """Return the gather whose result this one gathers further."""
    node = start.all_input_nodes[0]
    while node.target is not WAIT:
        (node,) = node.all_input_nodes
    return node.all_input_nodes[0]


def _forms_after_wait(start: fx.Node, moved: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes between the wait of an earlier gather and the gather that reads its result, last first.

    Those that are in ``moved`` have a place already, before an earlier gather that reads them too.
    """
    forms: list[fx.Node] = []
    node = start.all_input_nodes[0]
    while node.target is not WAIT and node not in moved:
        forms.append(node)
        (node,) = node.all_input_nodes
    return forms


def _bound_gradient_buckets(graph: fx.Graph) -> None:
    """Wait for the oldest reduction before another bucket's first gradient is computed.

    The wait frees the input of the reduction.
    """
    reduced = set(_starts(graph))
    joined = [node for node in graph.nodes if "gradient" in node.meta and not reduced.isdisjoint(node.users)]
    opened = {node: min(_partial_sources(node)) for node in joined}
    starts = {node: next(user for user in node.users if user in reduced) for node in joined}
    events = [(opened[node], 0, node) for node in joined] + [(starts[node], 1, node) for node in joined]
    filling = 0
    in_flight: deque[fx.Node] = deque()
    for _, closing, node in sorted(events, key=lambda event: event[:2]):
        if closing:
            filling -= 1
            in_flight.append(starts[node])
            continue
        while in_flight and filling + len(in_flight) >= _GRADIENT_BUCKETS:
            wait = _wait_of(in_flight.popleft())
            # The wait may be early enough already if a second collective, along another mesh dimension, reads it.
            if opened[node] < wait:
                move_before(wait, opened[node])
        filling += 1


def _partial_sources(joined: fx.Node) -> list[fx.Node]:
    """Return the first partial sums that lead to a bucket's gradient; several for a tied weight."""
    sums = closure([joined], lambda node: filter(_is_partial, node.all_input_nodes))
    return [node for node in sums if not any(map(_is_partial, node.all_input_nodes))]


def _is_partial(node: fx.Node) -> bool:
    return any(isinstance(sbp, PartialSum) for sbp in meta(node).get("sbp", ()))


def _wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if user.target is WAIT)


def _first_user(node: fx.Node) -> fx.Node:
    return min(node.users)


def _move_after_inputs(node: fx.Node, inputs: list[fx.Node]) -> None:
    """Move the node right after the last of its inputs, and after all placeholders."""
    last = max(inputs)
    move_after([node], placeholders(node.graph)[-1] if last.op == "placeholder" else last)
