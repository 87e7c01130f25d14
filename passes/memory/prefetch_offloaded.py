"""prefetch_offloaded: copy offloaded shards between CPU and device while the device computes.

A shard is copied to the device while the one before it is gathered. The shard of a gradient is copied to the CPU when
it is reduced, where the update waits for it; so gradients leave bucket by bucket while backward still runs. Activations
that come back keep their place (``offload_activations``).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import emit, emit_like, replace_node
from zerograph.ir.step_graph import placeholders, source_bucket
from zerograph.ops.offload import TRANSFER, WAIT_TRANSFER
from zerograph.passes.context import Context

aten = torch.ops.aten


def prefetch_offloaded(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Start copies between devices early, shards one before their gather, and wait for them when they are read."""
    graph = module.graph
    previous: fx.Node | None = None
    for copy in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if not _crosses(copy):
            continue
        if source_bucket(copy) is not None:
            previous = _start(copy, copy if previous is None else previous)
            continue
        source = copy.all_input_nodes[0]
        if source.target is TRANSFER:
            _start(copy, copy)
        else:
            _start(copy, placeholders(graph)[-1].next if source.op == "placeholder" else source.next)
    return module


def _crosses(node: fx.Node) -> bool:
    """Return whether the node copies more than a number to another device."""
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return isinstance(value, Tensor) and bool(value.dim()) and value.device != source.device


def _start(copy: fx.Node, place: fx.Node) -> fx.Node:
    """Start the copy before ``place`` and wait for it before its first reader; return the wait."""
    graph, value = copy.graph, copy.meta["val"]
    first = min(copy.users)
    with graph.inserting_before(place):
        started = emit_like(copy, TRANSFER, copy.all_input_nodes[0], value.dtype, value.device)
    with graph.inserting_before(first):
        landed = emit(graph, WAIT_TRANSFER, (started,), origin(copy))
    replace_node(copy, started)
    return landed
