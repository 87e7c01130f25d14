"""Optimizer state in eight bits: which code each entry has, and the conversion of one parameter's entry.

Codes are dynamic: an entry of any sign is coded by the root of its magnitude, one that is never negative by its fourth
root, each relative to the largest magnitude of its block. Adam divides the first kind by the root of the second, and
both then reach to about 2^-17 of the largest. Decoding and coding again changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.ir import blocks
from zerograph.ir.blocks import Codec
from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten

SIGNED, UNSIGNED = Codec("root", 256), Codec("fourth_root", 256)
_CODECS = {f".{codec.code}": codec for codec in (SIGNED, UNSIGNED)}


def saved_name(entry: str, codec: Codec | None) -> str:
    """Return the name of a state entry in a checkpoint: that of a code ends with its kind."""
    return entry if codec is None else f"{entry}.{codec.code}"


def plain_name(name: str) -> str:
    """Return the name of the entry that is saved under ``name``."""
    return next((name.removesuffix(suffix) for suffix in _CODECS if name.endswith(suffix)), name)


def decode_saved(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an entry of a checkpoint as a plain optimizer keeps it.

    Args:
        name: its name there.
        value: its value there.
        shape: the parameter's shape.
    """
    codec = next((codec for suffix, codec in _CODECS.items() if name.endswith(suffix)), None)
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


def never_negative(graph: fx.GraphModule, initial: Mapping[str, float | None]) -> set[str]:
    """Return the entries of an update's state that are never negative, proved from its operators.

    Args:
        graph: an update that writes its results by ``copy_``.
        initial: the value of each entry before the first update; None for one that the first update computes.
    """
    inputs = {meta(node)["update_input"]: node for node in placeholders(graph.graph)}
    entries = {name for name, value in initial.items() if value is not None and value >= 0}
    while True:
        known = {node for name, node in inputs.items() if name in entries or node.meta["val"].dim() == 0}
        for node in graph.graph.nodes:
            if node.op == "call_function" and _keeps_sign(node, known):
                known.add(node)
        written = {
            node.args[0]: node.args[1] for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        kept = {name for name in entries if written.get(inputs[name]) in known or inputs[name] not in written}
        if kept == entries:
            return entries
        entries = kept


def _keeps_sign(node: fx.Node, known: set[fx.Node]) -> bool:
    """Return whether a node's value is never negative if those of ``known`` are not.

    Rates and counts, which are numbers and 0-d tensors, count as not negative.
    """
    args: tuple[Any, ...] = node.args

    def positive(value: Any) -> bool:
        return value in known if isinstance(value, fx.Node) else isinstance(value, (int, float)) and value >= 0

    target = node.target
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0 or target in _POSITIVE:
        return True
    if target in _MONOTONE:
        return all(map(positive, [*args[: _MONOTONE[target]], *node.kwargs.values()]))
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        return args[0] is args[1] or (positive(args[0]) and positive(args[1]))
    if target is aten.addcmul.default:
        squares = args[1] is args[2] or (positive(args[1]) and positive(args[2]))
        return positive(args[0]) and squares and positive(node.kwargs.get("value", 1))
    if target is aten.pow.Tensor_Scalar:
        return args[1] % 2 == 0 or positive(args[0])
    if target is aten.copy.default:
        return positive(args[1])
    if target is aten.maximum.default:
        return positive(args[0]) or positive(args[1])
    return target is aten.clamp_min.default and args[1] >= 0


# Operators whose value is never negative, and those whose value is not if their first operands are not.
_POSITIVE = {aten.abs.default, aten.exp.default, aten.square.default}
_MONOTONE: dict[Any, int] = {
    aten.add.Tensor: 2,
    aten.add.Scalar: 2,
    aten.div.Tensor: 2,
    aten.div.Scalar: 2,
    aten.lerp.Scalar: 2,
    aten.lerp.Tensor: 2,
    aten.minimum.default: 2,
    **dict.fromkeys(
        (aten.sqrt.default, aten.clone.default, aten.alias.default, aten._to_copy.default, aten.view.default), 1
    ),
}


def root_of_a_difference(graph: fx.GraphModule, initial: Mapping[str, float | None]) -> fx.Node | None:
    """Return the first root of a tensor that may become negative when its entries are rounded, or None."""
    inputs = {meta(node)["update_input"]: node for node in placeholders(graph.graph)}
    entries = never_negative(graph, initial)
    known = {node for name, node in inputs.items() if name in entries or node.meta["val"].dim() == 0}
    node: fx.Node
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target is aten.sqrt.default and node.meta["val"].dim() and node.all_input_nodes[0] not in known:
            return node
        if _keeps_sign(node, known):
            known.add(node)
    return None
