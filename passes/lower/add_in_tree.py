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

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Boxing, meta
from zerograph.ir.rewrite import closure, emit_like, replace_node
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import nbytes
from zerograph.ops.rows import exchange_rows
from zerograph.ops.tree_sum import nodes_per_rank, sum_in_tree
from zerograph.passes.context import Context
from zerograph.passes.lower.lowering import with_entry

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Each rank receives all of a sum of at most so many bytes from each other one: one message where pieces take two.
_SMALL = 2**16


def add_in_tree(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Exchange pieces of partial sums, and add them in the tree of ``config.virtual_ranks``."""
    slices = context.batch.slices
    if slices is None:
        return module
    for target in (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default):
        for start in module.graph.find_nodes(op="call_function", target=target):
            (wait,), (source,) = start.users, start.all_input_nodes
            held = _held(source, slices, context.ranks)
            of_slices = len(held) > 1 or (slices % context.ranks and any(map(loop_of, _above(source))))
            replace_node(wait, _sum(start, wait, held, slices if of_slices else context.ranks))
            module.graph.erase_node(start)
    return module


def _held(source: fx.Node, slices: int, ranks: int) -> list[fx.Node]:
    """Return a tensor of each node of the tree that a rank holds: ``source``, and what is computed alike from others.

    Where a rank holds several, ``source`` is computed from the first one of loops' results.
    """
    if (count := nodes_per_rank(slices, ranks)) == 1:
        return [source]
    above = _above(source)
    others: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count - 1)]
    for node in [node for node in source.graph.nodes if node in above]:
        for number, copies in enumerate(others, 1):
            if _is_first(node) or not copies.keys().isdisjoint(node.all_input_nodes):
                with node.graph.inserting_before(node.next):
                    copies[node] = node.graph.node_copy(node, lambda old, copies=copies: copies.get(old, old))
                if _is_first(node):
                    copies[node].update_arg(2, number)
    return [source, *(copies[source] for copies in others)] if source in others[0] else [source]


def _above(source: fx.Node) -> set[fx.Node]:
    """Return ``source`` and what it is computed from, up to results of collectives and of loops."""
    return closure([source], lambda node: () if node.target is WAIT or _is_first(node) else node.all_input_nodes)


def _is_first(node: fx.Node) -> bool:
    """Return whether a node takes the first of the sums that a loop returns together."""
    return node.target is aten.select.int and any(map(loop_of, node.all_input_nodes[0].all_input_nodes))


def _sum(start: fx.Node, wait: fx.Node, held: Sequence[fx.Node], slices: int) -> fx.Node:
    """Emit the sum over all ranks of the tensors in ``held``; return it."""
    graph, change, value = start.graph, meta(start)["boxing"], held[0].meta["val"]
    ranks, group, shape = change.ranks, start.args[-1], list(value.shape)
    whole = start.target is c10d.all_reduce.default
    with graph.inserting_before(start):
        if whole and nbytes(value) <= _SMALL:
            rows = emit_like(start, aten.stack.default, held) if len(held) > 1 else held[0]
            row = emit_like(start, aten.unsqueeze.default, rows, 0)
            parts = [_started(start, change, c10d.all_gather_into_tensor.default, row, ranks, group)]
        else:
            padding = -value.numel() % ranks if whole else 0
            numel = (value.numel() + padding) // ranks
            piece = [numel] if whole else [shape[0] // ranks, *shape[1:]]
            pieces = with_entry(change.target, change.dim, Split(0))
            scatter, gather = replace(change, target=pieces), replace(change, source=pieces)
            sizes: Sequence[Any] = [numel] * ranks, [1] * ranks, [ranks, *piece]
            parts = []
            for source in held:
                flat = source if value.dim() == 1 else emit_like(start, aten.reshape.default, source, [-1])
                if padding:
                    flat = emit_like(start, aten.constant_pad_nd.default, flat, [0, padding], 0.0)
                parts.append(_started(start, scatter, exchange_rows, flat, *sizes, group))
    with graph.inserting_before(wait):
        arrived = [emit_like(start, c10d.wait_tensor.default, part) for part in parts]
        if len(arrived) < len(held):
            arrived = [emit_like(start, aten.select.int, arrived[0], 1, number) for number in range(len(held))]
        total = emit_like(start, sum_in_tree, arrived, slices)
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
