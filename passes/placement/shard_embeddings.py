"""shard_embeddings: look up rows of a large table on the ranks that store them, and sum their gradients there.

A batch reads a few rows of an embedding of many. Where it reads less than the table has, indices and rows travel
instead of the table: every rank looks up, for the indices of all, the rows that rest with it, zeros for the others,
and adding up takes each from its owner. Backward is the transpose of it. Only zeros are added that were not before, and
gradients are summed as before, each rank's batch first, so no number changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta, role
from zerograph.ir.rewrite import emit_like
from zerograph.ir.sbp import Sbp, Signature, Split, broadcast, partial_sum
from zerograph.ir.step_graph import nbytes, placeholders, source_bucket
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import boxing_cost

aten = torch.ops.aten
LOOKUP, GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
_ROWS = Split(0)


def shard_embeddings(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """A table of which a batch reads little stays where it rests; indices and rows travel instead."""
    graph = module.graph
    # Over several micro-batches rows would travel for each, the table once for all (at stage 3 as often).
    if context.mesh.dims > 1 or context.ranks == 1:
        return module
    tables = {bucket.name for bucket in context.buckets if _is_table(bucket, context.ranks)}
    for node in placeholders(graph, "bucket"):
        found = role(node)
        if found is not None and found.name in tables and meta(node)["sbp"] == (_ROWS,):
            for table in (node, *(user for user in node.users if source_bucket(user) is not None)):
                _keep_apart(table, context)
    for node in graph.find_nodes(op="call_function", target=GRADIENT):
        _sum_apart(node, tables, context)
    return module


def _is_table(bucket: Bucket, ranks: int) -> bool:
    """A matrix alone in its bucket, so that each rank's piece of the bucket is some of its rows."""
    shape = bucket.slots[0].shape
    alone = len(bucket.slots) == 1 and bucket.padded == bucket.slots[0].numel
    return alone and not bucket.dealt and bucket.rows is None and len(shape) == 2 and shape[0] % ranks == 0


def _keep_apart(table: fx.Node, context: Context) -> None:
    """Look rows up in the pieces of a table, if looking up is all that the step gathers it for."""
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
        _settle(node, (_ROWS,), _ROWS)
    for node in lookups:
        _settle(node, (_ROWS, broadcast), partial_sum)
    gathers[0].replace_all_uses_with(table)
    table.graph.erase_node(gathers[0])


def _cost_of_lookup(node: fx.Node, context: Context) -> float:
    indices = node.args[1]
    assert isinstance(indices, fx.Node)
    back = boxing_cost(partial_sum, meta(node)["sbp"], nbytes(node.meta["val"]), context.ranks)
    return _cost(indices, broadcast, context) + back


def _sum_apart(node: fx.Node, tables: set[str], context: Context) -> None:
    """Sum the gradient of a table where its rows rest, if reducing is all that is done with it."""
    cast = _only(_readers([node]), aten._to_copy.default)
    flat = _only(_readers([cast or node]), aten.reshape.default)
    joined = flat and _only(_readers([flat]), aten.cat.default)
    reduced = joined and _only(_readers([joined]), boxing)
    if flat is None or joined is None or reduced is None or meta(joined).get("gradient") not in tables:
        return
    gradient, indices = node.args[:2]
    assert isinstance(gradient, fx.Node)
    assert isinstance(indices, fx.Node)
    (target,) = meta(reduced)["target_sbp"]
    (signature,) = meta(node)["signature"]
    reducing = _cost(cast or node, target, context)
    gathering = _cost(gradient, broadcast, context) + _cost(indices, broadcast, context)
    gathering += boxing_cost(_ROWS, (target,), nbytes(joined.meta["val"]), context.ranks)
    if signature.outputs != (partial_sum,) or signature.inputs[0] != signature.inputs[1] or reducing <= gathering:
        return
    # The batch is split along this dimension: its parts are still summed one by one.
    split = signature.inputs[1]
    assert isinstance(split, Split)
    meta(node)["indices_split_dim"] = split.dim
    if cast is not None:
        # Each part by itself, as each rank casts its own before it is reduced.
        node.meta["val"] = cast.meta["val"]
        meta(node)["sum_dtype"] = cast.meta["val"].dtype
        cast.replace_all_uses_with(node)
        node.graph.erase_node(cast)
    _settle(node, (broadcast, broadcast), _ROWS)
    _settle(flat, (_ROWS,), _ROWS)
    _settle(joined, (_ROWS,), _ROWS)


def _cost(node: fx.Node, need: Sbp, context: Context) -> float:
    (have,) = meta(node)["sbp"]
    return boxing_cost(have, (need,), nbytes(node.meta["val"]), context.ranks)


def _settle(node: fx.Node, inputs: tuple[Sbp, ...], output: Sbp) -> None:
    meta(node)["signature"] = (Signature(inputs, (output,)),)
    meta(node)["sbp"] = (output,)


def _readers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(user for node in nodes for user in node.users))


def _only(readers: Sequence[fx.Node], target: Any) -> fx.Node | None:
    return readers[0] if len(readers) == 1 and readers[0].target is target else None


def is_apart(node: fx.Node) -> bool:
    """Whether ``localize`` shall make of the node a lookup, or a sum, of this rank's rows alone."""
    if node.target is LOOKUP:
        return bool(meta(node)["signature"][0].inputs[0] == _ROWS)
    return node.target is GRADIENT and "indices_split_dim" in node.meta


def own_rows(node: fx.Node, context: Context) -> fx.Node:
    """What takes the node's place on this rank: its inputs are local already, its value is still global."""
    meta(node)["global"] = tuple(node.meta["val"].shape)
    return (_look_up if node.target is LOOKUP else _sum_rows)(node, context)


def _look_up(node: fx.Node, context: Context) -> fx.Node:
    table, indices = node.args[:2]
    assert isinstance(table, fx.Node)
    assert isinstance(indices, fx.Node)
    with node.graph.inserting_before(node):
        made = functools.partial(emit_like, node)
        place, elsewhere = _places(node, indices, table.meta["val"].shape[0], context)
        rows = made(LOOKUP, table, place)
        found = made(aten.masked_fill.Scalar, rows, made(aten.unsqueeze.default, elsewhere, -1), 0)
    meta(found)["looked_up"] = True
    return found


def _sum_rows(node: fx.Node, context: Context) -> fx.Node:
    options = rules.arguments(node)
    gradient, indices = node.args[:2]
    assert isinstance(gradient, fx.Node)
    assert isinstance(indices, fx.Node)
    rows = options["num_weights"] // context.ranks
    padding = options["padding_idx"] - context.mesh.position[0] * rows
    dim = meta(node)["indices_split_dim"]
    size = indices.meta["val"].shape[dim] // context.ranks
    with node.graph.inserting_before(node):
        made = functools.partial(emit_like, node)
        place, elsewhere = _places(node, indices, rows, context)
        kept = made(aten.masked_fill.Scalar, gradient, made(aten.unsqueeze.default, elsewhere, -1), 0)
        total: fx.Node | None = None
        for part in range(context.ranks):
            span = dim, part * size, (part + 1) * size
            ours, at = made(aten.slice.Tensor, kept, *span), made(aten.slice.Tensor, place, *span)
            summed = made(GRADIENT, ours, at, rows, padding if 0 <= padding < rows else -1, False)
            meta(summed)["rank_arguments"] = (3,)
            if "sum_dtype" in node.meta:
                summed = made(aten._to_copy.default, summed, dtype=meta(node)["sum_dtype"])
            total = summed if total is None else made(aten.add.Tensor, total, summed)
    assert total is not None
    return total


def _places(node: fx.Node, indices: fx.Node, rows: int, context: Context) -> tuple[fx.Node, fx.Node]:
    """Where in this rank's rows each index is, and whether it is on another rank (then at row 0).

    An index that is on none stays outside, so that looking it up is the error that it is on one device.
    """
    made = functools.partial(emit_like, node)
    start = context.mesh.position[0] * rows
    place = made(aten.sub.Tensor, indices, start)
    meta(place)["rank_arguments"] = (1,)
    before = made(aten.logical_and.default, made(aten.ge.Scalar, indices, 0), made(aten.lt.Scalar, place, 0))
    total = rows * context.ranks
    behind = made(aten.logical_and.default, made(aten.ge.Scalar, place, rows), made(aten.lt.Scalar, indices, total))
    elsewhere = made(aten.logical_or.default, before, behind)
    return made(aten.masked_fill.Scalar, place, elsewhere, 0), elsewhere
