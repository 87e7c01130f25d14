"""Optimizer state in eight bits: which code each entry has, and the conversion of one parameter's entry.

Codes are dynamic: an entry of any sign is coded by the root of its magnitude, one that is never negative by its fourth
root, each relative to the largest magnitude of its block. Adam divides the first kind by the root of the second, and
both then reach to about 2^-17 of the largest. Decoding and coding again changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta
from zerograph.ir.slots import Slot
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import UpdateProgram
from zerograph.ops import blocks
from zerograph.ops.blocks import Codec

aten = torch.ops.aten

SIGNED, UNSIGNED = Codec("root", 256), Codec("fourth_root", 256)
_CODECS = {f".{codec.code}": codec for codec in (SIGNED, UNSIGNED)}


def saved_name(entry: str, codec: Codec | None) -> str:
    """Return the name of a state entry in a checkpoint: that of a code ends with its kind."""
    return entry if codec is None else f"{entry}.{codec.code}"


def plain_name(name: str) -> str:
    """Return the name of the entry that is saved under ``name``."""
    return next((name.removesuffix(suffix) for suffix in _CODECS if name.endswith(suffix)), name)


def saved_codec(name: str) -> Codec | None:
    """Return how the entry that is saved under ``name`` is coded, or None."""
    return next((codec for suffix, codec in _CODECS.items() if name.endswith(suffix)), None)


def decode_saved(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an entry of a checkpoint as a plain optimizer keeps it.

    Args:
        name: its name there.
        value: its value there.
        shape: the parameter's shape.
    """
    codec = saved_codec(name)
    return value if codec is None else decode_entry(value, torch.Size(shape), codec, torch.float32)


def coded_layout(layout: Bucket, codec: Codec | None) -> Bucket:
    """Return the layout of a state entry in coded form: each parameter's is [blocks, bytes of a block].

    Args:
        layout: the layout of the entry as it is, of a flat bucket.
        codec: how it is coded; None: not.
    """
    if codec is None:
        return layout

    def coded(slot: Slot) -> Slot:
        count, width = -(-slot.numel // codec.block), codec.block_bytes
        return replace(slot, shape=(count, width), offset=codec.coded_bytes(slot.offset), numel=count * width)

    slots = tuple(map(coded, layout.slots))
    numel, padded = sum(slot.numel for slot in slots), codec.coded_bytes(layout.padded)
    return replace(layout, slots=slots, numel=numel, padded=padded, block=codec.block_bytes)


def encode_entry(value: Tensor, codec: Codec) -> Tensor:
    """Return the code of a parameter's whole entry, [blocks, bytes of a block]."""
    flat = value.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % codec.block))
    coded: Tensor = blocks.encode(padded, *codec.arguments)
    return coded.view(-1, codec.block_bytes)


def decode_entry(coded: Tensor, shape: torch.Size, codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return a parameter's whole entry, of its shape, from the code."""
    values: Tensor = blocks.decode(coded.contiguous().view(-1), *codec.arguments, dtype)
    return values[: shape.numel()].view(shape)


def never_negative(program: UpdateProgram) -> set[str]:
    """Return the entries of an update's state that are never negative, proved from its operators."""
    entries = {name for name, spec in program.state.items() if spec.initial is not None and spec.initial >= 0}
    graphs = [graph for graph in (program.graph, program.first) if graph is not None]
    while True:
        kept = set(entries)
        for graph in graphs:
            bounds, new = _bounds(graph, program.state, entries), new_values(graph, program.state)
            kept = {name for name in kept if new[name] in bounds}
        if kept == entries:
            return entries
        entries = kept


def new_values(graph: fx.GraphModule, state: Iterable[str]) -> dict[str, fx.Node]:
    """Return the node of each value after an update, of the parameter too: written by ``copy_``, or returned.

    Args:
        graph: an update.
        state: the entries of the state, in order.
    """
    values = {meta(node)["update_input"]: node for node in placeholders(graph.graph)}
    names = {node: name for name, node in values.items()}
    for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
        values[names[node.args[0]]] = node.args[1]
    returned: Any = graph.graph.output_node().args[0]
    values.update(zip(state, returned if isinstance(returned, (list, tuple)) else (), strict=False))
    return values


def root_of_a_difference(program: UpdateProgram) -> fx.Node | None:
    """Return the first root of a tensor that may become negative when its entries are rounded, or None."""
    bounds = _bounds(program.graph, program.state, never_negative(program))
    node: fx.Node
    for node in program.graph.graph.find_nodes(op="call_function", target=aten.sqrt.default):
        if node.meta["val"].dim() and node.args[0] not in bounds:
            return node
    return None


# Upper bounds of values that are never negative.
_ONE, _ANY = 1.0, math.inf


def _bounds(graph: fx.GraphModule, state: Container[str], entries: set[str]) -> dict[fx.Node, float]:
    """Return an upper bound, 1 or infinity, of each value that is never negative if ``entries`` are not.

    Hyperparameters that are inputs count as not negative, and others than the learning rate as at most 1, as torch's
    optimizers demand.
    """
    bounds: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            name = meta(node)["update_input"]
            if name in entries or name == "lr":
                bounds[node] = _ANY
            elif name not in ("param", "grad") and name not in state:
                bounds[node] = _ONE
        elif node.op == "call_function" and (bound := _bound(node, bounds)) is not None:
            bounds[node] = _ONE if bound <= _ONE else _ANY
    return bounds


def _bound(node: fx.Node, bounds: Mapping[fx.Node, float]) -> float | None:
    """Return an upper bound of a node's value; None if it may be negative."""
    args: tuple[Any, ...] = node.args

    def bound(value: Any) -> float | None:
        if isinstance(value, fx.Node):
            return bounds.get(value)
        return float(value) if isinstance(value, (int, float)) and value >= 0 else None

    def unless_negative(*values: Any, upper: float = _ANY) -> float | None:
        return None if any(bound(value) is None for value in values) else upper

    target = node.target
    if target in _POSITIVE:
        return _ANY
    if target in _SAME:
        return bound(args[_SAME[target]])
    if target in _MONOTONE:
        return unless_negative(*args[: _MONOTONE[target]], *node.kwargs.values())
    if target in (aten.lerp.Scalar, aten.lerp.Tensor):
        weight = bound(args[2])
        return None if weight is None or weight > _ONE else unless_negative(*args[:2])
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        if args[0] is args[1]:
            return _ANY
        first, second = bound(args[0]), bound(args[1])
        return None if first is None or second is None else max(first, second)
    if target in (aten.addcmul.default, aten.addcdiv.default):
        rest = () if args[1] is args[2] else args[1:3]
        return unless_negative(args[0], *rest, node.kwargs.get("value", 1))
    if target in (aten.pow.Scalar, aten.pow.Tensor_Tensor):
        # The power of a number up to 1 is at most 1 where the exponent is not negative.
        return None if bound(args[1]) is None else bound(args[0])
    if target is aten.pow.Tensor_Scalar:
        return _ANY if args[1] % 2 == 0 else unless_negative(args[0])
    if target is aten.rsub.Scalar and len(args) == 2 and args[1] == 1:
        subtracted = bound(args[0])
        return _ONE if subtracted is not None and subtracted <= _ONE else None
    if target is aten.maximum.default:
        return None if bound(args[0]) is None and bound(args[1]) is None else _ANY
    if target is aten.where.self:
        return unless_negative(*args[1:3])
    return _ANY if target in (aten.clamp_min.default, aten.clamp.default) and (args[1] or -1) >= 0 else None


# Operators whose value is never negative.
_POSITIVE = {aten.abs.default, aten.exp.default, aten.square.default}
# Those whose value is that of an argument, or whose bound is.
_SAME: dict[Any, int] = {
    **dict.fromkeys(
        (
            aten.sqrt.default,
            aten.clone.default,
            aten.alias.default,
            aten.detach.default,
            aten._to_copy.default,
            aten._local_scalar_dense.default,
            aten.view.default,
        ),
        0,
    ),
    **dict.fromkeys((aten.copy.default, aten.full.default, aten.full_like.default), 1),
}
# Those whose value is not negative if their first arguments are not, and their factors.
_MONOTONE: dict[Any, int] = {
    aten.add.Tensor: 2,
    aten.add.Scalar: 2,
    aten.div.Tensor: 2,
    aten.div.Scalar: 2,
    aten.minimum.default: 2,
    aten.reciprocal.default: 1,
    aten.rsqrt.default: 1,
}
