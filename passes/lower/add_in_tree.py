"""add_in_tree: add the ranks' partial sums in the tree of ``config.virtual_ranks``.

Libraries add in an order of their own. Here each rank receives every rank's piece of the part that it sums, as a
reduce-scatter sends them, and adds them in the tree; an all-reduce gathers these sums. The pass runs after
``schedule``, which sees torch's own collectives: each start and each wait keeps its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zerograph.ir.metadata import Boxing, meta
from zerograph.ir.rewrite import emit_like
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import nbytes
from zerograph.ops.rows import exchange_rows
from zerograph.ops.tree_sum import sum_in_tree
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Each rank receives all of a sum of at most so many bytes from each other one: one message where pieces take two.
_SMALL = 2**16


def add_in_tree(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Exchange pieces of partial sums, and add them in the tree of ``config.virtual_ranks``."""
    if context.batch.slices is None:
        return module
    for target in (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default):
        for start in module.graph.find_nodes(op="call_function", target=target):
            (wait,), (source,) = start.users, start.all_input_nodes
            wait.replace_all_uses_with(_sum(start, wait, source))
            module.graph.erase_node(wait)
            module.graph.erase_node(start)
    return module


def _sum(start: fx.Node, wait: fx.Node, source: fx.Node) -> fx.Node:
    """Emit the sum of ``source`` over the ranks; return it."""
    graph, change, value = start.graph, meta(start)["boxing"], source.meta["val"]
    ranks, group, shape = change.ranks, start.args[-1], list(value.shape)
    whole = start.target is c10d.all_reduce.default
    with graph.inserting_before(start):
        if whole and nbytes(value) <= _SMALL:
            row = emit_like(start, aten.unsqueeze.default, source, 0)
            parts = _started(start, change, c10d.all_gather_into_tensor.default, row, ranks, group)
        else:
            flat = source if value.dim() == 1 else emit_like(start, aten.reshape.default, source, [-1])
            if padding := -value.numel() % ranks:
                flat = emit_like(start, aten.constant_pad_nd.default, flat, [0, padding], 0.0)
            numel = flat.meta["val"].numel() // ranks
            piece = [numel] if whole else [shape[0] // ranks, *shape[1:]]
            pieces: NdSbp = tuple(Split(0) if dim == change.dim else sbp for dim, sbp in enumerate(change.target))
            scatter, gather = replace(change, target=pieces), replace(change, source=pieces)
            sizes: Sequence[Any] = [numel] * ranks, [1] * ranks, [ranks, *piece]
            parts = _started(start, scatter, exchange_rows, flat, *sizes, group)
    with graph.inserting_before(wait):
        total = emit_like(start, sum_in_tree, emit_like(start, c10d.wait_tensor.default, parts))
        if list(total.meta["val"].shape) == shape or not whole:
            return total
        gathered = _started(start, gather, c10d.all_gather_into_tensor.default, total, ranks, group)
        joined = emit_like(start, c10d.wait_tensor.default, gathered)
        if padding:
            joined = emit_like(start, aten.slice.Tensor, joined, 0, 0, value.numel())
        return joined if value.dim() == 1 else emit_like(start, aten.view.default, joined, shape)


def _started(start: fx.Node, change: Boxing, target: Any, *args: Any) -> fx.Node:
    node = emit_like(start, target, *args)
    meta(node)["boxing"] = change
    return node
