"""flatten: concatenate the parameters of a group into buckets, with one gradient and one update per bucket."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.errors import PlacementError
from zerograph.ir.buckets import Bucket
from zerograph.ir.evaluate import evaluate
from zerograph.ir.gradient_edits import Edited, edited_gradients
from zerograph.ir.metadata import Origin, Role, TensorRef, meta, origin
from zerograph.ir.precision import is_cast, looks_up_rows
from zerograph.ir.rewrite import drop_unused, emit, fake, first_computed, keywords, replace_node
from zerograph.ir.sbp import Sbp, Signature, broadcast
from zerograph.ir.slots import Slot, row_views
from zerograph.ir.step_graph import inputs_by_name, output_nodes, placeholders
from zerograph.passes.buckets.flat_gradients import FlatGradient, compute_total_norms, drop_unread_edits
from zerograph.passes.buckets.owner_updates import owner_update
from zerograph.passes.context import BucketUpdate, Context
from zerograph.passes.edits import add_input, on_device
from zerograph.passes.placement.boxing import emit_boxing

aten = torch.ops.aten
_UPDATE = Origin("update")


def flatten(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Make parameters views of buckets; reduce one flat gradient per bucket, which updates it in one call.

    A graph that accumulates returns the flat gradients instead, after its outputs; another graph updates by their sums.
    """
    graph = module.graph
    edited = edited_gradients(graph)
    _drop_gradient_outputs(graph)
    flat = {bucket.name: _input_like(graph, Role("bucket", bucket.name), bucket) for bucket in context.buckets}
    updated = [bucket for bucket in context.buckets if bucket.name in context.updates]
    from_sums = context.gradients in ("accumulated", "edit")
    sums = {bucket.name: _input_like(graph, _sum_role(bucket), bucket) for bucket in updated} if from_sums else {}
    gradients = [
        _accumulated_gradient(graph, bucket, flat[bucket.name], sums[bucket.name], edited)
        if from_sums
        else _flat_gradient(graph, bucket, flat[bucket.name], edited, context)
        for bucket in updated
    ]
    compute_total_norms(graph, gradients, context.mesh.dims, in_blocks=context.batch.slices is not None)
    # In the order of the reductions: updates run while the last gradient is still being reduced.
    for gradient in sorted(gradients, key=lambda gradient: gradient.reduced):
        with graph.inserting_before(graph.output_node()):
            final = _moved_home(graph, gradient.final(graph), gradient.bucket)
        bucket, update = gradient.bucket, context.updates[gradient.bucket.name]
        if context.gradients in ("accumulate", "unreduced"):
            _return_gradient(graph, bucket, final)
            continue
        if context.gradients == "edit":
            with graph.inserting_before(graph.output_node()):
                emit(graph, aten.copy_.default, (sums[bucket.name], final), _UPDATE)
            continue
        emit_update = _emit_owner_update if bucket.one_by_one or update.program.is_coded else _emit_update
        emit_update(graph, bucket, gradient.flat, final, update)
        _add_unused_state(graph, bucket, update)
    drop_unread_edits(graph)
    named = inputs_by_name(graph, "parameter")
    for bucket in context.buckets:
        _view_parameters(graph, bucket, flat[bucket.name], named)
    for node in placeholders(graph, "gradient"):
        graph.erase_node(node)
    drop_unused(graph)
    return module


def _drop_gradient_outputs(graph: fx.Graph) -> None:
    """Remove gradients from the outputs: from here on they feed the update."""
    output = graph.output_node()
    roles: list[Role] = meta(output)["roles"]
    nodes = output_nodes(graph)
    output.args = (tuple(node for node, r in zip(nodes, roles, strict=True) if r.kind != "gradient"),)
    meta(output)["roles"] = [r for r in roles if r.kind != "gradient"]


def _sum_role(bucket: Bucket) -> Role:
    return Role("accumulated", f"{bucket.name}.accumulated_gradient")


def _return_gradient(graph: fx.Graph, bucket: Bucket, gradient: fx.Node) -> None:
    """Add the bucket's gradient to what the graph returns."""
    output = graph.output_node()
    output.args = ((*output_nodes(graph), gradient),)
    meta(output)["roles"] = [*meta(output)["roles"], _sum_role(bucket)]


def _input_like(graph: fx.Graph, input_role: Role, layout: Bucket) -> fx.Node:
    return add_input(graph, input_role, layout.shape, layout.dtype, layout.storage_device)


def _add_unused_state(graph: fx.Graph, bucket: Bucket, update: BucketUpdate) -> None:
    """Add an input for each entry of the state that the update does not read: it takes memory."""
    if bucket.storage.state is None:
        for name, layout in update.unused.items():
            _input_like(graph, Role("state", f"{bucket.name}.{name}"), layout)
    for name, dtype in update.unused_counts.items():
        add_input(graph, Role("state", f"{bucket.name}.{name}"), (), dtype, torch.device("cpu"))


def _view_parameters(graph: fx.Graph, bucket: Bucket, flat: fx.Node, named: Mapping[str, fx.Node]) -> None:
    parameters = {slot: named[slot.name] for slot in bucket.slots if slot.name in named}
    # Gather just before the first use, so that a gathered bucket lives no longer than needed.
    first = {slot: min(node.users) for slot, node in parameters.items() if node.users}
    if first:
        whole = _gathered(graph, bucket, flat, min(first.values()))
        for slot, user in first.items():
            with graph.inserting_before(user):
                dim = 0 if bucket.rows is None else 1
                span = slot.offset, slot.offset + slot.numel
                part = emit(graph, aten.slice.Tensor, (whole, dim, *span), origin(user))
                view = _from_rows(graph, part, slot, origin(user))
            meta(view)["parameter"] = slot.name
            if bucket.compute_dtype is None:
                parameters[slot].replace_all_uses_with(view)
            else:
                _read_copy(parameters[slot], view)
    for parameter in parameters.values():
        graph.erase_node(parameter)


def _read_copy(wide: fx.Node, copy: fx.Node) -> None:
    """Let readers of a parameter, or of a view of it, read the copy that is cast already."""
    dtype = copy.meta["val"].dtype
    for reader in list(wide.users):
        if is_cast(reader, dtype):
            replace_node(reader, copy)
            continue
        picks = looks_up_rows(reader, wide)
        reader.replace_input_with(wide, copy)
        before, reader.meta["val"] = reader.meta["val"], evaluate(reader)
        if picks:
            _cast_for_users(reader, before.dtype)
        else:
            _read_copy(reader, reader)


def _cast_for_users(node: fx.Node, dtype: torch.dtype) -> None:
    """Insert a cast to ``dtype`` between the node and its users."""
    readers = list(node.users)
    with node.graph.inserting_before(node.next):
        wide = emit(node.graph, aten._to_copy.default, (node,), origin(node), dtype=dtype)
    for reader in readers:
        reader.replace_input_with(node, wide)


def _from_rows(graph: fx.Graph, part: fx.Node, slot: Slot, new_origin: Origin) -> fx.Node:
    """Emit the parameter in its own shape, as a view; each row of the bucket has a piece of it."""
    if not slot.split:
        return emit(graph, aten.view.default, (part, list(slot.shape)), new_origin)
    shape, order, back = row_views(slot)
    stacked = emit(graph, aten.view.default, (part, [shape[dim] for dim in order]), new_origin)
    ordered = emit(graph, aten.permute.default, (stacked, back), new_origin)
    return emit(graph, aten.reshape.default, (ordered, list(slot.shape)), new_origin)


def _to_rows(graph: fx.Graph, gradient: fx.Node, slot: Slot, new_origin: Origin) -> fx.Node:
    """Emit a gradient in its bucket's layout: flat, or one row for each piece."""
    if not slot.split:
        return emit(graph, aten.reshape.default, (gradient, [-1]), new_origin)
    shape, order, _ = row_views(slot)
    pieces = emit(graph, aten.view.default, (gradient, shape), new_origin)
    ordered = emit(graph, aten.permute.default, (pieces, order), new_origin)
    rows = math.prod(parts for _, parts in slot.split)
    return emit(graph, aten.reshape.default, (ordered, [rows, slot.numel]), new_origin)


def _gathered(graph: fx.Graph, bucket: Bucket, flat: fx.Node, user: fx.Node) -> fx.Node:
    """Emit the gathered bucket.

    Computing on shards of weights may send fewer bytes in a small batch. But it would add in another order, and the
    stages would no longer agree. (A lookup adds nothing: ``shard_embeddings`` keeps tables that are only looked up in
    shards.)
    """
    with graph.inserting_before(user):
        # The cast comes before the gather and the copy to the device, so that both move the compute dtype.
        changed: dict[str, Any] = {} if bucket.compute_dtype is None else {"dtype": bucket.compute_dtype}
        if bucket.storage_device != bucket.device:
            changed["device"] = bucket.device
        if changed:
            flat = emit(graph, aten._to_copy.default, (flat,), origin(user), **changed)
        if bucket.sbp == bucket.gathered:
            return flat
        return emit_boxing(graph, flat, bucket.gathered, TensorRef("bucket", bucket.name), origin(user))


def _flat_gradient(
    graph: fx.Graph, bucket: Bucket, flat: fx.Node, edited: Mapping[str, Edited], context: Context
) -> FlatGradient:
    bucket_edits = [edited[slot.name] for slot in bucket.slots]
    raw = {slot.name: edit.raw for slot, edit in zip(bucket.slots, bucket_edits, strict=True)}
    dtype = _reduce_dtype(bucket, context)
    own_raw = {name: _as_dtype(graph, gradient, dtype) for name, gradient in raw.items()}
    ready = [*(edit.raw for edit in bucket_edits), *own_raw.values()]
    reduces = context.gradients != "unreduced"
    return FlatGradient(bucket, flat, _bucket_gradient(graph, bucket, own_raw, ready, reduces=reduces), bucket_edits)


def _accumulated_gradient(
    graph: fx.Graph, bucket: Bucket, flat: fx.Node, total: fx.Node, edited: Mapping[str, Edited]
) -> FlatGradient:
    """Return the gradient that earlier graphs have accumulated for the bucket.

    Raises:
        PlacementError: the gradient of a parameter is edited as a whole, which the sum of a bucket does not allow.
    """
    edits = [edited[slot.name] for slot in bucket.slots]
    with graph.inserting_before(first_computed(graph)):
        total = on_device(total, bucket.device, _UPDATE)
    inputs = inputs_by_name(graph, "gradient")
    if all(edit.raw is inputs[slot.name] for slot, edit in zip(bucket.slots, edits, strict=True)):
        return FlatGradient(bucket, flat, total, edits)
    raise PlacementError(
        "a gradient is edited after several calls of backward() in a way that is not the same for every element\n"
        "Clip by torch.nn.utils.clip_grad_norm_() or clip_grad_value_(), or call backward() once for each step."
    )


def _reduce_dtype(bucket: Bucket, context: Context) -> torch.dtype:
    """Return the dtype in which the bucket's gradient is reduced. Dtypes wider than fp32 stay."""
    wanted = context.numerics.reduce_dtype or bucket.compute_dtype
    return wanted if wanted is not None and bucket.dtype.itemsize <= torch.float32.itemsize else bucket.dtype


def _as_dtype(graph: fx.Graph, gradient: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the gradient in ``dtype``. If autograd only widened it to its parameter's dtype, the cast is left out."""
    if gradient.meta["val"].dtype is dtype:
        return gradient
    original = gradient.all_input_nodes[0] if gradient.target is aten._to_copy.default else gradient
    if original.meta["val"].dtype is dtype:
        return original
    backward = replace(origin(gradient), phase="backward")
    with graph.inserting_before(first_computed(graph) if gradient.op == "placeholder" else gradient.next):
        return emit(graph, aten._to_copy.default, (gradient,), backward, dtype=dtype)


def _bucket_gradient(
    graph: fx.Graph, bucket: Bucket, gradients: Mapping[str, fx.Node], ready: Sequence[fx.Node], *, reduces: bool
) -> fx.Node:
    """Emit the gradients in the bucket's layout, reduced to its SBP or not, right after the last node of ``ready``."""
    last = max(ready)
    backward = replace(origin(last), phase="backward")
    slots = sorted(bucket.slots, key=lambda slot: slot.offset)
    ends = [slot.offset for slot in slots[1:]] + [bucket.padded]
    with graph.inserting_before(first_computed(graph) if last.op == "placeholder" else last.next):
        parts = []
        for index, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            part = _to_rows(graph, gradients[slot.name], slot, backward)
            gaps = [0 if index else slot.offset, end - slot.offset - slot.numel]
            if any(gaps):
                part = emit(graph, aten.constant_pad_nd.default, (part, gaps, 0.0), backward)
            parts.append(part)
        joined = emit(graph, aten.cat.default, (parts, 0 if bucket.rows is None else 1), backward)
        meta(joined)["gradient"] = bucket.name
        if not reduces:
            return joined
        reduced = emit_boxing(graph, joined, bucket.gradient_sbp, TensorRef("gradient", bucket.name), backward)
    if bucket.by_user:
        # No stage decides this boxing, so placement may count its cost.
        meta(reduced)["by_user"] = True
    return reduced


def _moved_home(graph: fx.Graph, gradient: fx.Node, bucket: Bucket) -> fx.Node:
    """Emit the gradient on the device that stores its bucket, where it is updated.

    A cast from the dtype of the reduction is part of the copy: the accelerator casts. The link has time for the wider
    dtype, as the update takes longer; the CPU has not.
    """
    if bucket.storage_device == bucket.device:
        return gradient
    options: dict[str, Any] = {"device": bucket.storage_device}
    if gradient.target is aten._to_copy.default and not gradient.users:
        options |= keywords(gradient)
        gradient = gradient.all_input_nodes[0]
    return emit(graph, aten._to_copy.default, (gradient,), _UPDATE, **options)


def _emit_update(graph: fx.Graph, bucket: Bucket, flat: fx.Node, gradient: fx.Node, update: BucketUpdate) -> None:
    """Emit the update program once over the whole bucket; new values are written to the bucket's inputs at the end."""
    program = update.program.first if update.first and update.program.first else update.program.graph
    if update.program.fused is not None:
        with graph.inserting_before(graph.output_node()):
            gradient = emit(graph, aten.alias.default, (gradient,), _UPDATE)
        meta(gradient)["gradient_of"] = bucket.name  # read by ``fuse``
    inputs = {"param": flat, "grad": gradient, **_numbers(graph, update)}
    inputs |= {name: _state_input(graph, bucket, name, update) for name in update.program.state}
    copies: dict[fx.Node, fx.Node] = {}
    values = _update_values(graph, bucket)
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
                # The first update returns its state, in the order of the names.
                for name, new in zip(update.program.state, output_nodes(program.graph), strict=False):
                    emit(graph, aten.copy_.default, (inputs[name], copies[new]), _UPDATE)


def _update_values(graph: fx.Graph, bucket: Bucket) -> Callable[[fx.Node, Any], Any]:
    """Return a function that gives fake values of the bucket's update.

    Each value of a program for one parameter becomes one of the bucket's shape, or stays 0-d.
    """
    values: dict[tuple[bool, torch.dtype, torch.device], Tensor] = {}

    def value(node: fx.Node, example: Any) -> Any:
        if not isinstance(example, Tensor):
            return evaluate(node)
        kind = example.dim() == 0, example.dtype, example.device
        if kind not in values:
            values[kind] = fake(graph, () if kind[0] else bucket.shape, example.dtype, example.device)
        return values[kind]

    return value


def _emit_owner_update(graph: fx.Graph, bucket: Bucket, flat: fx.Node, gradient: fx.Node, update: BucketUpdate) -> None:
    """Emit one node for the updates of all parameters; ``localize`` selects those of each rank."""
    states = [_state_input(graph, bucket, name, update) for name in update.program.state]
    numbers = list(_numbers(graph, update).values())
    with graph.inserting_before(graph.output_node()):
        updated = emit(graph, owner_update, (flat, gradient, numbers, states), _UPDATE)
        meta(updated)["bucket"] = bucket.name
        meta(updated)["signatures"] = tuple(
            _owner_signature(sbp, len(numbers), [sbp if state.meta["val"].dim() else broadcast for state in states])
            for sbp in bucket.gradient_sbp
        )
        for index, node in enumerate((flat, *states)):
            new = emit(graph, operator.getitem, (updated, index), _UPDATE)
            emit(graph, aten.copy_.default, (node, new), _UPDATE)


def _state_input(graph: fx.Graph, bucket: Bucket, name: str, update: BucketUpdate) -> fx.Node:
    """Add an input for an entry of the state as it is stored."""
    layout, spec = update.layouts.get(name), update.program.state[name]
    entry = Role("state", f"{bucket.name}.{name}")
    if layout is None:
        return add_input(graph, entry, (), spec.dtype, torch.device("cpu"))
    return _input_like(graph, entry, layout)


def _owner_signature(sbp: Sbp, numbers: int, states: Sequence[Sbp]) -> Signature:
    """Return the signature along one mesh dimension: the bucket and its gradient have the SBP ``sbp``."""
    return Signature((sbp, sbp, *[broadcast] * numbers, *states), (sbp, *states))


def _numbers(graph: fx.Graph, update: BucketUpdate) -> dict[str, fx.Node]:
    """Return the inputs of hyperparameters, 0-d and shared by the buckets of a group."""
    existing = inputs_by_name(graph, "hyperparameter")
    return {
        short: existing[name]
        if name in existing
        else add_input(graph, Role("hyperparameter", name), (), torch.float64, torch.device("cpu"))
        for short, name in update.numbers.items()
    }
