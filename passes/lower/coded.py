"""Boxing of parameters and gradients in a wire format: codes are exchanged, and decoded where they are read.

A gather codes each piece once, as it is or less what all ranks have received of it. A sum takes one exchange: each
rank gets every rank's code of its piece, decodes them, and adds them in fp32 in the order of the ranks. An all-reduce
gathers these sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zerograph.ir.metadata import Coded, meta
from zerograph.ir.rank_numbers import along
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Split
from zerograph.ops import blocks
from zerograph.ops.rows import exchange_rows
from zerograph.passes.communication.error_feedback import received_input
from zerograph.passes.lower.lowering import Lowering, c10d, split_dim, with_entry

aten = torch.ops.aten


def lower_coded(lower: Lowering, source: fx.Node, before: Sbp, after: Sbp) -> fx.Node:
    """Return the tensor in the SBP ``after``, sent in the wire formats of the boxing."""
    if not isinstance(before, PartialSum):
        assert isinstance(after, Broadcast)
        return _gather(lower, source, split_dim(before))
    if isinstance(after, Split):
        return _reduce(lower, source, split_dim(after))
    # Sum pieces of the last dimension, of which each has whole blocks, then gather them.
    dim = len(source.meta["val"].shape) - 1
    change = lower.change
    pieces = with_entry(change.source, change.dim, Split(dim))
    scatter = replace(lower, change=replace(change, target=pieces, gathered=None))
    gather = replace(lower, change=replace(change, source=pieces, reduced=None))
    reduced = _reduce(scatter, source, dim)
    return _gather(gather, reduced, dim)


def _gather(lower: Lowering, source: fx.Node, dim: int) -> fx.Node:
    """Gather pieces along ``dim``."""
    gathered = lower.change.gathered
    if gathered is None:
        return lower.gathered(source, dim)
    dtype, received = source.meta["val"].dtype, None
    if gathered.difference:
        received = received_input(lower.graph, lower.change)
        start = along(lower.change.dim, source.meta["val"].shape[-1])
        source = lower.emit(blocks.difference, source, received, start.at(lower.context.mesh.position))
        meta(source)["rank_arguments"] = {2: start}
    coded = _encoded(lower, lower.contiguous(source), gathered)
    whole = _exchanged(lower, c10d.all_gather_into_tensor.default, coded, lower.ranks)
    pieces = lower.emit(blocks.decode, whole, *gathered.codec.arguments, dtype)
    decoded = lower.rearranged(pieces, cut=0, join=dim)
    if received is None:
        return decoded
    new = lower.emit(aten.add.Tensor, received, decoded)
    lower.emit(aten.copy_.default, received, new)
    return new


def _reduce(lower: Lowering, source: fx.Node, dim: int) -> fx.Node:
    """Sum over the ranks; return this rank's piece along ``dim``."""
    reduced = lower.change.reduced
    if reduced is None:
        return lower.reduce_scattered(source, dim)
    parts = lower.contiguous(lower.rearranged(source, cut=dim, join=0))
    # Error feedback has coded it already.
    codes = (user for user in parts.users if user.target is blocks.encode and user.args[1:] == reduced.codec.arguments)
    code = next(codes, None)
    coded = _encoded(lower, parts, reduced) if code is None else _local(code)
    rows, *rest = coded.meta["val"].shape
    numel = coded.meta["val"].numel() // lower.ranks
    shape = [lower.ranks, rows // lower.ranks, *rest]
    received = _exchanged(lower, exchange_rows, coded, [numel] * lower.ranks, [1] * lower.ranks, shape)
    return lower.emit(blocks.sum_decoded, received, *reduced.codec.arguments, lower.node.meta["val"].dtype)


def _encoded(lower: Lowering, source: fx.Node, coded: Coded) -> fx.Node:
    return _local(lower.emit(blocks.encode, source, *coded.codec.arguments))


def _exchanged(lower: Lowering, target: Any, *args: Any) -> fx.Node:
    wait = lower.collective(target, *args)
    _local(wait.all_input_nodes[0])
    return _local(wait)


def _local(node: fx.Node) -> fx.Node:
    """Mark a code, which is no part of a global tensor."""
    meta(node).pop("sbp", None)
    meta(node).pop("global", None)
    meta(node)["local"] = True
    return node
