"""localize: give every tensor this rank's shape, and replace every boxing node by a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import errors
from zerograph.ir.dims import Size
from zerograph.ir.evaluate import evaluate
from zerograph.ir.memory import computed_bytes
from zerograph.ir.mesh import Mesh, has_slices, index_along, local_shape, local_start, local_start_numbers
from zerograph.ir.metadata import Boxing, boxing_of, has_role, meta, origin
from zerograph.ir.region import local, region_of
from zerograph.ir.rewrite import drop_unused, emit_like, fake, operand, replace_node
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.sizes import sizes_of
from zerograph.ops.attention import BACKWARD, FORWARD, POSITIONS, causal_attention, causal_attention_backward
from zerograph.ops.dispatch import COMBINE, DISPATCH, GATHER_IDS
from zerograph.ops.experts import EXPERT_WEIGHT_GRADIENT, FIRST
from zerograph.ops.random import uniform
from zerograph.passes import rules
from zerograph.passes.accumulation.time_boxing import enter, leave, pack
from zerograph.passes.buckets.coded_updates import CodedUpdate, update_module
from zerograph.passes.buckets.owner_updates import owner_update
from zerograph.passes.context import Context
from zerograph.passes.lower.coded import lower_coded
from zerograph.passes.lower.dispatch import lower_dispatch
from zerograph.passes.lower.inline import inline_region
from zerograph.passes.lower.lowering import Lowering, lower_exact, lower_slices
from zerograph.passes.lower.ring import is_ring, lower_ring
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.shard_embeddings import is_sharded_embedding, own_rows

aten = torch.ops.aten


def localize(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Give values, sizes and updates by owners this rank's shape; replace boxing nodes by collectives."""
    graph = module.graph
    # Nodes whose local value is their global value.
    unchanged: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            _localize_input(node, context, unchanged)
        elif node.target is boxing:
            _lower(graph, node, context)
        elif node.target is pack:
            _pack(graph, node, context)
        elif node.target is local:
            # The region is inlined last: its readers, which each take one output, are localized first.
            _localize_region(node, context)
        elif node.op == "call_function" and is_sharded_embedding(node):
            replace_node(node, own_rows(node, context))
        elif node.op == "call_function":
            _localize_operator(node, context, unchanged)
    for node in graph.find_nodes(op="call_function", target=owner_update):
        _update_own_slots(module, node, context)
    for node in graph.find_nodes(op="call_function", target=local):
        inline_region(graph, node, context)
    drop_unused(graph)
    return module


def _localize_input(node: fx.Node, context: Context, unchanged: set[fx.Node]) -> None:
    value = node.meta["val"]
    meta(node)["global"] = tuple(value.shape)
    if any(isinstance(sbp, Split) for sbp in meta(node)["sbp"]):
        mesh = context.mesh_of_rows if has_role(node, "input") else context.mesh
        shape = local_shape(value.shape, meta(node)["sbp"], mesh)
        node.meta["val"] = fake(node.graph, shape, value.dtype, value.device)
    else:
        unchanged.add(node)


def _mesh(sbp: NdSbp, context: Context) -> Mesh:
    """Return the mesh that splits a tensor which an operator yields: with slices, rows are split along time too."""
    return context.mesh_of_rows if context.has_time and isinstance(sbp[-1], Split) else context.mesh


def _localize_operator(node: fx.Node, context: Context, unchanged: set[fx.Node]) -> None:
    outputs = rules.output_values(node)
    sbps = [meta(node)["sbp"]] if isinstance(node.meta["val"], Tensor) else list(meta(node).get("sbp", ()))
    shapes = [local_shape(value.shape, sbp, _mesh(sbp, context)) for value, sbp in zip(outputs, sbps, strict=True)]
    if isinstance(node.meta["val"], Tensor):
        meta(node)["global"] = tuple(node.meta["val"].shape)
    if node.target in _SIZE_ARGUMENT and shapes[0] != tuple(outputs[0].shape):
        node.update_arg(_SIZE_ARGUMENT[node.target], list(shapes[0]))
    elif node.target is aten.affine_grid_generator.default:
        node.update_arg(1, [shapes[0][0], *rules.arguments(node)["size"][1:]])
    elif node.target in _BATCH_ARGUMENT:
        # Not the first result's: the gradient of a frozen layer's output is left out.
        rows = node.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        node.update_arg(_BATCH_ARGUMENT[node.target], rows)
    elif node.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        _squeeze_global_ones(node)
    elif node.target in (aten.slice.Tensor, aten.narrow.default) and shapes[0] != tuple(outputs[0].shape):
        _bound_slice(node)
    elif node.target in (FORWARD, BACKWARD):
        if is_ring(node):
            lower_ring(node, context)
        else:
            _begin_mask_at_own_queries(node, context)
    elif node.target in FIRST:
        _begin_at_own_group(node, context)
    elif node.target in (DISPATCH, COMBINE, GATHER_IDS):
        lower_dispatch(node, shapes[0], context)
    elif node.target is uniform:
        _draw_own_piece(node, outputs[0].shape, shapes[0], context)
    # A whole tensor that is computed from whole tensors only is the same on all ranks.
    if unchanged.issuperset(node.all_input_nodes) and shapes == [tuple(value.shape) for value in outputs]:
        unchanged.add(node)
        return
    node.meta["val"] = _evaluated(node)
    computed_shapes = [tuple(value.shape) for value in rules.output_values(node)]
    if computed_shapes != shapes:
        raise errors.VerificationError(
            f"{node.target} yields local shapes {computed_shapes} where its SBP {meta(node)['sbp']} says {shapes}: "
            f"its rule is wrong\n{origin(node).line}"
        )


def _begin_mask_at_own_queries(node: fx.Node, context: Context) -> None:
    """Let the causal mask of attention begin at the position of this rank's first query."""
    arguments = rules.arguments(node)
    query = arguments["query"]
    sbp = meta(query)["sbp"]
    if not arguments["is_causal"] or Split(POSITIONS) not in sbp:
        return
    first = local_start_numbers(meta(query)["global"], sbp, context.mesh)[POSITIONS]
    assert first is not None
    names = ["query", "key", "value"]
    if node.target is BACKWARD:
        names = ["grad_out", *names, "out", "logsumexp"]
    node.target = causal_attention if node.target is FORWARD else causal_attention_backward
    tensors = [arguments[name] for name in names]
    node.args, node.kwargs = (*tensors, first.at(context.mesh.position), arguments["scale"]), {}
    meta(node)["rank_arguments"] = {len(tensors): first}


def _begin_at_own_group(node: fx.Node, context: Context) -> None:
    """Let the product of experts begin at this rank's first group of experts."""
    weight = node if node.target is EXPERT_WEIGHT_GRADIENT else rules.arguments(node)["weight"]
    first = local_start_numbers(meta(weight)["global"], meta(weight)["sbp"], context.mesh)[0]
    assert first is not None
    position = FIRST[node.target]
    node.update_arg(position, first.at(context.mesh.position))
    meta(node)["rank_arguments"] = {position: first}


def _evaluated(node: fx.Node) -> Any:
    """Return a node's value on local tensors; a view that has to copy there becomes a reshape.

    The result of a boxing is contiguous, where the global tensor may not be.
    """
    if node.target in (aten.view.default, aten._unsafe_view.default):
        try:
            return evaluate(node)
        except (RuntimeError, ValueError):
            node.target = aten.reshape.default
    return evaluate(node)


def _update_own_slots(module: fx.GraphModule, node: fx.Node, context: Context) -> None:
    """Update in place the slots that this rank owns: state is written, and a whole bucket is gathered first."""
    name = meta(node)["bucket"]
    bucket = context.bucket(name)
    rank, guarded = index_along(context.mesh, bucket.zero_dims), context.guarded
    update = update_module(bucket, context.updates[name], rank, guarded=guarded)
    module.add_submodule(f"update_{name}", update)
    inputs = node.all_input_nodes
    flat = inputs[0]
    with module.graph.inserting_before(node):
        own = module.graph.call_module(f"update_{name}", tuple(inputs))
    own.meta |= {key: flat.meta[key] for key in ("val", "sbp", "global")} | {"origin": origin(node), "bucket": name}
    # The maximum over ranks, so that all ranks predict the same peak.
    meta(own)["temporary"] = (
        update.temporary(flat.meta["val"])
        if isinstance(update, CodedUpdate)
        else max(computed_bytes(program.graph.graph) for program in set(context.updates[name].programs))
    )
    for part in list(node.users):
        for write in list(part.users):
            if write.target is aten.copy_.default and write.args[0] in inputs:
                module.graph.erase_node(write)
        replace_node(part, own)
    module.graph.erase_node(node)


# Position of the argument that is the size of the result.
_SIZE_ARGUMENT: dict[Any, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.diagonal_backward.default: 1,
    aten.unfold_backward.default: 1,
    **{backward: 2 for _, backward in rules.spatial.RESAMPLING},
}

# Position of the argument that is the number of samples.
_BATCH_ARGUMENT: dict[Any, int] = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}


def _squeeze_global_ones(node: fx.Node) -> None:
    """Squeeze only dimensions of global size one: a split dimension may have local size one, and stays."""
    source = operand(node)
    shape: tuple[int, ...] = meta(source)["global"]
    requested = rules.arguments(node).get("dim", list(range(len(shape))))
    dims = [dim % len(shape) for dim in ([requested] if isinstance(requested, int) else requested)] if shape else []
    node.target = aten.squeeze.dims
    node.args, node.kwargs = (source, [dim for dim in dims if shape[dim] == 1]), {}


def _bound_slice(node: fx.Node) -> None:
    """Let a slice that takes all of the split dimension end at its local end.

    A slice of a split tensor either takes all of the split dimension or cuts another one.
    """
    arguments = rules.arguments(node)
    source = operand(node)
    size = source.meta["val"].shape[arguments["dim"]]
    if node.target is aten.slice.Tensor and arguments["end"] is not None and arguments["end"] > size:
        node.update_arg(3, torch.iinfo(torch.int64).max)


def _localize_region(node: fx.Node, context: Context) -> None:
    node.meta["val"] = [
        fake(node.graph, local_shape(output.shape, sbp, _mesh(sbp, context)), output.dtype, output.device)
        for output, sbp in zip(region_of(node).outputs, meta(node)["sbp"], strict=True)
    ]


def _draw_own_piece(node: fx.Node, whole: Sequence[int], shape: Sequence[int], context: Context) -> None:
    """Draw this rank's part of the numbers that one device would draw."""
    sbp = meta(node)["sbp"]
    mesh = _mesh(sbp, context)
    node.update_arg(2, list(shape))
    node.update_arg(3, list(local_start(whole, sbp, mesh)))
    meta(node)["rank_arguments"] = {3: local_start_numbers(whole, sbp, mesh)}
    time = sbp[-1]
    if context.has_time and isinstance(time, Split):
        size = whole[time.dim]
        # The start of rows is a symbol of each micro-batch.
        if isinstance(size, int) or not sizes_of(size).is_rows(size):
            meta(node)["draw_dim"] = time.dim


def _lower(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    change: Boxing = meta(node)["boxing"]
    source = operand(node)
    meta(node)["global"] = tuple(node.meta["val"].shape)
    with graph.inserting_before(node):
        lowering = Lowering(graph, node, context, change)
        if change.dim == context.time_dim and change.source[-1] != change.target[-1]:
            result = _lower_time(lowering, source, change)
        elif change.ranks == 1 or change.source[change.dim] == change.target[change.dim]:
            result = lowering.emit(aten.alias.default, source)
        else:
            before, after = change.source[change.dim], change.target[change.dim]
            if _has_rows(node, source, change, context):
                result = lower_slices(lowering, source, before, after)
            elif change.format:
                result = lower_coded(lowering, source, before, after)
            else:
                result = lower_exact(lowering, source, before, after)
    replace_node(node, result)


def _has_rows(node: fx.Node, source: fx.Node, change: Boxing, context: Context) -> bool:
    """Return whether a change between ranks is of rows of the batch, of which ranks have parts of unequal slices.

    Shards of parameters and gradients are equal. Rows enter loops, or have left one or none. On a mesh with slices
    all that is split is rows.
    """
    mesh, (before, after) = context.mesh_of_rows, (change.source[change.dim], change.target[change.dim])
    if mesh.slices is None:
        return False
    if isinstance(before, Split):
        whole, held = meta(node)["global"][before.dim], source.meta["val"].shape[before.dim]
        return has_slices(whole, held, mesh)
    if context.mesh.slices is not None:
        return isinstance(after, Split)
    entered = (boxing_of(user) for user in node.users)
    return isinstance(after, Split) and any(one is not None and one.dim == context.time_dim for one in entered)


def _lower_time(lower: Lowering, source: fx.Node, change: Boxing) -> fx.Node:
    before, after = change.source[-1], change.target[-1]
    cut = next((sbp.dim for sbp in (before, after) if isinstance(sbp, Split)), None)
    start, size, whole = (None, None, None) if cut is None else _rows(lower, lower.together[cut])
    if isinstance(after, Split):
        part = lower.emit(enter, source, cut, change.ranks, *(() if size is None else (start, size)))
        meta(part)["boxing"] = change
        return lower.contiguous(part)
    result = lower.emit(leave, source, cut, change.ranks, *(() if size is None else (start, whole)))
    meta(result)["boxing"] = change
    return result


def _rows(lower: Lowering, whole: Size) -> tuple[Size | None, Size | None, Size | None]:
    """Return begin and size of a micro-batch's rows, and the rows of all; None for micro-batches that are equal."""
    if isinstance(whole, int) or not sizes_of(whole).is_rows(whole):
        return None, None, None
    place = whole, lower.ranks, lower.change.dim
    return sizes_of(whole).start(*place), sizes_of(whole).part(*place), whole


def _pack(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    source = operand(node)
    meta(node)["global"] = tuple(node.meta["val"].shape)
    with graph.inserting_before(node):
        entry = emit_like(node, aten.unsqueeze.default, source, 0)
        meta(entry)["sbp"] = (*meta(node)["sbp"][:-1], Split(0))
        stacked = emit_like(node, leave, entry, 0, context.batch.micro_batches)
    replace_node(node, stacked)
