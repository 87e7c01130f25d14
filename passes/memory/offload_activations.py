"""offload_activations: offload activations of an accelerator to the CPU where forward hides the copies.

An activation is copied to the CPU when it is computed, and its memory is freed after its last reader in forward. It is
copied back one activation before its first reader in backward. Activations of the first layers are stored the longest,
so they are chosen first, as many as can be copied while forward still computes. Time is counted in operations of matrix
products: ``FLOPS_PER_BYTE`` of them for each byte copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.metadata import meta, origin, value
from zerograph.ir.rewrite import emit, emit_like
from zerograph.passes.context import Context
from zerograph.passes.recompute.cost import flops

aten = torch.ops.aten

# Operations that an accelerator computes while a byte crosses PCIe, within a factor of two: an A100 computes about
# 200 Tflop/s in bf16 and copies about 24 GB/s, an H100 500 and 50.
FLOPS_PER_BYTE = 10_000


def offload_activations(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Offload activations to the CPU between forward and backward where forward hides the copy."""
    if not context.memory.offload_activations:
        return module
    graph = module.graph
    usage = profile(graph)
    offloaded = _hidden(sorted(_saved_activations(usage), key=lambda saved: saved.node), usage)
    previous: fx.Node | None = None
    for saved in sorted(offloaded, key=lambda saved: saved.first):
        place = saved.first if previous is None or previous <= saved.last else previous
        previous = _offload(graph, saved, place)
    return module


@dataclass(frozen=True, eq=False)
class _SavedActivation:
    """An activation that forward saves for backward.

    Attributes:
        node: the node that computes it.
        views: its views that forward computes.
        bytes: size of its memory.
        last: the node after which forward does not need it any more.
        readers: nodes of backward that read it or its views.
    """

    node: fx.Node
    views: frozenset[fx.Node]
    bytes: int
    last: fx.Node
    readers: Sequence[fx.Node]

    @property
    def first(self) -> fx.Node:
        """The first reader in backward."""
        return min(self.readers)


def _saved_activations(usage: Profile) -> Iterator[_SavedActivation]:
    nodes: dict[Storage, list[fx.Node]] = {}
    for node in usage.nodes:
        if isinstance(value(node), Tensor) and (storage := usage.of[node][0]) is not None:
            nodes.setdefault(storage, []).append(node)
    for storage, (first, *others) in nodes.items():
        # Inputs, state and tensors of the CPU stay.
        if storage.kind != "activations" or not storage.bytes or value(first).device.type == "cpu":
            continue
        views = frozenset(node for node in others if _in_forward(node))
        users = {user for node in (first, *views) for user in node.users} - views
        ends = {user for start in users for user in start.users if user.target is WAIT}
        readers = [user for user in users if not _in_forward(user)]
        last = max([first, *views, *(user for user in (users | ends) if _in_forward(user))])
        plain = _in_forward(first) and value(first).is_contiguous() and all(map(is_view, views))
        if plain and readers and last < min(readers) and all(user.op != "output" for user in readers):
            yield _SavedActivation(first, views, storage.bytes, last, readers)


def _in_forward(node: fx.Node) -> bool:
    return node.op != "output" and origin(node).phase == "forward"


def _hidden(saved_activations: Sequence[_SavedActivation], usage: Profile) -> list[_SavedActivation]:
    """Return the activations whose copies, one after the other, end before forward does."""
    work = [flops(node) if _in_forward(node) else 0 for node in usage.nodes]
    clock = dict(zip(usage.nodes, itertools.accumulate(work), strict=True))
    end = sum(work)
    link_free, chosen = 0, []
    for saved in saved_activations:
        copied = max(link_free, clock[saved.node]) + saved.bytes * FLOPS_PER_BYTE
        if copied <= end:
            chosen.append(saved)
            link_free = copied
    return chosen


def _offload(graph: fx.Graph, saved: _SavedActivation, place: fx.Node) -> fx.Node:
    """Copy the activation to the CPU, and back before ``place``; return the first node that reads the copy."""
    with graph.inserting_after(saved.node):
        down = emit_like(saved.node, aten._to_copy.default, saved.node, device=torch.device("cpu"))
    with graph.inserting_before(place):
        device = value(saved.node).device
        up = emit(graph, aten._to_copy.default, (down,), origin(place), like=saved.node, device=device)
    copies = {saved.node: up}
    for reader in sorted(saved.readers):
        for source in reader.all_input_nodes:
            if source is saved.node or source in saved.views:
                reader.replace_input_with(source, _view_of_copy(graph, source, copies, saved.first))
    return min(up.users)


def _view_of_copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], place: fx.Node) -> fx.Node:
    """Return the same view of the activation that was copied back."""
    if node not in copies:
        source = node.all_input_nodes[0]
        viewed = _view_of_copy(graph, source, copies, place)
        with graph.inserting_before(place):
            copies[node] = graph.node_copy(node, lambda argument: viewed if argument is source else argument)
        meta(copies[node])["origin"] = origin(place)
    return copies[node]
