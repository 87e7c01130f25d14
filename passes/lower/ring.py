"""Ring attention: the nodes that replace attention whose keys and values are split along positions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.metadata import Boxing, TensorRef, meta, origin
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import nbytes
from zerograph.ops.attention import FORWARD, POSITIONS
from zerograph.ops.ring_attention import RANK, ring_attention, ring_attention_backward, sum_ring_gradients
from zerograph.ops.rows import shift_rows
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten

# SBP and global shape of a tensor.
Placed = tuple[NdSbp, tuple[int, ...]]


def is_ring(node: fx.Node) -> bool:
    """Return whether an attention node reads keys that are split along positions."""
    return Split(POSITIONS) in meta(rules.arguments(node)["key"])["sbp"]


def lower_ring(node: fx.Node, context: Context) -> None:
    """Replace attention by steps, between which keys and values travel; the node is the last one.

    There is a step for each rank. A pair of keys and values starts to travel before the step that attends to it, and is
    waited for after that step.
    """
    ring = _Ring(node, context)
    with node.graph.inserting_before(node):
        if node.target is FORWARD:
            ring.forward()
        else:
            ring.backward()
    # It is the signature of the operator that the node had.
    del node.meta["signature"]


class _Ring:
    """Emits the steps of an attention node, which has its global values still."""

    def __init__(self, node: fx.Node, context: Context) -> None:
        self.node, self.arguments = node, rules.arguments(node)
        key, value = self.arguments["key"], self.arguments["value"]
        sbp: NdSbp = meta(key)["sbp"]
        self.dim = sbp.index(Split(POSITIONS))
        self.ranks, self.group = context.mesh.shape[self.dim], context.mesh.groups[self.dim]
        self.channels = int(key.meta["val"].shape[-1])
        joined = self.channels + int(value.meta["val"].shape[-1])
        self.pair: Placed = sbp, (*meta(key)["global"][:-1], joined)
        results = zip(meta(node)["sbp"], node.meta["val"], strict=True)
        self.results: list[Placed] = [(result_sbp, tuple(result.shape)) for result_sbp, result in results]
        mask, causal, scale = (self.arguments[name] for name in ("attn_mask", "is_causal", "scale"))
        rank = context.mesh.position[self.dim]
        # The arguments of each step after those that are computed by the steps before.
        self.rest = [(mask, rank, step, self.ranks, self.channels, causal, scale) for step in range(self.ranks)]

    def forward(self) -> None:
        attended: tuple[fx.Node | None, ...] = (None, None)
        pair = self.own_pair()
        for step, rest in enumerate(self.rest):
            arguments = (self.arguments["query"], pair, *attended, *rest)
            if step == self.ranks - 1:
                self.replace(ring_attention, arguments)
                return
            arriving = self.shift(pair, self.pair, "keys and values")
            attended = self.step(ring_attention, arguments, self.results[:2])
            pair = self.emit(WAIT, (arriving,), self.pair)

    def backward(self) -> None:
        grad_out, query, out, lse = (self.arguments[name] for name in ("grad_out", "query", "out", "logsumexp"))
        of_query, of_pair = self.results[0], (self.results[1][0], self.pair[1])
        add, last = aten.add.Tensor, self.ranks - 1
        pair, grad_query, own, arriving = self.own_pair(), None, None, None
        for step, rest in enumerate(self.rest):
            next_pair = None if step == last else self.shift(pair, self.pair, "keys and values")
            arguments = (grad_out, query, pair, out, lse, *rest)
            part, grad_pair = self.step(ring_attention_backward, arguments, (of_query, of_pair))
            if own is None:
                grad_query, own = part, grad_pair
            else:
                if arriving is not None:
                    grad_pair = self.emit(add, (self.emit(WAIT, (arriving,), of_pair), grad_pair), of_pair)
                arriving = self.shift(grad_pair, of_pair, "gradients of keys and values")
                if step < last:
                    grad_query = self.emit(add, (grad_query, part), of_query)
            if next_pair is not None:
                pair = self.emit(WAIT, (next_pair,), self.pair)
        arrived = self.emit(WAIT, (arriving,), of_pair)
        self.replace(sum_ring_gradients, (grad_query, part, own, arrived, self.channels))

    def own_pair(self) -> fx.Node:
        """Join the keys and values of this rank along their channels."""
        return self.emit(aten.cat.default, ([self.arguments["key"], self.arguments["value"]], -1), self.pair)

    def step(self, target: Any, arguments: tuple[Any, ...], placed: Sequence[Placed]) -> tuple[fx.Node, ...]:
        """Emit a step; return its tensors."""
        step = emit(self.node.graph, target, arguments, origin(self.node))
        self.mark(step)
        return tuple(self.emit(operator.getitem, (step, number), place) for number, place in enumerate(placed))

    def replace(self, target: Any, arguments: tuple[Any, ...]) -> None:
        """Let the attention node be the last step."""
        self.node.target, self.node.args, self.node.kwargs = target, arguments, {}
        self.mark(self.node)

    def mark(self, step: fx.Node) -> None:
        """Record which argument differs between ranks, and the memory of a part until it is merged."""
        if step.target in RANK:
            meta(step)["rank_arguments"] = {RANK[step.target]: along(self.dim, 1)}
        if step.target is ring_attention and step.args[2] is not None:
            query = self.arguments["query"].meta["val"]
            # The part; of a narrow one also its wide copy, and the wide result of the last step.
            meta(step)["temporary"] = nbytes(query) + (8 * query.numel() if query.itemsize < 4 else 0)

    def emit(self, target: Any, arguments: tuple[Any, ...], placed: Placed) -> fx.Node:
        sbp, shape = placed
        node = emit(self.node.graph, target, arguments, origin(self.node), sbp=sbp)
        meta(node)["global"] = shape
        return node

    def shift(self, pair: fx.Node, placed: Placed, what: str) -> fx.Node:
        """Start to send a pair to the next rank and to receive one from the rank before."""
        start = self.emit(shift_rows, (pair, self.ranks, self.group), placed)
        where, sbp = origin(self.node), placed[0]
        tensor = TensorRef("value", f"{what} of {where.place}")
        together = nbytes(pair.meta["val"]) * self.ranks
        meta(start)["boxing"] = Boxing(sbp, sbp, self.dim, self.ranks, tensor, together, where.phase, shifted=True)
        return start
