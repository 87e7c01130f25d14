"""pack_scalars: copy numbers from the CPU to the accelerator in one transfer that the step does not wait for.

Step counts and rates are 0-d tensors on the CPU. A copy of each from pageable memory makes the step wait for the device
once for each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from zerograph._torch import written_arguments
from zerograph.ir.alias import base_of
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit, emit_like, replace_node
from zerograph.ops.offload import PACK
from zerograph.passes.context import Context

aten = torch.ops.aten


def pack_scalars(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Copy 0-d tensors from the CPU to the accelerator together, from pinned memory."""
    copies = [
        node for node in module.graph.find_nodes(op="call_function", target=aten._to_copy.default) if _is_copy(node)
    ]
    for place, run in list(_runs(module.graph, copies)):
        _pack(run, place)
    return module


def _is_copy(node: fx.Node) -> bool:
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(value.dim() == 0 and source.device.type == "cpu" and value.device.type != "cpu")


def _runs(graph: fx.Graph, copies: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield copies of one dtype that can be one transfer, and the node after which their sources have their values."""
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for argument in written_arguments(node):
            written.setdefault(base_of(argument), []).append(node)
    runs: dict[object, tuple[fx.Node, fx.Node, list[fx.Node]]] = {}
    for copy in copies:
        source = copy.all_input_nodes[0]
        writes = [node for node in written.get(base_of(source), ()) if node < copy]
        ready, read = max([source, *writes]), min(copy.users, default=copy.next)
        key = copy.meta["val"].device, copy.meta["val"].dtype
        place, first_read, run = runs.get(key, (ready, read, []))
        latest = max(place, ready)
        if min(first_read, read) <= latest:
            yield place, run
            latest, first_read, run = ready, read, []
        runs[key] = latest, min(first_read, read), [*run, copy]
    yield from ((place, run) for place, _, run in runs.values())


def _pack(copies: Sequence[fx.Node], place: fx.Node) -> None:
    graph, first = copies[0].graph, copies[0]
    if place.op == "placeholder":
        place = next(node for node in graph.nodes if node.op != "placeholder").prev
    value = first.meta["val"]
    with graph.inserting_after(place):
        sources = [copy.all_input_nodes[0] for copy in copies]
        packed = emit(graph, PACK, (sources, value.dtype, value.device), origin(first), sbp=meta(first)["sbp"])
    place = packed
    for index, copy in enumerate(copies):
        with graph.inserting_after(place):
            place = emit_like(copy, aten.select.int, packed, 0, index)
        replace_node(copy, place)
