"""shard_embeddings: look up rows of a large table on the ranks that store them, and sum their gradients there.

A batch reads a few rows of an embedding table. Where it reads fewer bytes than the table has, indices and rows travel
instead of the table. Every rank looks up, for the indices of all ranks, the rows that it stores, and zeros for the
others; a sum over ranks then takes each row from its owner. Backward is the transpose. No number changes: only zeros
are added, and gradients are summed in the same order, each rank's batch first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.dims import Size
from zerograph.ir.metadata import meta
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import emit_like, operand, replace_node
from zerograph.ir.sbp import Sbp, Signature, Split, broadcast, partial_sum
from zerograph.ir.sizes import sizes_of
from zerograph.ir.step_graph import inputs_by_name, nbytes, source_bucket
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import boxing_cost

aten = torch.ops.aten
LOOKUP, GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
_ROWS = Split(0)


def shard_embeddings(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Keep a large embedding table split by rows; move indices and rows instead."""
    graph = module.graph
    # With several micro-batches the rows would travel in each, the table once for all (at stage 3 as often).
    if context.mesh.dims > 1 or context.ranks == 1:
        return module
    tables = {bucket.name for bucket in context.buckets if _is_table(bucket, context.ranks)}
    for name, node in inputs_by_name(graph, "bucket").items():
        if name in tables and meta(node)["sbp"] == (_ROWS,):
            for table in (node, *(user for user in node.users if source_bucket(user) is not None)):
                _look_up_in_shards(table, context)
    for node in graph.find_nodes(op="call_function", target=GRADIENT):
        _sum_in_shards(node, tables, context)
    return module


def _is_table(bucket: Bucket, ranks: int) -> bool:
    """Return whether the bucket is one matrix, so that each rank's shard of it is some of its rows."""
    shape = bucket.slots[0].shape
    alone = len(bucket.slots) == 1 and bucket.padded == bucket.slots[0].numel
    return alone and not bucket.has_owners and bucket.rows is None and len(shape) == 2 and shape[0] % ranks == 0


def _look_up_in_shards(table: fx.Node, context: Context) -> None:
    """Look rows up in the shards of a table, if lookups are the only use of its gathered form."""
    gathers = [user for user in table.users if user.target is boxing]
    if len(gathers) != 1:
        return
    views = _readers(_readers(gathers))
    lookups = _readers(views)
    if not lookups or any(user.target is not LOOKUP or user.args[0] not in views for user in lookups):
        return
    gathering = _cost(table, broadcast, context)
    if gathering <= sum(_cost_of_lookup(node, context) for node in lookups):
        return
    for node in (*_readers(gathers), *views):
        _set_signature(node, (_ROWS,), _ROWS)
    for node in lookups:
        _set_signature(node, (_ROWS, broadcast), partial_sum)
    replace_node(gathers[0], table)


def _cost_of_lookup(node: fx.Node, context: Context) -> float:
    """Return the cost of gathering the indices and of summing the rows."""
    indices = operand(node, 1)
    summing = boxing_cost(partial_sum, meta(node)["sbp"], nbytes(node.meta["val"]), context.ranks)
    return _cost(indices, broadcast, context) + summing


def _sum_in_shards(node: fx.Node, tables: set[str], context: Context) -> None:
    """Sum the gradient of a table on the owners of its rows, if the gradient is only reduced."""
    cast = _single_reader(_readers([node]), aten._to_copy.default)
    flat = _single_reader(_readers([cast or node]), aten.reshape.default)
    joined = flat and _single_reader(_readers([flat]), aten.cat.default)
    reduced = joined and _single_reader(_readers([joined]), boxing)
    if flat is None or joined is None or reduced is None or meta(joined).get("gradient") not in tables:
        return
    gradient, indices = operand(node), operand(node, 1)
    (target,) = meta(reduced)["target_sbp"]
    (signature,) = meta(node)["signature"]
    reducing = _cost(cast or node, target, context)
    gathering = _cost(gradient, broadcast, context) + _cost(indices, broadcast, context)
    gathering += boxing_cost(_ROWS, (target,), nbytes(joined.meta["val"]), context.ranks)
    if signature.outputs != (partial_sum,) or signature.inputs[0] != signature.inputs[1] or reducing <= gathering:
        return
    # The batch is split along this dimension. Its parts are still summed one by one.
    split = signature.inputs[1]
    assert isinstance(split, Split)
    meta(node)["indices_split_dim"] = split.dim
    if cast is not None:
        # Each part is cast by itself, as each rank casts its own before the reduction.
        node.meta["val"] = cast.meta["val"]
        meta(node)["sum_dtype"] = cast.meta["val"].dtype
        replace_node(cast, node)
    _set_signature(node, (broadcast, broadcast), _ROWS)
    _set_signature(flat, (_ROWS,), _ROWS)
    _set_signature(joined, (_ROWS,), _ROWS)


def _cost(node: fx.Node, need: Sbp, context: Context) -> float:
    (have,) = meta(node)["sbp"]
    return boxing_cost(have, (need,), nbytes(node.meta["val"]), context.ranks)


def _set_signature(node: fx.Node, inputs: tuple[Sbp, ...], output: Sbp) -> None:
    meta(node)["signature"] = (Signature(inputs, (output,)),)
    meta(node)["sbp"] = (output,)


def _readers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(user for node in nodes for user in node.users))


def _single_reader(readers: Sequence[fx.Node], target: Any) -> fx.Node | None:
    return readers[0] if len(readers) == 1 and readers[0].target is target else None


def is_sharded_embedding(node: fx.Node) -> bool:
    """Return whether ``localize`` must replace the node by a lookup, or a sum, of this rank's rows."""
    if node.target is LOOKUP:
        return bool(meta(node)["signature"][0].inputs[0] == _ROWS)
    return node.target is GRADIENT and "indices_split_dim" in node.meta


def own_rows(node: fx.Node, context: Context) -> fx.Node:
    """Emit the lookup, or the sum, of this rank's rows that replaces the node.

    Args:
        node: a lookup or a gradient for which :func:`is_sharded_embedding` holds. Its inputs are local, its value is
            still global.
        context: the mesh.
    """
    meta(node)["global"] = tuple(node.meta["val"].shape)
    return (_look_up if node.target is LOOKUP else _sum_rows)(node, context)


def _look_up(node: fx.Node, context: Context) -> fx.Node:
    table, indices = operand(node), operand(node, 1)
    with node.graph.inserting_before(node):
        op = functools.partial(emit_like, node)
        place, elsewhere = _places(node, indices, table.meta["val"].shape[0], context)
        rows = op(LOOKUP, table, place)
        masked = op(aten.masked_fill.Scalar, rows, op(aten.unsqueeze.default, elsewhere, -1), 0)
    meta(masked)["looked_up"] = True
    return masked


def _sum_rows(node: fx.Node, context: Context) -> fx.Node:
    options = rules.arguments(node)
    gradient, indices = operand(node), operand(node, 1)
    rows = options["num_weights"] // context.ranks
    padding = along(0, -rows, options["padding_idx"], limit=rows)
    dim = meta(node)["indices_split_dim"]
    # Both are whole here.
    whole = indices.meta["val"].shape[dim]
    parts: list[Size]
    if isinstance(whole, int):
        parts = [whole // context.ranks] * context.ranks
    else:
        parts = sizes_of(whole).parts(whole, context.ranks, 0)
    with node.graph.inserting_before(node):
        op = functools.partial(emit_like, node)
        place, elsewhere = _places(node, indices, rows, context)
        own_gradient = op(aten.masked_fill.Scalar, gradient, op(aten.unsqueeze.default, elsewhere, -1), 0)
        total: fx.Node | None = None
        for start, size in zip(itertools.accumulate(parts, initial=0), parts, strict=False):
            part_gradient = op(aten.narrow.default, own_gradient, dim, start, size)
            part_place = op(aten.narrow.default, place, dim, start, size)
            summed = op(GRADIENT, part_gradient, part_place, rows, padding.at(context.mesh.position), False)
            meta(summed)["rank_arguments"] = {3: padding}
            if "sum_dtype" in node.meta:
                summed = op(aten._to_copy.default, summed, dtype=meta(node)["sum_dtype"])
            total = summed if total is None else op(aten.add.Tensor, total, summed)
    assert total is not None
    return total


def _places(node: fx.Node, indices: fx.Node, rows: int, context: Context) -> tuple[fx.Node, fx.Node]:
    """Emit where in this rank's rows each index is, and whether another rank owns it (the place is then row 0).

    An index that no rank owns stays out of range, so that looking it up is the error that it is on one device.
    """
    op = functools.partial(emit_like, node)
    start = along(0, rows)
    place = op(aten.sub.Tensor, indices, start.at(context.mesh.position))
    meta(place)["rank_arguments"] = {1: start}
    below = op(aten.logical_and.default, op(aten.ge.Scalar, indices, 0), op(aten.lt.Scalar, place, 0))
    total = rows * context.ranks
    above = op(aten.logical_and.default, op(aten.ge.Scalar, place, rows), op(aten.lt.Scalar, indices, total))
    elsewhere = op(aten.logical_or.default, below, above)
    return op(aten.masked_fill.Scalar, place, elsewhere, 0), elsewhere
