"""gather_in_place: what lives throughout the step is gathered into memory that stays, and in which its shard rests.

Gathered into new memory, the shard would be there twice, and all of it taken anew in each step. In its *room* only the
other ranks' pieces are received, and the update writes the shard where it lies. Between steps these pieces are out of
date, and nobody reads them before they are gathered again.

It depends on the order of the graph, so it comes last but for ``fit_memory_budget``, which then changes nothing: with a
memory budget gathered buckets come and go.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph._torch import OpOverload, written_arguments
from zerograph.ir.alias import WAIT
from zerograph.ir.buckets import Bucket
from zerograph.ir.memory import Profile, profile
from zerograph.ir.metadata import Role, meta
from zerograph.ir.rewrite import fake
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import placeholders
from zerograph.passes.context import Context

c10d = torch.ops._c10d_functional

# Bytes: where an accelerator's vectors of elements begin.
_ALIGNMENT = 16


def gather_in_place(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No gathered bucket that lives throughout the step takes new memory, where nothing reads it behind its update."""
    graph = module.graph
    fills = context.backend.inputs_may_overlap and context.memory.budget is None
    takes = fills and context.policy.split and not context.policy.reshard_after_forward
    shards = {meta(node)["role"].name: node for node in placeholders(graph, "bucket")}
    buckets = [one for one in context.buckets if one.name in shards]
    gathers = {
        bucket.name: start
        for bucket in buckets
        if fills and (bucket.storage.gather_buffer or (takes and _may_rest_in_room(bucket)))
        if (start := _gather(shards[bucket.name], bucket)) is not None
    }
    # It walks all nodes: not where a stage or a budget leaves nothing to fill.
    held = profile(graph) if gathers else None
    filling = {
        name: (start, target)
        for name, start in gathers.items()
        if held and _ends_before_update(start, held) and (target := _filling(start, context)) is not None
    }
    for bucket in buckets:
        # A room that is there already is held, whether or not this step can use it.
        if bucket.name in filling or bucket.storage.gather_buffer:
            room = _room(graph, shards[bucket.name], bucket)
            if bucket.name in filling:
                _fill(*filling[bucket.name], room)
    return module


def _may_rest_in_room(bucket: Bucket) -> bool:
    """Whether its shard is one piece of it, which starts where the device wants memory to start."""
    if bucket.rows is not None or bucket.dealt or sum(isinstance(one, Split) for one in bucket.sbp) != 1:
        return False
    piece = bucket.padded // bucket.ranks * bucket.dtype.itemsize
    return bucket.device.type == "cpu" or piece % _ALIGNMENT == 0


def _gather(shard: fx.Node, bucket: Bucket) -> fx.Node | None:
    """The one collective that makes the bucket whole, from the shard just as it rests."""
    found = [user for user in shard.users if "boxing" in user.meta and meta(user)["boxing"].kind == "all-gather"]
    if len(found) != 1 or found[0].args[0] is not shard or found[0].meta["val"].shape != bucket.shape:
        return None
    return found[0] if [user.target for user in found[0].users] == [WAIT] else None


def _ends_before_update(start: fx.Node, held: Profile) -> bool:
    """Whether what was gathered is read last before the shard is written, and is not given to the caller."""
    (shard,) = held.of[start.all_input_nodes[0]]
    (gathered,) = held.of[start]
    assert shard is not None
    assert gathered is not None
    first = len(held.nodes) - 1
    for position, node in enumerate(held.nodes):
        changed = [one for written in written_arguments(node) for one in held.of[written]]
        if gathered in changed:
            return False
        if shard in changed:
            first = min(first, position)
    return gathered.read < first


def _filling(start: fx.Node, context: Context) -> OpOverload | None:
    """What gathers into memory that is given, as ``start`` does into new."""
    if start.target is c10d.all_gather_into_tensor.default:
        found: OpOverload = c10d.all_gather_into_tensor_out.default
        return found
    if start.target is context.backend.exchanges.get("all-gather"):
        return context.backend.exchanges.get("all-gather into room")
    return None


def _room(graph: fx.Graph, shard: fx.Node, bucket: Bucket) -> fx.Node:
    with graph.inserting_after(placeholders(graph)[-1]):
        room = graph.placeholder(f"{shard.name}_room")
    meta(room).update(
        {
            "role": Role("gather_buffer", f"{bucket.name}.gather_buffer"),
            "val": fake(graph, bucket.shape, bucket.dtype, bucket.device),
            "sbp": bucket.gathered,
            "global": bucket.shape,
        }
    )
    return room


def _fill(start: fx.Node, target: OpOverload, room: fx.Node) -> None:
    shard, ranks, group = start.args
    start.target = target
    if target is c10d.all_gather_into_tensor_out.default:
        start.kwargs = {"out": room}
    else:
        start.args = (shard, room, ranks, group)
