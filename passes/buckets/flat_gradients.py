"""flatten, its part about gradients: what build() does to many gradients is done once, on flat buckets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.gradient_edits import TOTAL_NORM, Edited, gradient_operands, is_edit, norm_terms
from zerograph.ir.metadata import Origin, TensorRef, meta, origin
from zerograph.ir.rewrite import emit, keywords
from zerograph.ir.sbp import NdSbp, all_broadcast, show
from zerograph.passes.placement.boxing import boxing

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class FlatGradient:
    """The gradient of a bucket.

    Attributes:
        flat: the bucket's parameters at rest.
        reduced: the raw gradients end to end, in the bucket's SBP.
        edited: how the gradient of each parameter was edited, in slot order: the same for all.
    """

    bucket: Bucket
    flat: fx.Node
    reduced: fx.Node
    edited: Sequence[Edited]

    def final(self, graph: fx.Graph) -> fx.Node:
        """What the update reads: the edit, made once at the graph's insertion point."""
        one = self._example
        return self._edit(graph, one.final)

    def term(self, graph: fx.Graph, norm: fx.Node) -> fx.Node | None:
        """What a total norm reads, likewise; None if the bucket has no part in it."""
        end = self._example.norms.get(norm)
        return None if end is None else self._edit(graph, end)

    @property
    def _example(self) -> Edited:
        # Of a 0-d gradient, the numbers that it is computed with have its shape: any other tells them apart.
        return max(self.edited, key=lambda one: one.parameter.meta["val"].dim())

    def is_edited(self, norm: fx.Node) -> bool:
        """Whether a total norm reads something else than the raw gradient."""
        return self._example.norms[norm] is not self._example.raw

    def _edit(self, graph: fx.Graph, end: fx.Node) -> fx.Node:
        raw = self.reduced
        if raw.meta["val"].dtype is not self.bucket.dtype:
            # Only now: until somebody reads it, the gradient is held as it travelled.
            raw = emit(graph, aten._to_copy.default, (raw,), Origin("update"), dtype=self.bucket.dtype)
        flat = self.flat
        if self.bucket.storage_device != self.bucket.device:
            # Few edits read the parameters; of the others' nobody reads this.
            flat = emit(graph, aten._to_copy.default, (flat,), Origin("update"), device=self.bucket.device)
        return _replay(graph, end, {self._example.raw: raw, self._example.parameter: flat}, self.bucket)


def _replay(graph: fx.Graph, node: fx.Node, done: dict[fx.Node, fx.Node], bucket: Bucket) -> fx.Node:
    if node not in done:
        if node.target is aten.full.default:
            done[node] = emit(graph, node.target, (list(bucket.shape), node.args[1]), origin(node), **keywords(node))
        else:
            flat = {given: _replay(graph, given, done, bucket) for given in gradient_operands(node)}
            args, kwargs = fx.map_arg((node.args, keywords(node)), lambda given: flat.get(given, given))
            done[node] = emit(graph, node.target, args, origin(node), **kwargs)
    return done[node]


def settle_total_norms(graph: fx.Graph, gradients: Sequence[FlatGradient], mesh_dims: int) -> None:
    """Each total norm is a sum over this rank's part of every bucket, and one boxing of a scalar."""
    for norm in graph.find_nodes(op="call_function", target=TOTAL_NORM):
        with graph.inserting_before(norm):
            total = _total_norm(graph, norm, gradients, mesh_dims)
        norm.replace_all_uses_with(total)
        graph.erase_node(norm)


def drop_unread_edits(graph: fx.Graph) -> None:
    """Edits that were made on buckets are not made on single gradients too. A write to a buffer is read by the user."""
    for node in reversed(list(graph.nodes)):
        if is_edit(node) and not node.users and node.target is not aten.copy_.default:
            graph.erase_node(node)


def _total_norm(graph: fx.Graph, norm: fx.Node, gradients: Sequence[FlatGradient], mesh_dims: int) -> fx.Node:
    maker = _Norm(graph, norm, float(norm.args[1]), mesh_dims)  # type: ignore[arg-type]
    apart = Counter(norm_terms(norm))
    flat = []
    for gradient in gradients:
        term = gradient.term(graph, norm)
        if term is not None:
            apart -= Counter(one.norms[norm] for one in gradient.edited)
            if maker.counts(gradient.bucket.padded):
                flat.append(maker.part(gradient, term))
    found = [maker.boxed(flat)] if flat else []
    # In nobody's bucket: gradients without an optimizer, and those that were edited in ways of their own.
    found += [maker.whole(term) for term in apart.elements() if maker.counts(term.meta["val"].numel())]
    return maker.root(found) if found else maker.nothing()


@dataclass(frozen=True)
class _Norm:
    """Emits one p-norm. Sums are in fp64, which hides how the terms lie in buckets; a maximum is exact anyway."""

    graph: fx.Graph
    norm: fx.Node
    p: float
    mesh_dims: int

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, target, args, origin(self.norm), **kwargs)

    def counts(self, elements: int) -> bool:
        """Whether so many elements have a share: no largest one is among none."""
        return elements > 0 or not math.isinf(self.p)

    def nothing(self) -> fx.Node:
        value = self.norm.meta["val"]
        return self.emit(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device, pin_memory=False)

    def part(self, gradient: FlatGradient, term: fx.Node) -> fx.Node:
        """The bucket's share: a partial sum, or of a maximum the largest element on each rank, S(0).

        A whole bucket is summed in the same pieces as a split one, so that the stages agree bitwise.
        """
        bucket = gradient.bucket
        if bucket.padded > bucket.numel and gradient.is_edited(self.norm):
            term = self.without_padding(term, bucket)
        if bucket.sbp != bucket.split_sbp:
            term = self.box(term, bucket.split_sbp, TensorRef("gradient", bucket.name))
        if not math.isinf(self.p):
            return self.summed(term)
        rows = self.emit(aten.view.default, term, [*bucket.shape[:-1], bucket.ranks, bucket.padded // bucket.ranks])
        largest = self.widest(self.emit(aten.amax.default, self.emit(aten.abs.default, rows), [-1]))
        if bucket.rows is None:
            return largest
        across = self.box(
            largest, all_broadcast(self.mesh_dims), TensorRef("value", "the largest gradient of each rank")
        )
        # As many as the others have, so that they go together.
        return self.emit(aten.expand.default, self.emit(aten.amax.default, across, [0, 1]), [bucket.ranks])

    def without_padding(self, term: fx.Node, bucket: Bucket) -> fx.Node:
        """An edit may make something of the zeros between and behind the gradients."""
        options = {"device": bucket.device, "pin_memory": False}
        places = self.emit(aten.arange.default, bucket.padded, **options)
        zero = self.emit(aten.full.default, [], 0.0, dtype=term.meta["val"].dtype, **options)
        for start, end in bucket.gaps:
            behind = self.emit(aten.ge.Scalar, places, start)
            inside = self.emit(aten.logical_and.default, behind, self.emit(aten.lt.Scalar, places, end))
            term = self.emit(aten.where.self, inside, zero, term)
        return term

    def whole(self, term: fx.Node) -> fx.Node:
        """The share of a gradient that lies in no bucket."""
        if math.isinf(self.p):
            dims = list(range(term.meta["val"].dim()))
            return self.widest(self.emit(aten.amax.default, self.emit(aten.abs.default, term), dims))
        return self.summed(term)

    def summed(self, term: fx.Node) -> fx.Node:
        value = term.meta["val"]
        if value.dtype in (torch.float16, torch.bfloat16):
            term = self.emit(aten._to_copy.default, term, dtype=torch.float32)
        if self.p == 2:
            if value.dtype.is_complex:
                term = self.emit(aten.abs.default, term)
            term = self.emit(aten.mul.Tensor, term, term)
        else:
            term = self.emit(aten.abs.default, term)
            if self.p != 1:
                term = self.emit(aten.pow.Tensor_Scalar, term, self.p)
        return self.emit(aten.sum.dim_IntList, term, list(range(value.dim())), False, dtype=torch.float64)

    def widest(self, value: fx.Node) -> fx.Node:
        dtype = self.norm.meta["val"].dtype
        return value if value.meta["val"].dtype == dtype else self.emit(aten._to_copy.default, value, dtype=dtype)

    def boxed(self, shares: Sequence[fx.Node]) -> fx.Node:
        """All buckets' shares as one number that every rank has."""
        if math.isinf(self.p):
            rows = self.emit(aten.stack.default, list(shares), 1)
            largest = self.box(
                self.emit(aten.amax.default, rows, [1]),
                all_broadcast(self.mesh_dims),
                TensorRef("value", "the largest gradient of each rank"),
            )
            return self.emit(aten.amax.default, largest, [0])
        return self.box(
            self.folded(aten.add.Tensor, shares),
            all_broadcast(self.mesh_dims),
            TensorRef("value", "the gradients' norm"),
        )

    def root(self, shares: Sequence[fx.Node]) -> fx.Node:
        if math.isinf(self.p):
            return self.folded(aten.maximum.default, shares)
        total = self.folded(aten.add.Tensor, shares)
        if self.p == 2:
            total = self.emit(aten.sqrt.default, total)
        elif self.p != 1:
            total = self.emit(aten.pow.Tensor_Scalar, total, 1 / self.p)
        return self.widest(total)

    def folded(self, operator: Callable[..., Any], shares: Sequence[fx.Node]) -> fx.Node:
        total = shares[0]
        for share in shares[1:]:
            total = self.emit(operator, total, share)
        return total

    def box(self, source: fx.Node, sbp: NdSbp, tensor: TensorRef) -> fx.Node:
        made = self.emit(boxing, source, show(sbp))
        meta(made)["target_sbp"] = sbp
        meta(made)["tensor"] = tensor
        return made
