"""Gradient edits and total norms of ``build()``, computed once per bucket instead of once per parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.errors import ConfigError
from zerograph.ir.buckets import Bucket
from zerograph.ir.gradient_edits import TOTAL_NORM, Edited, gradient_operands, is_edit, norm_terms
from zerograph.ir.metadata import Origin, TensorRef, origin
from zerograph.ir.rewrite import emit, keywords, replace_node
from zerograph.ir.sbp import NdSbp, all_broadcast
from zerograph.passes.edits import on_device
from zerograph.passes.placement.boxing import emit_boxing

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class FlatGradient:
    """The gradient of a bucket.

    Attributes:
        bucket: the bucket.
        flat: the bucket's parameters as they are stored.
        reduced: the raw gradients, concatenated, in the bucket's SBP.
        edited: how the gradient of each parameter was edited, in slot order. The edits are the same for all.
    """

    bucket: Bucket
    flat: fx.Node
    reduced: fx.Node
    edited: Sequence[Edited]

    def final(self, graph: fx.Graph) -> fx.Node:
        """Emit the edited gradient, which the update reads, at the graph's insertion point."""
        return self._edit(graph, self._example.final)

    def term(self, graph: fx.Graph, norm: fx.Node) -> fx.Node | None:
        """Emit the gradient that a total norm reads; return None if the norm does not read this bucket."""
        end = self._example.norms.get(norm)
        return None if end is None else self._edit(graph, end)

    @property
    def _example(self) -> Edited:
        # For a 0-d gradient the numbers that it is computed with have its shape. Any other gradient tells them apart.
        return max(self.edited, key=lambda edited: edited.parameter.meta["val"].dim())

    def is_edited(self, norm: fx.Node) -> bool:
        """Return whether a total norm reads the gradient after an edit."""
        return self._example.norms[norm] is not self._example.raw

    def _edit(self, graph: fx.Graph, end: fx.Node) -> fx.Node:
        raw = self.reduced
        if raw.meta["val"].dtype is not self.bucket.dtype:
            # The cast comes as late as possible: the gradient is stored in the dtype of the reduction until it is read.
            raw = emit(graph, aten._to_copy.default, (raw,), Origin("update"), dtype=self.bucket.dtype)
        # Few edits read the parameters; otherwise this copy is dead and removed.
        flat = on_device(self.flat, self.bucket.device, Origin("update"))
        return _replay(graph, end, {self._example.raw: raw, self._example.parameter: flat}, self.bucket)


def _replay(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], bucket: Bucket) -> fx.Node:
    if node not in copies:
        if node.target is aten.full.default:
            copies[node] = emit(graph, node.target, (list(bucket.shape), node.args[1]), origin(node), **keywords(node))
        else:
            flat = {source: _replay(graph, source, copies, bucket) for source in gradient_operands(node)}
            args, kwargs = fx.map_arg((node.args, keywords(node)), lambda source: flat.get(source, source))
            copies[node] = emit(graph, node.target, args, origin(node), **kwargs)
    return copies[node]


def compute_total_norms(graph: fx.Graph, gradients: Sequence[FlatGradient], mesh_dims: int, *, in_blocks: bool) -> None:
    """Replace each total norm by a sum over this rank's part of every bucket, and one boxing of a scalar.

    Args:
        graph: the step graph.
        gradients: the gradients of the buckets.
        mesh_dims: number of mesh dimensions.
        in_blocks: add in an order that does not depend on the number of ranks.

    Raises:
        ConfigError: with ``in_blocks``, parameters have owners, whose number decides where they are in the bucket.
    """
    for norm in graph.find_nodes(op="call_function", target=TOTAL_NORM):
        with graph.inserting_before(norm):
            total = _total_norm(graph, norm, gradients, mesh_dims, in_blocks=in_blocks)
        replace_node(norm, total)


def drop_unread_edits(graph: fx.Graph) -> None:
    """Erase edits of single gradients that nobody reads. Writes to buffers stay: the user reads them."""
    for node in reversed(list(graph.nodes)):
        if is_edit(node) and not node.users and node.target is not aten.copy_.default:
            graph.erase_node(node)


def _total_norm(
    graph: fx.Graph, norm: fx.Node, gradients: Sequence[FlatGradient], mesh_dims: int, *, in_blocks: bool
) -> fx.Node:
    emitter = _Norm(graph, norm, float(norm.args[1]), mesh_dims, in_blocks)  # type: ignore[arg-type]
    single = Counter(norm_terms(norm))
    bucket_terms = []
    for gradient in gradients:
        term = gradient.term(graph, norm)
        if term is not None:
            single -= Counter(edited.norms[norm] for edited in gradient.edited)
            if emitter.counts(gradient.bucket.padded):
                bucket_terms.append(emitter.part(gradient, term))
    terms = [emitter.boxed(bucket_terms)] if bucket_terms else []
    # Gradients in no bucket: those without an optimizer, and those that were edited differently.
    terms += [emitter.whole(term) for term in single.elements() if emitter.counts(term.meta["val"].numel())]
    return emitter.root(terms) if terms else emitter.nothing()


def rows_add_alike(device: torch.device) -> bool:
    """Return whether a sum along rows adds each row in an order that does not depend on the number of rows."""
    return device.type == "cpu"


@dataclass(frozen=True)
class _Norm:
    """Emits one p-norm. Sums are in fp64, which hides the order of the terms; a maximum is exact in any order."""

    graph: fx.Graph
    norm: fx.Node
    p: float
    mesh_dims: int
    in_blocks: bool

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, target, args, origin(self.norm), **kwargs)

    def counts(self, elements: int) -> bool:
        """Return whether this many elements contribute: the maximum over no elements is undefined."""
        return elements > 0 or not math.isinf(self.p)

    def nothing(self) -> fx.Node:
        value = self.norm.meta["val"]
        return self.emit(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device, pin_memory=False)

    def part(self, gradient: FlatGradient, term: fx.Node) -> fx.Node:
        """Emit the bucket's contribution: a partial sum; for a maximum the largest element of each rank, S(0).

        A whole bucket is summed in the same pieces as a split one, so that the stages agree bitwise.
        """
        bucket = gradient.bucket
        if bucket.padded > bucket.numel and gradient.is_edited(self.norm):
            term = self.without_padding(term, bucket)
        if bucket.sbp != bucket.split_sbp:
            term = self.box(term, bucket.split_sbp, TensorRef("gradient", bucket.name))
        if not math.isinf(self.p):
            return self.summed_in_blocks(term, bucket) if self.in_blocks else self.summed(term)
        rows = self.emit(aten.view.default, term, [*bucket.shape[:-1], bucket.ranks, bucket.padded // bucket.ranks])
        largest = self.largest(rows, [-1])
        if bucket.rows is None:
            return largest
        across = self.everywhere(largest, "the largest gradient of each rank")
        # The shape of the other contributions, so that they can be stacked.
        return self.emit(aten.expand.default, self.emit(aten.amax.default, across, [0, 1]), [bucket.ranks])

    def without_padding(self, term: fx.Node, bucket: Bucket) -> fx.Node:
        """Emit the term with zeros in the padding, which an edit may have changed."""
        options = {"device": bucket.device, "pin_memory": False}
        positions = self.emit(aten.arange.default, bucket.padded, **options)
        zero = self.emit(aten.full.default, [], 0.0, dtype=term.meta["val"].dtype, **options)
        for start, end in bucket.gaps:
            after_start = self.emit(aten.ge.Scalar, positions, start)
            inside = self.emit(aten.logical_and.default, after_start, self.emit(aten.lt.Scalar, positions, end))
            term = self.emit(aten.where.self, inside, zero, term)
        return term

    def whole(self, term: fx.Node) -> fx.Node:
        """Emit the contribution of a gradient that is in no bucket."""
        return self.largest(term, list(range(term.meta["val"].dim()))) if math.isinf(self.p) else self.summed(term)

    def largest(self, term: fx.Node, dims: list[int]) -> fx.Node:
        """Emit the largest absolute values along dimensions."""
        return self.in_dtype(self.emit(aten.amax.default, self.emit(aten.abs.default, term), dims))

    def summed_in_blocks(self, term: fx.Node, bucket: Bucket) -> fx.Node:
        """Emit the sum over a bucket as every rank has it: of blocks at fixed places, then of their sums."""
        if bucket.has_owners:
            raise ConfigError(
                "config.virtual_ranks: a norm of gradients adds up parameters that ranks own whole, in an order that "
                f"depends on the number of ranks\n{bucket.slots[0].name} has an owner: set "
                "config.zero.shard_by = 'elements' and take an elementwise optimizer, or do not clip."
            )
        size = bucket.norm_block
        blocks = self.emit(aten.view.default, self.powers(term), [bucket.padded // size, size])
        if rows_add_alike(bucket.device):
            sums = self.emit(aten.sum.dim_IntList, blocks, [1], False, dtype=torch.float64)
        else:
            sums = self.halved(blocks, size)
        whole = self.everywhere(sums, "the gradients' norm")
        used = self.emit(aten.slice.Tensor, whole, 0, 0, -(-bucket.numel // bucket.norm_block))
        return self.emit(aten.sum.dim_IntList, used, [0])

    def halved(self, blocks: fx.Node, size: int) -> fx.Node:
        """Emit the sums of rows, whose halves are added again and again, in fp64."""
        while size > 1:
            size //= 2
            left, right = (self.emit(aten.slice.Tensor, blocks, 1, start, start + size) for start in (0, size))
            blocks = self.emit(aten.add.Tensor, self.in_dtype(left, torch.float64), right)
        return self.emit(aten.select.int, blocks, 1, 0)

    def summed(self, term: fx.Node) -> fx.Node:
        dims = list(range(term.meta["val"].dim()))
        return self.emit(aten.sum.dim_IntList, self.powers(term), dims, False, dtype=torch.float64)

    def powers(self, term: fx.Node) -> fx.Node:
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
        return term

    def in_dtype(self, value: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """Emit the value in a dtype; in that of the norm by default."""
        dtype = dtype or self.norm.meta["val"].dtype
        return value if value.meta["val"].dtype == dtype else self.emit(aten._to_copy.default, value, dtype=dtype)

    def boxed(self, shares: Sequence[fx.Node]) -> fx.Node:
        """Emit the sum, or the maximum, of the buckets' contributions, which every rank then has."""
        if math.isinf(self.p):
            rows = self.emit(aten.stack.default, list(shares), 1)
            largest = self.everywhere(self.emit(aten.amax.default, rows, [1]), "the largest gradient of each rank")
            return self.emit(aten.amax.default, largest, [0])
        total = self.folded(aten.add.Tensor, shares)
        return total if self.in_blocks else self.everywhere(total, "the gradients' norm")

    def root(self, shares: Sequence[fx.Node]) -> fx.Node:
        if math.isinf(self.p):
            return self.folded(aten.maximum.default, shares)
        total = self.folded(aten.add.Tensor, shares)
        if self.p == 2:
            total = self.emit(aten.sqrt.default, total)
        elif self.p != 1:
            total = self.emit(aten.pow.Tensor_Scalar, total, 1 / self.p)
        return self.in_dtype(total)

    def folded(self, operator: Callable[..., Any], shares: Sequence[fx.Node]) -> fx.Node:
        total = shares[0]
        for share in shares[1:]:
            total = self.emit(operator, total, share)
        return total

    def everywhere(self, source: fx.Node, what: str) -> fx.Node:
        """Emit the boxing after which every rank has the whole value."""
        return self.box(source, all_broadcast(self.mesh_dims), TensorRef("value", what))

    def box(self, source: fx.Node, sbp: NdSbp, tensor: TensorRef) -> fx.Node:
        return emit_boxing(self.graph, source, sbp, tensor, origin(self.norm))
