"""Error feedback: each code of a gradient or of weights makes up for what earlier codes of the same rank have lacked.

**Gradients.** A rank adds its *residual* to its part of a gradient before this is coded, and keeps the error of the
code as the next residual. So an error is sent later, not lost: the sum of what is sent over the steps is that of the
gradients but for the last residual. A residual has the placement of the tensor that is coded. It is partial: the global
residual is what all ranks together still owe. It is kept in bf16, which rounds an error that is itself a fraction of a
code's step.

With micro-batches that are each reduced, each adds its equal share of the residual, and the errors of all are summed.
Residuals are kept for gradients without the loss scale, so that the scale may change.

**Gathers that send differences.** A rank codes its shard less what all ranks have received of it, which it has too. All
ranks add the decoded differences to the weights of the last gather, so all have the same bits. The master shard stays
exact. Errors do not add up: the next difference is taken from what the ranks really have, so it contains the error of
the last code. What remains is the error of one code, of a difference as large as an update.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zerograph.errors import PlacementError
from zerograph.ir.metadata import Boxing, Origin, Role, TensorRef, meta, origin
from zerograph.ir.rewrite import emit, emit_like, operand
from zerograph.ir.sbp import NdSbp, PartialSum, broadcast, show
from zerograph.ir.step_graph import found_infs, inputs_by_name, nbytes, placeholders
from zerograph.ops import blocks
from zerograph.ops.blocks import Codec
from zerograph.passes.context import Context
from zerograph.passes.edits import add_input, on_device
from zerograph.passes.placement.boxing import boxing

aten = torch.ops.aten
DTYPE = torch.bfloat16
_UPDATE = Origin("update")


def feed_back(node: fx.Node, change: Boxing, codec: Codec, context: Context) -> None:
    """Let a reduction of a bucket's gradient code the gradient and its residual, and write the next residual.

    Args:
        node: the boxing node.
        change: its change of SBP.
        codec: how the parts of the sum are coded.
        context: the context of the passes.
    """
    graph = node.graph
    (gradient,) = node.all_input_nodes
    # Micro-batches add their shares to a partial sum in time.
    shares = context.batch.micro_batches if context.has_time and isinstance(change.source[-1], PartialSum) else 1
    value, bucket = gradient.meta["val"], change.tensor.name
    # This rank's residual is whole in time.
    sbp: NdSbp = (*change.source[:-1], broadcast) if context.has_time else change.source
    entry, name = Role("residual", f"{bucket}.{change.dim}"), f"{bucket}_residual{change.dim}"
    residual = add_input(graph, entry, tuple(value.shape), DTYPE, value.device, name, sbp)
    scale = inputs_by_name(graph, "scaler").get("scale")

    def put(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit_like(gradient, target, *args, **kwargs)

    with graph.inserting_before(node):
        # A sum with fp32 is in fp32, as it is in any case: this saves a copy.
        is_exact = value.dtype is torch.float32 and shares == 1 and scale is None
        share = residual if is_exact else put(aten._to_copy.default, residual, dtype=torch.float32)
        if shares > 1:
            share = put(aten.mul.Tensor, share, 1 / shares)
        if scale is not None:
            share = put(aten.mul.Tensor, share, scale)
        total = put(aten.add.Tensor, gradient, share)
        code = put(blocks.encode, total, *codec.arguments)
        error_dtype = DTYPE if scale is None and shares == 1 else torch.float32
        error = put(blocks.coding_error, total, code, *codec.arguments, error_dtype)
        if scale is not None:
            error = put(aten.div.Tensor, error, scale)
        node.replace_input_with(gradient, total)
        if shares > 1:
            error = _summed_in_time(error, change, context)
    update = context.updates.get(bucket)
    skipped = None if update is None else update.found_inf_of(found_infs(graph))
    # A skipped update has used neither the gradient nor the residual. Whether it is skipped is known at the end.
    with graph.inserting_before(node if skipped is None else graph.output_node()):
        new = error
        if error_dtype is not DTYPE:
            new = emit(graph, aten._to_copy.default, (error,), _UPDATE, like=residual, dtype=DTYPE)
        if skipped is not None:
            device = residual.meta["val"].device
            flag = on_device(emit(graph, aten.ne.Scalar, (skipped, 0), _UPDATE, like=skipped), device, _UPDATE)
            new = emit(graph, aten.where.self, (flag, residual, new), _UPDATE, like=residual)
        emit(graph, aten.copy_.default, (residual, new), _UPDATE, like=residual)


def _summed_in_time(error: fx.Node, change: Boxing, context: Context) -> fx.Node:
    """Emit the sum of the errors of all micro-batches."""
    assert context.time_dim is not None
    target: NdSbp = (*change.source[:-1], broadcast)
    total = emit(error.graph, boxing, (error, show(target)), origin(error), sbp=target)
    tensor = TensorRef("value", f"residual of {change.tensor.name}")
    ranks, held = context.mesh.shape[context.time_dim], nbytes(error.meta["val"])
    meta(total)["boxing"] = Boxing(change.source, target, context.time_dim, ranks, tensor, held, change.phase)
    return total


def receive(node: fx.Node, change: Boxing, context: Context) -> None:
    """Add an input for the weights that all ranks have; ``lower_coded`` reads and writes it.

    Args:
        node: the boxing node that gathers a bucket.
        change: its change of SBP.
        context: the context of the passes.

    Raises:
        PlacementError: gathered weights are freed, or gathered twice.
    """
    if context.policy.reshard_after_forward:
        raise PlacementError(
            "config.precision.wire: gathers with feedback=True send differences from the last gathered weights, which "
            f"stage 3 frees ({change.tensor})\nChoose stage 1 or 2, or a format without feedback for 'gather'."
        )
    bucket = context.bucket(change.tensor.name)
    if len(bucket.zero_dims) > 1:
        raise PlacementError(
            "config.precision.wire: gathers with feedback=True send differences from what all ranks have received. "
            f"With config.zero.shard_dims = {bucket.zero_dims} no single gather reaches all ranks\n"
            "Name one mesh dimension there, or choose a format without feedback for 'gather'."
        )
    graph, received = node.graph, Role("received", f"{change.tensor.name}.received")
    if received.name in inputs_by_name(graph, "received"):
        raise PlacementError(
            f"config.precision.wire: {change.tensor} is gathered twice in a step, which a format with feedback=True "
            "does not allow\nChoose a format without feedback for 'gather'."
        )
    value = node.meta["val"]
    add_input(graph, received, tuple(value.shape), value.dtype, value.device, sbp=change.target)


def received_input(graph: fx.Graph, change: Boxing) -> fx.Node:
    """Return the input that :func:`receive` added."""
    return next(node for node in placeholders(graph, "received") if meta(node)["role"].bucket == change.tensor.name)


def fuse_feedback(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace a sum that only a code and its error read by one operator that returns both."""
    graph = module.graph
    for error in graph.find_nodes(op="call_function", target=blocks.coding_error):
        total, code, (*codec, dtype) = operand(error), operand(error, 1), error.args[2:]
        if set(total.users) == {code, error} and code.args == (total, *codec) and _is_plain_sum(total):
            with graph.inserting_before(code):
                both = emit(graph, blocks.encode_sum, (*total.args, *codec, dtype), origin(code))
                for index, node in enumerate((code, error)):
                    result = emit(graph, operator.getitem, (both, index), origin(node), like=node)
                    result.meta = {**node.meta, "val": result.meta["val"]}
                    node.replace_all_uses_with(result)
            for node in (error, code, total):
                graph.erase_node(node)
    return module


def _is_plain_sum(node: fx.Node) -> bool:
    """Return whether the node adds two tensors of one shape in fp32."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    values = [node.meta["val"], *(meta(one)["val"] for one in node.all_input_nodes)]
    shapes = {tuple(value.shape) for value in values}
    return len(shapes) == 1 and len(values) == 3 and values[0].dtype is values[1].dtype is torch.float32
