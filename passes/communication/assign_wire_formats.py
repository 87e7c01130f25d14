"""assign_wire_formats: say how the boxings of parameters and gradients code what they send.

Losses, counts, norms, flags, activations and buffers are sent as they are; the verifier holds this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from zerograph.errors import PlacementError
from zerograph.ir.metadata import Boxing, Coded, boxing_of, meta
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import gathers_bucket
from zerograph.ir.wire import Kind, format_of
from zerograph.ops.blocks import Codec
from zerograph.passes.communication.error_feedback import feed_back, receive
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing

# What each kind of boxing does with a tensor.
_USES: dict[str, tuple[Kind, ...]] = {
    "all-gather": ("gather",),
    "reduce-scatter": ("reduce",),
    "all-reduce": ("reduce", "gather"),
}


def assign_wire_formats(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Give the boxings of parameters and gradients the wire formats of the configuration.

    Raises:
        PlacementError: a tensor cannot be coded in its format, or the mesh has no dimension that is named.
    """
    _check_dims(context)
    _warn_of_exact_gradients(module.graph, context)
    for node in module.graph.find_nodes(op="call_function", target=boxing):
        change = boxing_of(node)
        if change is None or change.tensor.kind == "value" or change.ranks == 1 or change.dim == context.time_dim:
            continue
        for use in _USES.get(change.kind, ()):
            wanted = format_of(context.numerics.wire, use, change.dim)
            if wanted is None or (coded := _coded(node, change, use, wanted.codec, context)) is None:
                continue
            if use == "gather":
                # The sums of an all-reduce are gathered as they are.
                difference = wanted.feedback and gathers_bucket(node)
                change = replace(change, gathered=replace(coded, difference=difference))
                if difference:
                    receive(node, change, context)
                continue
            change = replace(change, reduced=replace(coded, feedback=wanted.feedback))
            if wanted.feedback:
                feed_back(node, change, coded.codec, context)
        meta(node)["boxing"] = change
    return module


def _check_dims(context: Context) -> None:
    """Raise if the configuration names a dimension that the mesh does not have. One rank alone sends nothing."""
    wire, dims = context.numerics.wire, len(context.mesh.shape)
    if context.mesh.size == 1 or not isinstance(wire, Mapping):
        return
    for kind, formats in wire.items():
        missing = [dim for dim in formats if dim >= dims] if isinstance(formats, Mapping) else []
        if missing:
            raise PlacementError(
                f"config.precision.wire: {kind!r} names the mesh dimension {missing[0]}, but the mesh "
                f"{context.mesh.shape} has {dims}, numbered from 0\nName one of them, or set config.mesh.placement to "
                "a grid of ranks."
            )


def _warn_of_exact_gradients(graph: fx.Graph, context: Context) -> None:
    """Warn of buckets whose gradients are reduced one by one, as values, which are not coded.

    That is so if the gradient of one of its parameters is whole on every rank and cannot be added to partial sums.
    """
    if context.ranks == 1 or not any(format_of(context.numerics.wire, "reduce", dim) for dim in context.policy.dims):
        return
    for joined in graph.nodes:
        if "gradient" not in meta(joined) or any(isinstance(sbp, PartialSum) for sbp in meta(joined)["sbp"]):
            continue
        name = meta(joined)["gradient"]
        bucket = context.bucket(name)
        slots = sorted(bucket.slots, key=lambda slot: slot.offset)
        is_reduced = [_is_reduced(part) for part in joined.all_input_nodes]
        if any(is_reduced) and not all(is_reduced):
            parameter = slots[is_reduced.index(False)].name
            context.missing_rules.warn(
                f"config.precision.wire: gradients of {name} are reduced one by one and not coded, because that of "
                f"{parameter} is the same on all ranks\nFreeze {parameter} if it needs no gradient, or give it an "
                "optimizer of its own."
            )


def _is_reduced(gradient: fx.Node) -> bool:
    """Return whether a part of a bucket is the result of a reduction."""
    while gradient.target in _FORMS:
        gradient = gradient.all_input_nodes[0]
    change = boxing_of(gradient)
    return change is not None and isinstance(change.source[change.dim], PartialSum)


_FORMS = {
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten._to_copy.default,
}


def _coded(node: fx.Node, change: Boxing, use: Kind, codec: Codec, context: Context) -> Coded | None:
    """Return how a boxing sends its tensor; None for exact values.

    Raises:
        PlacementError: the tensor cannot be coded.
    """
    dtype, bucket = node.meta["val"].dtype, context.bucket(change.tensor.name)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        # Whole numbers, such as frozen weights of 8 bits, have no rounding to spare.
        other = "reduce" if use == "gather" else "gather"
        convert = "Convert these parameters to torch.float32, or set" if dtype.is_floating_point else "Set"
        raise PlacementError(
            f"config.precision.wire: {change.tensor} ({bucket.slots[0].name}, ...) is {dtype}, which {codec.code} "
            f"cannot code\n{convert} a format for the other kind only: "
            f"config.precision.wire = {{{other!r}: {codec.code!r}}}."
        )
    if codec.code == "bf16" and (dtype is torch.float16 or (dtype is torch.bfloat16 and use == "gather")):
        # Two bytes already. A sum of bf16 is coded all the same, to be computed in fp32.
        return None
    if bucket.block % codec.block:
        raise PlacementError(
            f"config.precision.wire: {change.tensor} was laid out by a graph without blocks of {codec.block} elements\n"
            f"Set the same config.precision.wire in both graphs before their first calls, or config.precision.wire = "
            "'exact' here."
        )
    return Coded(codec, codec.coded_bytes(change.bytes // dtype.itemsize))
