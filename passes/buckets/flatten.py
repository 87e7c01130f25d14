"""flatten: parameters of one group lie end to end in buckets; their gradients and updates are the buckets'."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.evaluate import evaluate
from zerograph.ir.gradient_edits import Edited, edited_gradients
from zerograph.ir.metadata import Origin, Role, TensorRef, meta, origin, role
from zerograph.ir.precision import is_cast, looks_up_rows
from zerograph.ir.rewrite import drop_unused, emit, fake, first_computed, keywords, positions
from zerograph.ir.sbp import Sbp, Signature, broadcast, show
from zerograph.ir.step_graph import output_nodes, placeholders
from zerograph.passes.buckets.deal import dealt_update
from zerograph.passes.buckets.flat_gradients import FlatGradient, drop_unread_edits, settle_total_norms
from zerograph.passes.context import BucketUpdate, Context
from zerograph.passes.placement.boxing import boxing

aten = torch.ops.aten
_UPDATE = Origin("update")


def flatten(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Parameters are views of bucket inputs, and each bucket's gradient, reduced, updates it in one go."""
    graph = module.graph
    edited = edited_gradients(graph)
    _take_gradients(graph)
    flat = {bucket.name: _bucket_input(graph, bucket) for bucket in context.buckets}
    updated = [bucket for bucket in context.buckets if bucket.name in context.updates]
    gradients = [_flat_gradient(graph, bucket, flat[bucket.name], edited, context) for bucket in updated]
    settle_total_norms(graph, gradients, context.mesh.dims)
    # In the order in which the gradients come: while the last is still on the wire, the others' updates run.
    order = positions(graph)
    for gradient in sorted(gradients, key=lambda gradient: order[gradient.reduced]):
        with graph.inserting_before(graph.output_node()):
            final = _taken_home(graph, gradient.final(graph), gradient.bucket)
        update = _dealt_update if gradient.bucket.one_by_one else _update
        update(graph, gradient.bucket, gradient.flat, final, context.updates[gradient.bucket.name])
    drop_unread_edits(graph)
    named = {found.name: node for node in placeholders(graph, "parameter") if (found := role(node))}
    for bucket in context.buckets:
        _view_parameters(graph, bucket, flat[bucket.name], named)
    drop_unused(graph)
    return module


def _take_gradients(graph: fx.Graph) -> None:
    """Gradients stop being outputs: from here on they feed the update."""
    output = graph.output_node()
    roles: list[Role] = meta(output)["roles"]
    nodes = output_nodes(graph)
    output.args = (tuple(node for node, r in zip(nodes, roles, strict=True) if r.kind != "gradient"),)
    meta(output)["roles"] = [r for r in roles if r.kind != "gradient"]


def _bucket_input(graph: fx.Graph, bucket: Bucket) -> fx.Node:
    return _input(graph, Role("bucket", bucket.name), bucket.shape, bucket.dtype, bucket.storage_device)


def _input(graph: fx.Graph, found: Role, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> fx.Node:
    with graph.inserting_before(first_computed(graph)):
        node = graph.placeholder(found.name.replace(".", "_").replace("[", "_").replace("]", ""))
    meta(node).update({"role": found, "val": fake(graph, shape, dtype, device)})
    return node


def _view_parameters(graph: fx.Graph, bucket: Bucket, flat: fx.Node, named: Mapping[str, fx.Node]) -> None:
    parameters = {slot: named[slot.name] for slot in bucket.slots if slot.name in named}
    # Just before its first use, so that a gathered bucket lives no longer than needed.
    first = {slot: min(node.users) for slot, node in parameters.items() if node.users}
    if first:
        whole = _whole(graph, bucket, flat, min(first.values()))
        for slot, user in first.items():
            with graph.inserting_before(user):
                dim = 0 if bucket.rows is None else 1
                span = slot.offset, slot.offset + slot.numel
                part = emit(graph, aten.slice.Tensor, (whole, dim, *span), origin(user))
                view = _from_rows(graph, part, slot, bucket.rows, origin(user))
            meta(view)["parameter"] = slot.name
            if bucket.compute_dtype is None:
                parameters[slot].replace_all_uses_with(view)
            else:
                _read_copy(parameters[slot], view)
    for parameter in parameters.values():
        graph.erase_node(parameter)


def _read_copy(wide: fx.Node, copy: fx.Node) -> None:
    """What read a parameter, or a view of it, and cast that reads the copy that is cast already."""
    graph, dtype = copy.graph, copy.meta["val"].dtype
    for reader in list(wide.users):
        if is_cast(reader, dtype):
            reader.replace_all_uses_with(copy)
            graph.erase_node(reader)
            continue
        picks = looks_up_rows(reader, wide)
        reader.replace_input_with(wide, copy)
        before, reader.meta["val"] = reader.meta["val"], evaluate(reader)
        if picks:
            _widen(reader, before.dtype)
        else:
            _read_copy(reader, reader)


def _widen(node: fx.Node, dtype: torch.dtype) -> None:
    """Who read the node reads it cast to ``dtype``."""
    readers = list(node.users)
    with node.graph.inserting_before(node.next):
        wide = emit(node.graph, aten._to_copy.default, (node,), origin(node), dtype=dtype)
    for reader in readers:
        reader.replace_input_with(node, wide)


def _from_rows(graph: fx.Graph, part: fx.Node, slot: Slot, rows: int | None, where: Origin) -> fx.Node:
    """The parameter in its own shape, as a view; rows are pieces of its split dimension."""
    if rows is None or slot.split is None:
        return emit(graph, aten.view.default, (part, list(slot.shape)), where)
    piece = [size // rows if dim == slot.split else size for dim, size in enumerate(slot.shape)]
    stacked = emit(graph, aten.view.default, (part, [rows, *piece]), where)
    order = [*range(1, slot.split + 1), 0, *range(slot.split + 1, len(piece) + 1)]
    beside = emit(graph, aten.permute.default, (stacked, order), where)
    return emit(graph, aten.reshape.default, (beside, list(slot.shape)), where)


def _to_rows(graph: fx.Graph, gradient: fx.Node, slot: Slot, rows: int | None, where: Origin) -> fx.Node:
    """A gradient as it lies in its bucket: flat, or one row for each piece of the split dimension."""
    if rows is None or slot.split is None:
        return emit(graph, aten.reshape.default, (gradient, [-1]), where)
    at, shape = slot.split, list(slot.shape)
    apart = emit(graph, aten.view.default, (gradient, [*shape[:at], rows, shape[at] // rows, *shape[at + 1 :]]), where)
    first = emit(graph, aten.permute.default, (apart, [at, *(d for d in range(len(shape) + 1) if d != at)]), where)
    return emit(graph, aten.reshape.default, (first, [rows, slot.numel]), where)


def _whole(graph: fx.Graph, bucket: Bucket, flat: fx.Node, user: fx.Node) -> fx.Node:
    """The bucket as computation sees it: whole. To compute on shards of weights may move fewer bytes in a small batch,
    but it would be another sum in another order, and the stages would no longer agree. (Looking up is no sum: what is
    gathered for nothing else, ``shard_embeddings`` leaves in pieces.)"""
    with graph.inserting_before(user):
        # Before the gather, so that the wire carries the compute dtype; so does the way up from where it rests.
        changed: dict[str, Any] = {} if bucket.compute_dtype is None else {"dtype": bucket.compute_dtype}
        if bucket.storage_device != bucket.device:
            changed["device"] = bucket.device
        if changed:
            flat = emit(graph, aten._to_copy.default, (flat,), origin(user), **changed)
        if bucket.sbp == bucket.gathered:
            return flat
        gather = emit(graph, boxing, (flat, show(bucket.gathered)), origin(user))
    meta(gather)["target_sbp"] = bucket.gathered
    meta(gather)["tensor"] = TensorRef("bucket", bucket.name)
    return gather


def _flat_gradient(
    graph: fx.Graph, bucket: Bucket, flat: fx.Node, edited: Mapping[str, Edited], context: Context
) -> FlatGradient:
    own = [edited[slot.name] for slot in bucket.slots]
    ready = [one.raw for one in own]
    # Over several micro-batches what is reduced is their sum: each one's bucket is added to it, and freed.
    if not context.policy.reduce_early and not context.timed:
        # A norm needs the reduced gradient before backward may have ended for others.
        first = min((norm for one in own for norm in one.norms), default=graph.output_node())
        ready += [one.raw for one in edited.values() if one.raw < first]
    raw = {slot.name: one.raw for slot, one in zip(bucket.slots, own, strict=True)}
    dtype = _reduced_in(bucket, context)
    own_raw = {name: _in_dtype(graph, gradient, dtype) for name, gradient in raw.items()}
    ready = [max(ready), *own_raw.values()]
    return FlatGradient(bucket, flat, _bucket_gradient(graph, bucket, own_raw, ready), own)


def _reduced_in(bucket: Bucket, context: Context) -> torch.dtype:
    """The dtype in which the bucket's gradient travels: what is wider than fp32 stays so."""
    wanted = context.numerics.reduce_dtype or bucket.compute_dtype
    return wanted if wanted is not None and bucket.dtype.itemsize <= torch.float32.itemsize else bucket.dtype


def _in_dtype(graph: fx.Graph, gradient: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The gradient in ``dtype``: as it was made, where autograd then widened it to its parameter's."""
    if gradient.meta["val"].dtype is dtype:
        return gradient
    made = gradient.all_input_nodes[0] if gradient.target is aten._to_copy.default else gradient
    if made.meta["val"].dtype is dtype:
        return made
    where = replace(origin(gradient), phase="backward")
    with graph.inserting_before(first_computed(graph) if gradient.op == "placeholder" else gradient.next):
        return emit(graph, aten._to_copy.default, (gradient,), where, dtype=dtype)


def _bucket_gradient(
    graph: fx.Graph, bucket: Bucket, gradients: Mapping[str, fx.Node], ready: Sequence[fx.Node]
) -> fx.Node:
    """The gradients as the bucket lays its parameters, reduced to its own SBP, right behind the last of ``ready``."""
    last = max(ready)
    backward = replace(origin(last), phase="backward")
    # What is updated by its owner alone is reduced to that, whether or not all ranks keep the parameters.
    target = bucket.split_sbp if bucket.one_by_one else bucket.sbp
    slots = sorted(bucket.slots, key=lambda slot: slot.offset)
    ends = [slot.offset for slot in slots[1:]] + [bucket.padded]
    with graph.inserting_before(first_computed(graph) if last.op == "placeholder" else last.next):
        parts = []
        for index, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            part = _to_rows(graph, gradients[slot.name], slot, bucket.rows, backward)
            gaps = [0 if index else slot.offset, end - slot.offset - slot.numel]
            if any(gaps):
                part = emit(graph, aten.constant_pad_nd.default, (part, gaps, 0.0), backward)
            parts.append(part)
        joined = emit(graph, aten.cat.default, (parts, 0 if bucket.rows is None else 1), backward)
        meta(joined)["gradient"] = bucket.name
        reduced = emit(graph, boxing, (joined, show(target)), backward)
    meta(reduced)["target_sbp"] = target
    if bucket.by_user:
        # No stage decides on it, so what it takes to get there may count in choosing placements.
        meta(reduced)["by_user"] = True
    meta(reduced)["tensor"] = TensorRef("gradient", bucket.name)
    return reduced


def _taken_home(graph: fx.Graph, gradient: fx.Node, bucket: Bucket) -> fx.Node:
    """The gradient where its bucket rests: it is updated there. As it travelled between the ranks, if nothing reads it
    wider."""
    if bucket.storage_device == bucket.device:
        return gradient
    wide = gradient
    if gradient.target is aten._to_copy.default and not gradient.users:
        wide = gradient.all_input_nodes[0]
    down = emit(graph, aten._to_copy.default, (wide,), _UPDATE, device=bucket.storage_device)
    return down if wide is gradient else emit(graph, aten._to_copy.default, (down,), _UPDATE, **keywords(gradient))


def _update(graph: fx.Graph, bucket: Bucket, flat: fx.Node, gradient: fx.Node, update: BucketUpdate) -> None:
    """The update program once over the whole bucket; new values go to the bucket's inputs at the graph's end."""
    program = update.program.first if update.first and update.program.first else update.program.graph
    if update.program.fused is not None:
        with graph.inserting_before(graph.output_node()):
            gradient = emit(graph, aten.alias.default, (gradient,), _UPDATE)
        meta(gradient)["gradient_of"] = bucket.name  # where ``fuse`` finds it
    inputs = {"param": flat, "grad": gradient, **_numbers(graph, update)}
    for name, spec in update.program.state.items():
        shape = () if spec.scalar else bucket.shape
        device = torch.device("cpu") if spec.scalar else bucket.storage_device
        inputs[name] = _input(graph, Role("state", f"{bucket.name}.{name}"), shape, spec.dtype, device)
    copies: dict[fx.Node, fx.Node] = {}
    values = _values_of_update(graph, bucket)
    with graph.inserting_before(graph.output_node()):
        for node in program.graph.nodes:
            if node.op == "placeholder":
                copies[node] = inputs[meta(node)["update_input"]]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = graph.call_function(node.target, args, kwargs)
                meta(copies[node])["origin"] = _UPDATE
                copies[node].meta["val"] = values(copies[node], node.meta.get("val"))
            elif node.op == "output":
                _write_new_state(graph, update, node, copies, inputs)


def _values_of_update(graph: fx.Graph, bucket: Bucket) -> Callable[[fx.Node, Any], Any]:
    """What a value of an elementwise program for one parameter is for the bucket: of its shape, or 0-d."""
    made: dict[tuple[bool, torch.dtype, torch.device], Tensor] = {}

    def value(node: fx.Node, example: Any) -> Any:
        if not isinstance(example, Tensor):
            return evaluate(node)
        kind = example.dim() == 0, example.dtype, example.device
        if kind not in made:
            made[kind] = fake(graph, () if kind[0] else bucket.shape, example.dtype, example.device)
        return made[kind]

    return value


def _dealt_update(graph: fx.Graph, bucket: Bucket, flat: fx.Node, gradient: fx.Node, update: BucketUpdate) -> None:
    """One node for the updates of all parameters: which of them a rank makes is for ``localize`` to say."""
    states = [
        _input(graph, Role("state", f"{bucket.name}.{name}"), (layout.padded,), layout.dtype, layout.storage_device)
        for name, layout in update.layouts.items()
    ]
    numbers = list(_numbers(graph, update).values())
    with graph.inserting_before(graph.output_node()):
        updated = emit(graph, dealt_update, (flat, gradient, numbers, states), _UPDATE)
        meta(updated)["bucket"] = bucket.name
        meta(updated)["signatures"] = tuple(
            _dealt_signature(one, len(numbers), len(states)) for one in bucket.split_sbp
        )
        for index, node in enumerate((flat, *states)):
            new = emit(graph, operator.getitem, (updated, index), _UPDATE)
            emit(graph, aten.copy_.default, (node, new), _UPDATE)


def _dealt_signature(one: Sbp, numbers: int, states: int) -> Signature:
    """Along one mesh dimension: ZeRO's, where the owners are, or another, where all ranks do the same."""
    return Signature((one, one, *[broadcast] * numbers, *[one] * states), (one, *[one] * states))


def _write_new_state(
    graph: fx.Graph, update: BucketUpdate, output: fx.Node, copies: dict[fx.Node, fx.Node], inputs: dict[str, fx.Node]
) -> None:
    """The first update returns the state that it made, in the order of the names."""
    returned = output.args[0]
    assert isinstance(returned, (list, tuple))
    for name, node in zip(update.program.state, returned, strict=False):
        made = copies[node] if isinstance(node, fx.Node) else node
        emit(graph, aten.copy_.default, (inputs[name], made), _UPDATE)


def _numbers(graph: fx.Graph, update: BucketUpdate) -> dict[str, fx.Node]:
    """The hyperparameters that are inputs: 0-d, shared by the buckets of a group."""
    there = {found.name: node for node in placeholders(graph, "hyperparameter") if (found := role(node))}
    return {
        short: there[name]
        if name in there
        else _input(graph, Role("hyperparameter", name), (), torch.float64, torch.device("cpu"))
        for short, name in update.numbers.items()
    }
