"""gather_in_place: gather buckets that live throughout the step into permanent gather buffers that contain their shard.

Gathered into new memory, the shard would be stored twice, and the bucket would be allocated in each step. Into a
gather buffer only the other ranks' pieces are received, and the update writes the shard in place. From then on these
pieces are out of date, and nothing reads them before they are gathered again. A step that follows one without an
update, as in an evaluation, runs without these gathers (see ``runtime.executor``).

The pass depends on the order of the graph, so only ``fit_memory_budget`` comes after it. With a memory budget gathered
buckets are allocated and freed, and this pass does nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph._torch import OpOverload, written_arguments
from zerograph.ir.alias import WAIT
from zerograph.ir.buckets import Bucket
from zerograph.ir.memory import Profile, profile
from zerograph.ir.metadata import Role, meta
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import inputs_by_name
from zerograph.passes.context import Context
from zerograph.passes.edits import add_input

c10d = torch.ops._c10d_functional

# Alignment in bytes of an accelerator's vectorized loads.
_ALIGNMENT = 16


def gather_in_place(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Gather buckets that live throughout the step into gather buffers, if nothing reads them after their update."""
    graph = module.graph
    allowed = context.backend.inputs_may_overlap and context.memory.budget is None
    allocates = allowed and context.policy.split and not context.policy.reshard_after_forward
    shards = inputs_by_name(graph, "bucket")
    buckets = [bucket for bucket in context.buckets if bucket.name in shards]
    gathers = {
        bucket.name: start
        for bucket in buckets
        if allowed and (bucket.storage.gather_buffer or (allocates and _can_share_buffer(bucket)))
        if (start := _gather(shards[bucket.name], bucket)) is not None
    }
    # The profile walks all nodes, so it is skipped if there is nothing to gather.
    usage = profile(graph) if gathers else None
    in_place = {
        name: (start, target)
        for name, start in gathers.items()
        if usage and _ends_before_update(start, usage) and (target := _out_form(start, context)) is not None
    }
    for bucket in buckets:
        # An existing gather buffer takes memory, whether or not this step can use it.
        if bucket.name in in_place or bucket.storage.gather_buffer:
            buffer = _gather_buffer(graph, shards[bucket.name], bucket)
            if bucket.name in in_place:
                _gather_into(*in_place[bucket.name], buffer)
    return module


def _can_share_buffer(bucket: Bucket) -> bool:
    """Return whether the shard is one piece of the bucket, aligned as the device needs it."""
    if bucket.rows is not None or bucket.has_owners or sum(isinstance(sbp, Split) for sbp in bucket.sbp) != 1:
        return False
    piece = bucket.padded // bucket.ranks * bucket.dtype.itemsize
    return bucket.device.type == "cpu" or piece % _ALIGNMENT == 0


def _gather(shard: fx.Node, bucket: Bucket) -> fx.Node | None:
    """Return the only collective that gathers the bucket, if it reads the stored shard itself."""
    gathers = [user for user in shard.users if "boxing" in user.meta and meta(user)["boxing"].kind == "all-gather"]
    if len(gathers) != 1 or gathers[0].args[0] is not shard or gathers[0].meta["val"].shape != bucket.shape:
        return None
    return gathers[0] if [user.target for user in gathers[0].users] == [WAIT] else None


def _ends_before_update(start: fx.Node, usage: Profile) -> bool:
    """Return whether the gathered bucket is read last before the shard is written, and is no output."""
    (shard,) = usage.of[start.all_input_nodes[0]]
    (gathered,) = usage.of[start]
    assert shard is not None
    assert gathered is not None
    first_write = len(usage.nodes) - 1
    for position, node in enumerate(usage.nodes):
        changed = [storage for written in written_arguments(node) for storage in usage.of[written]]
        if gathered in changed:
            return False
        if shard in changed:
            first_write = min(first_write, position)
    return gathered.read < first_write


def _out_form(start: fx.Node, context: Context) -> OpOverload | None:
    """Return the operator that gathers as ``start`` does, into existing memory."""
    if start.target is c10d.all_gather_into_tensor.default:
        out_form: OpOverload = c10d.all_gather_into_tensor_out.default
        return out_form
    if start.target is context.backend.exchanges.get("all-gather"):
        return context.backend.exchanges.get("all-gather into gather buffer")
    return None


def _gather_buffer(graph: fx.Graph, shard: fx.Node, bucket: Bucket) -> fx.Node:
    role, like = Role("gather_buffer", f"{bucket.name}.gather_buffer"), (bucket.shape, bucket.dtype, bucket.device)
    buffer = add_input(graph, role, *like, name=f"{shard.name}_room", sbp=bucket.gathered)
    meta(buffer)["global"] = bucket.shape
    return buffer


def _gather_into(start: fx.Node, target: OpOverload, buffer: fx.Node) -> None:
    shard, ranks, group = start.args
    start.target = target
    if target is c10d.all_gather_into_tensor_out.default:
        start.kwargs = {"out": buffer}
    else:
        start.args = (shard, buffer, ranks, group)
