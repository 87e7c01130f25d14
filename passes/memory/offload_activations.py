"""offload_activations: offload activations of an accelerator to the CPU where forward hides the copies.

An activation goes down when it is made, and its memory is free behind its last reader in forward; it comes up one ahead
of its first in backward, as shards do. Those of the first layers wait the longest, so they go first, and as many as the
link can carry while forward still computes: work is counted in matrix products, and the link in those that an
accelerator makes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.metadata import meta, origin, value
from zerograph.ir.rewrite import emit, emit_like
from zerograph.passes.context import Context
from zerograph.passes.recompute.work import flops

aten = torch.ops.aten

# What an accelerator computes in the time in which a byte goes over PCIe, within a factor of two: an A100 makes some
# 200 Tflop/s in bf16 and copies some 24 GB/s, an H100 500 and 50.
FLOPS_PER_BYTE = 10_000


def offload_activations(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Activations whose way to the CPU hides behind forward wait there for backward, if the configuration says so."""
    if not context.memory.offload_activations:
        return module
    graph = module.graph
    found = profile(graph)
    position = {node: index for index, node in enumerate(found.nodes)}
    spilled = _hidden(sorted(_kept(found), key=lambda one: position[one.made]), found, position)
    ahead: fx.Node | None = None
    for one in sorted(spilled, key=lambda one: position[one.first]):
        place = one.first if ahead is None or ahead <= one.last else ahead
        ahead = _spill(graph, one, place)
    return module


@dataclass(frozen=True, eq=False)
class _Kept:
    """An activation that forward keeps for backward.

    Attributes:
        made: the node that makes it; ``views`` are others of its memory that forward makes.
        last: the node behind which forward needs it no longer.
        readers: what reads it or its views in backward; ``first`` is the first of them.
    """

    made: fx.Node
    views: frozenset[fx.Node]
    bytes: int
    last: fx.Node
    readers: Sequence[fx.Node]

    @property
    def first(self) -> fx.Node:
        return min(self.readers)


def _kept(found: Profile) -> Iterator[_Kept]:
    nodes: dict[Storage, list[fx.Node]] = {}
    for node in found.nodes:
        if isinstance(value(node), Tensor) and (storage := found.of[node][0]) is not None:
            nodes.setdefault(storage, []).append(node)
    for storage, (made, *others) in nodes.items():
        # Nothing of the batch, of the state, or of the CPU's.
        if storage.kind != "activations" or not storage.bytes or value(made).device.type == "cpu":
            continue
        views = frozenset(node for node in others if _in_forward(node))
        users = {user for node in (made, *views) for user in node.users} - views
        ends = {user for start in users for user in start.users if user.target is WAIT}
        readers = [user for user in users if not _in_forward(user)]
        last = max([made, *views, *(user for user in (users | ends) if _in_forward(user))])
        plain = _in_forward(made) and value(made).is_contiguous() and all(map(is_view, views))
        if plain and readers and last < min(readers) and all(user.op != "output" for user in readers):
            yield _Kept(made, views, storage.bytes, last, readers)


def _in_forward(node: fx.Node) -> bool:
    return node.op != "output" and origin(node).phase == "forward"


def _hidden(kept: Sequence[_Kept], found: Profile, position: dict[fx.Node, int]) -> list[_Kept]:
    """Those that are down, one after the other, before forward is over."""
    clock = [0]
    for node in found.nodes:
        clock.append(clock[-1] + (flops(node) if _in_forward(node) else 0))
    free, chosen = 0, []
    for one in kept:
        done = max(free, clock[position[one.made] + 1]) + one.bytes * FLOPS_PER_BYTE
        if done <= clock[-1]:
            chosen.append(one)
            free = done
    return chosen


def _spill(graph: fx.Graph, one: _Kept, place: fx.Node) -> fx.Node:
    """Down when it is made, up before ``place``; backward reads what came up, first this node."""
    with graph.inserting_after(one.made):
        down = emit_like(one.made, aten._to_copy.default, one.made, device=torch.device("cpu"))
    with graph.inserting_before(place):
        device = value(one.made).device
        up = emit(graph, aten._to_copy.default, (down,), origin(place), like=one.made, device=device)
    there = {one.made: up}
    for reader in sorted(one.readers):
        for given in reader.all_input_nodes:
            if given is one.made or given in one.views:
                reader.replace_input_with(given, _viewed(graph, given, there, one.first))
    return min(up.users)


def _viewed(graph: fx.Graph, node: fx.Node, there: dict[fx.Node, fx.Node], place: fx.Node) -> fx.Node:
    """The same view of what came up."""
    if node not in there:
        source = node.all_input_nodes[0]
        viewed = _viewed(graph, source, there, place)
        with graph.inserting_before(place):
            there[node] = graph.node_copy(node, lambda given: viewed if given is source else given)
        meta(there[node])["origin"] = origin(place)
    return there[node]
