"""Dispatch of tokens to the ranks of their experts, and back: the nodes that replace it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.dims import Size
from zerograph.ir.dispatch import COMBINE, DISPATCH, PACK, UNPACK
from zerograph.ir.metadata import Boxing, TensorRef, meta, origin
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import emit
from zerograph.ir.rows import exchange_rows
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import nbytes
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.experts import capacity_of, exchanged_along

aten = torch.ops.aten


def lower_dispatch(node: fx.Node, shape: Sequence[Size], context: Context) -> None:
    """Replace a node by an expansion over groups, by a sum over them, or by an exchange.

    Args:
        node: the node, which has its global value still.
        shape: shape of its local value.
        context: the context of the passes.
    """
    # It is the signature of the operator that the node had.
    dim = exchanged_along(node, meta(node).pop("signature"))
    if dim is not None:
        _exchange(node, dim, context)
    elif node.target is DISPATCH:
        node.target, node.args = aten.expand.default, (node.args[0], [shape[0], -1, -1])
    else:
        node.target, node.args = aten.sum.dim_IntList, (node.args[0], [0])


def _exchange(node: fx.Node, dim: int, context: Context) -> None:
    """Let the node unpack the rows of a first round, and send the rows of a second one."""
    operator: Any = node.target
    rows, ids = rules.tensor_arguments(node)
    ranks, group, graph = context.mesh.shape[dim], context.mesh.groups[dim], node.graph
    tokens = ids.meta["val"].shape[0]
    limit = capacity_of(node, tokens // ranks, ranks, context)
    numbers = context.mesh.position[dim], ranks, rules.arguments(node)["experts"], limit
    sbp: NdSbp = meta(node)["sbp"]
    with graph.inserting_before(node):
        packed = emit(graph, PACK[operator], (rows, ids, *numbers), origin(node), sbp=sbp)
        width = packed.meta["val"].shape[1]
        sizes = [limit * width] * ranks, [limit] * ranks, [ranks * limit, width]
        start = emit(graph, exchange_rows, (packed, *sizes, group), origin(node), sbp=sbp)
        wait = emit(graph, WAIT, (start,), origin(node), sbp=sbp)
    for emitted in (packed, start, wait):
        meta(emitted)["global"] = (ranks * ranks * limit, width)
    meta(packed)["rank_arguments"] = {2: along(dim, 1)}
    # The numbers of the tokens that each rank sends to each, sorted.
    meta(packed)["temporary"] = tokens * ranks * (2 * 8 + 2)
    place = origin(node)
    where = place.module or place.source or "the step"
    tokens_to = "tokens to experts" if operator is DISPATCH else "results of experts"
    before = tuple(Split(0) if at == dim else one for at, one in enumerate(sbp))
    after = tuple(Split(1) if at == dim else one for at, one in enumerate(sbp))
    together = ranks * nbytes(packed.meta["val"])
    meta(start)["boxing"] = Boxing(
        before, after, dim, ranks, TensorRef("value", f"{tokens_to} of {where}"), together, place.phase
    )
    meta(node)["boxing"] = Boxing(
        before, after, dim, ranks, TensorRef("value", f"{tokens_to} of {where}, above the capacity"), 0, place.phase
    )
    meta(node)["rank_arguments"] = {3: along(dim, 1)}
    # The same numbers; results of experts from one rank, before they are added.
    meta(node)["temporary"] = tokens * ranks * (8 + 2) + (
        nbytes(node.meta["val"]) // ranks if operator is COMBINE else 0
    )
    node.target, node.args, node.kwargs = UNPACK[operator], (wait, rows, ids, *numbers, group), {}
