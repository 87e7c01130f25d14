"""offload: read tensors from files for the nodes that need them, and write them back after the nodes that change them.

A *turn* is the stretch of the graph in which one bucket needs tensors that are in files: a gather, or an update. While
one turn computes, the tensors of the next one are read and those of the one before are written: three buckets are in
memory.

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
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit, fake
from zerograph.ir.sbp import all_broadcast
from zerograph.ir.step_graph import inputs_by_name, nbytes, placeholders
from zerograph.ops.offload import FETCH, WAIT_TRANSFER, WRITE_BACK
from zerograph.passes.context import Context

_WAITS = (WAIT, WAIT_TRANSFER)


def offload(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Read tensors in files for their bucket's turns only, and write them back, while other buckets compute."""
    graph = module.graph
    turns = sorted(_turns(graph, context), key=lambda turn: turn.first)
    _check_order(turns)
    handle_meta = _make_handles(graph, turns, context)
    if not turns:
        return module
    fetched = [_fetch(graph, turns[0], turns[0].first, handle_meta)]
    writes: list[tuple[fx.Node, Sequence[fx.Node]]] = []
    for index, turn in enumerate(turns):
        if index + 1 < len(turns):
            fetched.append(_fetch(graph, turns[index + 1], turn.first, handle_meta))
        _land(graph, fetched[index], turn.first)
        if turn.writes:
            writes.append((_put_back(graph, turn, fetched[index]), fetched[index]))
    # In the order of the writes: a turn may be within another one. One is written while the next one computes.
    writes.sort(key=lambda write: write[0])
    for (_, values), (later, _) in pairwise(writes):
        _land(graph, values, later.next)
    _land(graph, writes[-1][1] if writes else (), graph.output_node())
    _fetch_early(graph, fetched[0], context)
    return module


@dataclass(frozen=True, eq=False)
class _Turn:
    """Nodes that need tensors in files.

    Attributes:
        users: the nodes, by the placeholder that they read.
        first: the first node that reads any of the tensors.
        last: the last node that reads any of them or one of their views.
        writes: whether the nodes change the tensors.
    """

    users: Mapping[fx.Node, Sequence[fx.Node]]
    first: fx.Node
    last: fx.Node
    writes: bool


def _turns(graph: fx.Graph, context: Context) -> Iterator[_Turn]:
    inputs = inputs_by_name(graph, "bucket", "state")
    for bucket in context.buckets:
        changed = {entry: list(entry.users) for entry in _state(bucket, inputs, context)}
        if bucket.storage.parameters is not None and bucket.name in inputs:
            flat = inputs[bucket.name]
            for user in flat.users:
                if loop_of(user) is not None:
                    # The body of the loop is a graph of its own, and fetches by the handle that is its operand.
                    continue
                if origin(user).phase == "update":
                    changed.setdefault(flat, []).append(user)
                else:
                    # A turn for each gather, in forward and in backward: in between it need not be in memory.
                    yield _turn({flat: [user]}, writes=False)
        if changed:
            yield _turn(changed, writes=True)


def _state(bucket: Bucket, inputs: Mapping[str, fx.Node], context: Context) -> list[fx.Node]:
    update = context.updates.get(bucket.name)
    if bucket.storage.state is None or update is None:
        return []
    entries = (inputs.get(f"{bucket.name}.{name}") for name in update.layouts)
    return [entry for entry in entries if entry is not None and entry.users]


def _turn(users: Mapping[fx.Node, Sequence[fx.Node]], *, writes: bool) -> _Turn:
    direct = [user for readers in users.values() for user in readers]
    return _Turn(users, min(direct), max([*direct, *_later_readers(direct, set(users))]), writes)


def _later_readers(direct: Sequence[fx.Node], sources: set[fx.Node]) -> set[fx.Node]:
    """Return the later readers of the same memory.

    These read views, results of in-place operators, or wait for what the direct readers start.
    """
    shared, readers, stack = set(sources), set[fx.Node](), list(direct)
    while stack:
        node = stack.pop()
        shares = any(argument in shared for argument in shared_arguments(node))
        if shares:
            shared.add(node)
        more = [user for user in node.users if (shares or user.target in _WAITS) and user not in readers]
        readers.update(more)
        stack += [user for user in more if user.target not in _WAITS]
    return readers


def _check_order(turns: Sequence[_Turn]) -> None:
    written: set[fx.Node] = set()
    for turn in turns:
        if not written.isdisjoint(turn.users):
            # The read would have to wait for the write; no pass before this one creates such a graph.
            raise VerificationError(f"offload: {turn.first.format_node()} reads what the update has put back")
        if turn.writes:
            written.update(turn.users)


def _make_handles(graph: fx.Graph, turns: Sequence[_Turn], context: Context) -> dict[fx.Node, dict[str, Any]]:
    """Turn the placeholders into handles; return their metadata for the tensors that are fetched."""
    handle_meta = {}
    handles = dict.fromkeys(handle for turn in turns for handle in turn.users)
    for handle in handles | dict.fromkeys(_fetched_in_bodies(graph, context)):
        handle_meta[handle] = {key: handle.meta[key] for key in ("val", "sbp", "global")}
        handle.meta["val"] = fake(graph, (), torch.int64, torch.device("cpu"))
        meta(handle).update({"sbp": all_broadcast(context.mesh.dims), "global": ()})
    return handle_meta


def _fetched_in_bodies(graph: fx.Graph, context: Context) -> Iterator[fx.Node]:
    in_files = {bucket.name for bucket in context.buckets if bucket.storage.parameters is not None}
    for node in placeholders(graph, "bucket"):
        if meta(node)["role"].name in in_files and any(loop_of(user) is not None for user in node.users):
            yield node


def _fetch(
    graph: fx.Graph, turn: _Turn, place: fx.Node, handle_meta: Mapping[fx.Node, Mapping[str, Any]]
) -> list[fx.Node]:
    """Start reading before ``place``; the nodes of the turn read the fetched tensors."""
    started = []
    for handle, users in turn.users.items():
        value, sbp = handle_meta[handle]["val"], handle_meta[handle]["sbp"]
        with graph.inserting_before(place):
            fetched = emit(graph, FETCH, (handle, list(value.shape), value.dtype), origin(turn.first), sbp=sbp)
        fetched.meta |= handle_meta[handle]
        for user in users:
            user.replace_input_with(handle, fetched)
        started.append(fetched)
    return started


def _put_back(graph: fx.Graph, turn: _Turn, values: Sequence[fx.Node]) -> fx.Node:
    """Start writing after the turn's last node; return the last node that starts a write."""
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
    """Start the first turn's reads, which wait for no other, as early as they do not raise the step's peak."""
    usage = profile(graph)
    limit = usage.peak if context.memory.budget is None else min(usage.peak, context.memory.budget)
    available = limit - sum(nbytes(node.meta["val"]) for node in fetches)
    first, last = map(usage.nodes.index, (placeholders(graph)[-1].next, fetches[0]))
    place = last
    while place > first and usage.bytes[place - 1] <= available:
        place -= 1
    if place < last:
        for node in fetches:
            usage.nodes[place].prepend(node)
