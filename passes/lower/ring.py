"""Ring attention: the nodes that replace attention whose keys and values are split along positions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.mesh import global_shape
from zerograph.ir.metadata import Boxing, TensorRef, meta, origin
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import nbytes
from zerograph.ops.attention import FORWARD, POSITIONS
from zerograph.ops.balanced_ring import (
    RANK as RANK_OF_BALANCED,
)
from zerograph.ops.balanced_ring import (
    add_balanced,
    add_last_balanced,
    balanced_attention,
    balanced_backward,
    merge_balanced,
    own_rows,
    pack_queries,
)
from zerograph.ops.ring_attention import RANK as RANK_OF_RING
from zerograph.ops.ring_attention import ring_attention, ring_attention_backward, sum_ring_gradients
from zerograph.ops.rows import shift_either, shift_rows
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten

RANK = {**RANK_OF_RING, **RANK_OF_BALANCED}

# SBP and global shape of a tensor.
Placed = tuple[NdSbp, tuple[int, ...]]


def is_ring(node: fx.Node) -> bool:
    """Return whether an attention node reads keys that are split along positions."""
    return Split(POSITIONS) in meta(rules.arguments(node)["key"])["sbp"]


def lower_ring(node: fx.Node, context: Context) -> None:
    """Replace attention by steps, between which keys and values travel; the node is the last one.

    Under a causal mask ranks help each other, which takes half as many steps; else there is one for each rank. A pair
    of keys and values starts to travel before the step that attends to it, and is waited for after that step.
    """
    arguments = rules.arguments(node)
    ring = (_BalancedRing if arguments["is_causal"] and arguments["attn_mask"] is None else _Ring)(node, context)
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
        if step.target is merge_balanced or (step.target is ring_attention and step.args[2] is not None):
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
        self.describe(start, placed[0], what, nbytes(pair.meta["val"]) * self.ranks)
        return start

    def describe(self, start: fx.Node, sbp: NdSbp, what: str, together: int) -> None:
        """Record what ranks send to another one, with the bytes of all ranks together."""
        place = origin(self.node)
        tensor = TensorRef("value", f"{what} of {place.module or place.source or 'the step'}")
        meta(start)["boxing"] = Boxing(sbp, sbp, self.dim, self.ranks, tensor, together, place.phase, shifted=True)


class _BalancedRing(_Ring):
    """Emits the steps of attention with a causal mask, in which ranks help each other."""

    def __init__(self, node: fx.Node, context: Context) -> None:
        super().__init__(node, context)
        self.mesh = context.mesh
        self.queries = int(self.arguments["query"].meta["val"].shape[POSITIONS])
        self.rank, self.scale = context.mesh.position[self.dim], self.arguments["scale"]
        self.steps = range(1, self.ranks // 2 + 1)

    def numbers(self, step: int) -> tuple[Any, ...]:
        """Return the arguments of each operator of a step. At the last step two ranks may share queries."""
        begin = 0 if 2 * step < self.ranks else self.queries // 2 if self.queries % 2 == 0 else self.queries
        return self.rank, step, self.ranks, self.channels, begin, self.scale

    def forward(self) -> None:
        query, pair = self.arguments["query"], self.own_pair()
        starts = [self.send(1, pair, [query], None)]
        attended = self.step(ring_attention, (query, pair, None, None, *self.rest[0]), self.results[:2])
        merging: tuple[Any, Any, Any] | None = None
        for step in self.steps:
            buffer = self.flat(WAIT, starts[-1])
            if step < len(self.steps):
                starts.append(self.send(step + 1, pair, [query], None))
            numbers = self.numbers(step)
            part = self.step(balanced_attention, (query, pair, buffer, *numbers), self.parts(self.results[:2], step))
            packed = self.pack([part[0]], part[1], 0)
            nothing = self.flat(aten.slice.Tensor, packed, 1, 0, 0)
            back = self.start(packed, nothing, self.ranks - step, "results of attention")
            if merging is not None:
                attended = self.merge(attended, *merging, last=False)
            merging = part, back, numbers
        assert merging is not None
        self.merge(attended, *merging, last=True)

    def merge(
        self, attended: tuple[fx.Node, ...], part: tuple[fx.Node, ...], back: fx.Node, numbers: Any, *, last: bool
    ) -> tuple[fx.Node, ...]:
        """Emit the merge of a step's results, after they have arrived."""
        arrived = self.flat(WAIT, back)
        arguments = (*attended, *part, arrived, last, *numbers)
        if not last:
            return self.step(merge_balanced, arguments, self.results[:2])
        self.replace(merge_balanced, arguments)
        return ()

    def backward(self) -> None:
        names = "grad_out", "query", "out", "logsumexp"
        grad_out, query, out, lse = (self.arguments[name] for name in names)
        placed = self.results[0], (self.results[1][0], self.pair[1])
        pair, sent = self.own_pair(), [query, grad_out, out]
        starts = [self.send(1, pair, sent, lse)]
        total = self.step(ring_attention_backward, (grad_out, query, pair, out, lse, *self.rest[0]), placed)
        adding: tuple[Any, Any, Any] | None = None
        for step in self.steps:
            buffer = self.flat(WAIT, starts[-1])
            if step < len(self.steps):
                starts.append(self.send(step + 1, pair, sent, lse))
            numbers = self.numbers(step)
            arguments = (grad_out, query, pair, out, lse, buffer, *numbers)
            parts = self.step(balanced_backward, arguments, (*self.parts(placed[:1], step), placed[1]))
            packed = self.pack([parts[0]], None, 0)
            back = self.start(packed, parts[1], self.ranks - step, "gradients of attention")
            if adding is not None:
                total = self.add(add_balanced, total, *adding, placed)
            adding = parts, back, numbers
        assert adding is not None
        self.add(add_last_balanced, total, *adding, ())

    def add(
        self,
        target: Any,
        total: tuple[fx.Node, ...],
        parts: tuple[fx.Node, ...],
        back: fx.Node,
        numbers: Any,
        placed: Sequence[Placed],
    ) -> tuple[fx.Node, ...]:
        """Emit the sum of gradients with those of a step, after they have arrived; without ``placed`` the last one."""
        arguments = (*total, *parts, self.flat(WAIT, back), *numbers)
        if placed:
            return self.step(target, arguments, placed)
        self.replace(target, arguments)
        return ()

    def send(self, step: int, pair: fx.Node, tensors: list[fx.Node], lse: fx.Node | None) -> fx.Node:
        """Start to send keys and values, or queries, to the rank that attends to them at a step."""
        packed = self.pack(tensors, lse, self.numbers(step)[4])
        return self.start(pair, packed, step, "keys and values, or queries")

    def pack(self, tensors: list[fx.Node], lse: fx.Node | None, begin: int) -> fx.Node:
        """Emit the queries from ``begin`` on of tensors, in one row of numbers for each row of the batch."""
        return self.flat(pack_queries, tensors, lse, begin)

    def start(self, near: fx.Node, far: fx.Node, distance: int, what: str) -> fx.Node:
        """Start to send ``near`` to the rank at a distance, or ``far`` where the ring closes."""
        start = self.flat(shift_either, near, far, distance, self.ranks, self.group)
        together = nbytes(near.meta["val"]) * (self.ranks - distance) + nbytes(far.meta["val"]) * distance
        self.describe(start, meta(start)["sbp"], what, together)
        return start

    def flat(self, target: Any, *arguments: Any) -> fx.Node:
        """Emit an operator that yields one row of numbers for each row of the batch."""
        sbp = tuple(Split(min(one.dim, 1)) if isinstance(one, Split) else one for one in self.pair[0])
        node = emit(self.node.graph, target, arguments, origin(self.node), sbp=sbp)
        meta(node)["global"] = global_shape(node.meta["val"].shape, sbp, self.mesh)
        return node

    def parts(self, results: Sequence[Placed], step: int) -> list[Placed]:
        """Return SBP and global shape of tensors that have the queries which a rank attends for at a step."""
        rows = own_rows(self.queries, self.numbers(step)[4]) * self.ranks
        return [(sbp, (*shape[:POSITIONS], rows, *shape[POSITIONS + 1 :])) for sbp, shape in results]
