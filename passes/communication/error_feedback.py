"""Error feedback: each code of a gradient makes up for what earlier codes of the same rank have lacked.

A rank adds its *residual* to its part of a gradient before this is coded, and keeps the error of the code as the next
residual. So an error is sent later, not lost: the sum of what is sent over the steps is that of the gradients but for
the last residual. A residual has the placement of the tensor that is coded. It is partial: the global residual is what
all ranks together still owe. It is kept in bf16, which rounds an error that is itself a fraction of a code's step.

With micro-batches that are each reduced, each adds its equal share of the residual, and the errors of all are summed.
Residuals are kept for gradients without the loss scale, so that the scale may change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerograph.ir.metadata import Boxing, Origin, Role, TensorRef, meta, origin
from zerograph.ir.rewrite import emit, emit_like, fake, first_computed
from zerograph.ir.sbp import NdSbp, PartialSum, broadcast, show
from zerograph.ir.step_graph import found_infs, nbytes, placeholders
from zerograph.ops import blocks
from zerograph.ops.blocks import Codec
from zerograph.passes.context import Context
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
    residual = _residual_input(gradient, change, context)
    scale = next((one for one in placeholders(graph, "scaler") if meta(one)["role"].name == "scale"), None)

    def put(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit_like(gradient, target, *args, **kwargs)

    with graph.inserting_before(node):
        # A sum with fp32 is in fp32, as it is in any case: this saves a copy.
        is_exact = gradient.meta["val"].dtype is torch.float32 and shares == 1 and scale is None
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
    bucket = change.tensor.name
    update = context.updates.get(bucket)
    skipped = None if update is None else update.found_inf_of(found_infs(graph))
    # A skipped update has used neither the gradient nor the residual. Whether it is skipped is known at the end.
    with graph.inserting_before(node if skipped is None else graph.output_node()):
        new = error
        if error_dtype is not DTYPE:
            new = emit(graph, aten._to_copy.default, (error,), _UPDATE, like=residual, dtype=DTYPE)
        if skipped is not None:
            device = residual.meta["val"].device
            flag = emit(graph, aten.ne.Scalar, (skipped, 0), _UPDATE, like=skipped)
            if flag.meta["val"].device != device:
                flag = emit(graph, aten._to_copy.default, (flag,), _UPDATE, like=flag, device=device)
            new = emit(graph, aten.where.self, (flag, residual, new), _UPDATE, like=residual)
        emit(graph, aten.copy_.default, (residual, new), _UPDATE, like=residual)


def _residual_input(gradient: fx.Node, change: Boxing, context: Context) -> fx.Node:
    """Add an input for this rank's residual; it is whole in time."""
    graph, bucket = gradient.graph, change.tensor.name
    sbp: NdSbp = (*change.source[:-1], broadcast) if context.has_time else change.source
    with graph.inserting_before(first_computed(graph)):
        node = graph.placeholder(f"{bucket}_residual{change.dim}")
    value = gradient.meta["val"]
    meta(node).update(
        {
            "role": Role("residual", f"{bucket}.{change.dim}"),
            "val": fake(graph, tuple(value.shape), DTYPE, value.device),
            "sbp": sbp,
        }
    )
    return node


def _summed_in_time(error: fx.Node, change: Boxing, context: Context) -> fx.Node:
    """Emit the sum of the errors of all micro-batches."""
    assert context.time_dim is not None
    target: NdSbp = (*change.source[:-1], broadcast)
    total = emit(error.graph, boxing, (error, show(target)), origin(error), sbp=target)
    tensor = TensorRef("value", f"residual of {change.tensor.name}")
    ranks, held = context.mesh.shape[context.time_dim], nbytes(error.meta["val"])
    meta(total)["boxing"] = Boxing(change.source, target, context.time_dim, ranks, tensor, held, change.phase)
    return total
