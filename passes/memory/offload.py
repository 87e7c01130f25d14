"""offload: what rests in files is fetched for the nodes that need it, and put back behind those that change it.

The stretch of the graph in which one bucket needs what is in files is a *turn*: a gather, or an update. While one turn
computes, what the next one needs is read and what the one before has changed is written: three buckets are in memory.

  fetch 0 ... fetch 1, landed 0, update 0, put back 0,
              fetch 2, landed 1, update 1, put back 1, landed 0,
              fetch 3, landed 2, update 2, put back 2, landed 1, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from zerograph.errors import VerificationError
from zerograph.ir.alias import WAIT, shared_arguments
from zerograph.ir.buckets import Bucket
from zerograph.ir.loop import loop_of
from zerograph.ir.memory import profile
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.offload_operators import FETCH, WAIT_TRANSFER, WRITE_BACK
from zerograph.ir.rewrite import emit, fake, positions
from zerograph.ir.sbp import all_broadcast
from zerograph.ir.step_graph import nbytes, placeholders
from zerograph.passes.context import Context

_WAITS = (WAIT, WAIT_TRANSFER)


def offload(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """What rests in files is in memory for its bucket's turns only, moved while other buckets compute."""
    graph = module.graph
    turns = sorted(_turns(graph, context), key=lambda turn: turn.first)
    _check_order(turns)
    about = _make_handles(graph, turns, context)
    if not turns:
        return module
    fetched = [_fetch(graph, turns[0], turns[0].first, about)]
    leaving: list[tuple[fx.Node, Sequence[fx.Node]]] = []
    for index, turn in enumerate(turns):
        if index + 1 < len(turns):
            fetched.append(_fetch(graph, turns[index + 1], turn.first, about))
        _land(graph, fetched[index], turn.first)
        if turn.writes:
            leaving.append((_put_back(graph, turn, fetched[index]), fetched[index]))
    # In the order in which they leave: a turn may lie within another one's. While the next computes, one is on its way
    # to the disk.
    leaving.sort(key=lambda one: one[0])
    for (_, values), (behind, _) in pairwise(leaving):
        _land(graph, values, behind.next)
    _land(graph, leaving[-1][1] if leaving else (), graph.output_node())
    _fetch_early(graph, fetched[0], context)
    return module


@dataclass(frozen=True, eq=False)
class _Turn:
    """Nodes that need what is in files, by the placeholder that they read it from.

    Attributes:
        first, last: the first that reads any of it, and the last, of it or of one of its views.
        writes: they change it.
    """

    users: Mapping[fx.Node, Sequence[fx.Node]]
    first: fx.Node
    last: fx.Node
    writes: bool


def _turns(graph: fx.Graph, context: Context) -> Iterator[_Turn]:
    inputs = {found.name: node for node in placeholders(graph, "bucket", "state") if (found := role(node))}
    for bucket in context.buckets:
        changed = {entry: list(entry.users) for entry in _state(bucket, inputs, context)}
        if bucket.storage.parameters is not None and bucket.name in inputs:
            flat = inputs[bucket.name]
            for user in flat.users:
                if loop_of(user) is not None:
                    # Its body, a graph by itself, fetches what it gathers by the handle that it is given.
                    continue
                if origin(user).phase == "update":
                    changed.setdefault(flat, []).append(user)
                else:
                    # Gathered for forward and again for backward: in between it need not be in memory.
                    yield _turn({flat: [user]}, writes=False)
        if changed:
            yield _turn(changed, writes=True)


def _state(bucket: Bucket, inputs: Mapping[str, fx.Node], context: Context) -> list[fx.Node]:
    update = context.updates.get(bucket.name)
    if bucket.storage.state is None or update is None:
        return []
    found = (inputs.get(f"{bucket.name}.{name}") for name in update.layouts)
    return [entry for entry in found if entry is not None and entry.users]


def _turn(users: Mapping[fx.Node, Sequence[fx.Node]], *, writes: bool) -> _Turn:
    direct = [user for own in users.values() for user in own]
    return _Turn(users, min(direct), max([*direct, *_later_readers(direct, set(users))]), writes)


def _later_readers(direct: Sequence[fx.Node], sources: set[fx.Node]) -> set[fx.Node]:
    """What reads the same memory behind them: through views, what was written in place, and as the wait of what they
    start."""
    shared, found, stack = set(sources), set[fx.Node](), list(direct)
    while stack:
        node = stack.pop()
        shares = any(given in shared for given in shared_arguments(node))
        if shares:
            shared.add(node)
        more = [user for user in node.users if (shares or user.target in _WAITS) and user not in found]
        found.update(more)
        stack += [user for user in more if user.target not in _WAITS]
    return found


def _check_order(turns: Sequence[_Turn]) -> None:
    written: set[fx.Node] = set()
    for turn in turns:
        if not written.isdisjoint(turn.users):
            # It would have to wait for the disk, and nothing that the passes before make does so.
            raise VerificationError(f"offload: {turn.first.format_node()} reads what the update has put back")
        if turn.writes:
            written.update(turn.users)


def _make_handles(graph: fx.Graph, turns: Sequence[_Turn], context: Context) -> dict[fx.Node, dict[str, Any]]:
    """The placeholders become handles; what they said of themselves, for what is fetched by them."""
    about = {}
    fetched = dict.fromkeys(handle for turn in turns for handle in turn.users)
    for handle in fetched | dict.fromkeys(_fetched_in_bodies(graph, context)):
        about[handle] = {key: handle.meta[key] for key in ("val", "sbp", "global")}
        handle.meta["val"] = fake(graph, (), torch.int64, torch.device("cpu"))
        meta(handle).update({"sbp": all_broadcast(context.mesh.dims), "global": ()})
    return about


def _fetched_in_bodies(graph: fx.Graph, context: Context) -> Iterator[fx.Node]:
    in_files = {bucket.name for bucket in context.buckets if bucket.storage.parameters is not None}
    for node in placeholders(graph, "bucket"):
        if meta(node)["role"].name in in_files and any(loop_of(user) is not None for user in node.users):
            yield node


def _fetch(graph: fx.Graph, turn: _Turn, place: fx.Node, about: Mapping[fx.Node, Mapping[str, Any]]) -> list[fx.Node]:
    """Start reading before ``place``; the turn's nodes read what arrives."""
    started = []
    for handle, users in turn.users.items():
        value, sbp = about[handle]["val"], about[handle]["sbp"]
        with graph.inserting_before(place):
            fetched = emit(graph, FETCH, (handle, list(value.shape), value.dtype), origin(turn.first), sbp=sbp)
        fetched.meta |= about[handle]
        for user in users:
            user.replace_input_with(handle, fetched)
        started.append(fetched)
    return started


def _put_back(graph: fx.Graph, turn: _Turn, values: Sequence[fx.Node]) -> fx.Node:
    """Start writing behind the turn's last node; the last of these starts."""
    node = turn.last
    for handle, value in zip(turn.users, values, strict=True):
        with graph.inserting_after(node):
            node = emit(graph, WRITE_BACK, (handle, value), origin(turn.last))
    return node


def _land(graph: fx.Graph, values: Sequence[fx.Node], place: fx.Node) -> None:
    with graph.inserting_before(place):
        for value in values:
            emit(graph, WAIT_TRANSFER, (value,), origin(place))


def _fetch_early(graph: fx.Graph, fetches: Sequence[fx.Node], context: Context) -> None:
    """The first turn's, which follow on no other, start as soon as their memory does not raise the step's peak."""
    found = profile(graph)
    most = found.peak if context.memory.budget is None else min(found.peak, context.memory.budget)
    room = most - sum(nbytes(node.meta["val"]) for node in fetches)
    order = positions(graph)
    first, last = order[placeholders(graph)[-1]] + 1, order[fetches[0]]
    place = last
    while place > first and found.bytes[place - 1] <= room:
        place -= 1
    if place < last:
        for node in fetches:
            found.nodes[place].prepend(node)
