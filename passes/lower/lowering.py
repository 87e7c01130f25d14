"""The nodes that replace one boxing node; boxing along symbolic sizes, of which ranks may hold unequal parts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerograph.ir.dims import Size
from zerograph.ir.mesh import local_shape, most_slices, own_slices, start_of_slices
from zerograph.ir.metadata import Boxing, meta
from zerograph.ir.rank_numbers import RankArguments, RankNumber, along
from zerograph.ir.rewrite import emit_like
from zerograph.ir.sbp import Broadcast, NdSbp, PartialSum, Sbp, Split, broadcast
from zerograph.ir.sizes import sizes_of
from zerograph.ops.rows import exchange_rows, gather_rows
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Lowering:
    """Emits the nodes that replace one boxing node.

    Attributes:
        graph: the graph.
        node: the boxing node, whose origin, SBP and global shape the new nodes get.
        context: the context of the passes.
        change: the change of SBP.
    """

    graph: fx.Graph
    node: fx.Node
    context: Context
    change: Boxing

    @property
    def ranks(self) -> int:
        """Number of ranks along the mesh dimension that changes."""
        return self.change.ranks

    @property
    def together(self) -> tuple[Size, ...]:
        """The shape that the ranks along it hold together."""
        sbp = with_entry(self.change.source, self.change.dim, broadcast)
        return local_shape(meta(self.node)["global"], sbp, self.context.mesh)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a node of the same global tensor and SBP."""
        return emit_like(self.node, target, *args, **kwargs)

    def collective(self, target: Any, *args: Any) -> fx.Node:
        """Emit an asynchronous collective and its wait; return the wait."""
        start = self.emit(target, *args, self.context.mesh.groups[self.change.dim])
        meta(start)["boxing"] = self.change
        return self.emit(c10d.wait_tensor.default, start)

    def contiguous(self, source: fx.Node) -> fx.Node:
        """Return the tensor in contiguous memory."""
        if source.meta["val"].is_contiguous():
            return source
        return self.emit(aten.clone.default, source, memory_format=torch.contiguous_format)

    def first(self, source: fx.Node, dim: int) -> fx.Node:
        """Exchange dimensions 0 and ``dim``."""
        return self.emit(aten.transpose.int, source, 0, dim) if dim else source

    def part(self, dim: int) -> Size:
        """Return the size of this rank's part of a dimension."""
        size = self.together[dim]
        if isinstance(size, int):
            return self.context.mesh.parts(size, self.change.dim)[self.context.mesh.position[self.change.dim]]
        return sizes_of(size).part(size, self.ranks, self.change.dim)

    def parts(self, dim: int) -> list[Size]:
        """Return the size of each rank's part of a dimension."""
        size = self.together[dim]
        if isinstance(size, int):
            return list(self.context.mesh.parts(size, self.change.dim))
        return sizes_of(size).parts(size, self.ranks, self.change.dim)

    def is_equal(self, dim: int) -> bool:
        """Return whether all ranks' parts of a dimension are equal, and their size is a number."""
        return isinstance(self.together[dim], int) and self.context.mesh.rows is None

    def rearranged(self, source: fx.Node, cut: int, join: int) -> fx.Node:
        """Cut ``source`` along ``cut`` into one equal part per rank; concatenate the parts along ``join``."""
        if cut == join:
            return source
        size = source.meta["val"].shape[cut] // self.ranks
        parts = [self.emit(aten.slice.Tensor, source, cut, i * size, (i + 1) * size) for i in range(self.ranks)]
        return self.emit(aten.cat.default, parts, join)

    def gathered(self, source: fx.Node, dim: int) -> fx.Node:
        """Gather a tensor that is split along ``dim``, maybe in unequal parts."""
        if self.is_equal(dim):
            whole = self.collective(c10d.all_gather_into_tensor.default, self.contiguous(source), self.ranks)
            return self.rearranged(whole, cut=0, join=dim)
        first = self.contiguous(self.first(source, dim))
        whole = self.collective(gather_rows, first, self.parts(dim), self.together[dim])
        return self.contiguous(self.first(whole, dim))

    def reduce_scattered(self, source: fx.Node, dim: int) -> fx.Node:
        """Sum a tensor over the ranks; return this rank's equal part along ``dim``."""
        parts = self.contiguous(self.rearranged(source, cut=dim, join=0))
        return self.collective(c10d.reduce_scatter_tensor.default, parts, "sum", self.ranks)

    def all_reduced(self, source: fx.Node) -> fx.Node:
        """Sum a tensor over the ranks."""
        return self.collective(c10d.all_reduce.default, self.contiguous(source), "sum")

    def own_part(self, whole: fx.Node, dim: int) -> fx.Node:
        """Take this rank's part of a tensor along ``dim``; parts may be unequal."""
        if self.is_equal(dim):
            size = whole.meta["val"].shape[dim] // self.ranks
            begin, end = along(self.change.dim, size), along(self.change.dim, size, size)
            return self.cut(aten.slice.Tensor, whole, dim, begin, end, rank_arguments={2: begin, 3: end})
        together = self.together[dim]
        if isinstance(together, int):
            start: Size = sum(self.parts(dim)[: self.context.mesh.position[self.change.dim]])
        else:
            start = sizes_of(together).start(together, self.ranks, self.change.dim)
        return self.cut(aten.narrow.default, whole, dim, start, self.part(dim), rank_arguments={2: None})

    def cut(self, target: Any, *args: Any, rank_arguments: RankArguments) -> fx.Node:
        """Emit the operator that takes this rank's part; the arguments at ``rank_arguments`` differ between ranks."""
        position = self.context.mesh.position
        part = self.emit(target, *(arg.at(position) if isinstance(arg, RankNumber) else arg for arg in args))
        meta(part)["boxing"] = self.change
        meta(part)["rank_arguments"] = rank_arguments
        if self.context.batch.slices is not None and self.change.tensor.kind == "value":
            # Products of a part that begins in the middle of a vector may round otherwise.
            return self.emit(aten.clone.default, part, memory_format=torch.contiguous_format)
        return self.contiguous(part)


def lower_slices(lower: Lowering, source: fx.Node, before: Sbp, after: Sbp) -> fx.Node:
    """Return rows of the batch in the SBP ``after``, where ranks have unequal numbers of slices."""
    slices = lower.context.mesh_of_rows.slices
    assert slices is not None
    whole = source
    if not isinstance(before, Broadcast):
        target = with_entry(lower.change.target, lower.change.dim, broadcast)
        gather = replace(lower, change=replace(lower.change, target=target))
        whole = (
            _gather_slices(gather, source, before.dim, slices)
            if isinstance(before, Split)
            else gather.all_reduced(source)
        )
    if isinstance(after, Broadcast):
        return whole
    dim = split_dim(after)
    size = whole.meta["val"].shape[dim]
    start, held = start_of_slices(size, slices, lower.ranks), size // slices * most_slices(slices, lower.ranks)
    return lower.cut(aten.narrow.default, whole, dim, start, held, rank_arguments={2: start})


def _gather_slices(lower: Lowering, source: fx.Node, dim: int, slices: int) -> fx.Node:
    """Gather the slices of all ranks, without those that a rank has besides its own."""
    parts = lower.collective(c10d.all_gather_into_tensor.default, lower.contiguous(source), lower.ranks)
    rows, held = lower.together[dim] // slices, source.meta["val"].shape[0]
    own = []
    for rank in range(lower.ranks):
        first, end = own_slices(slices, lower.ranks, rank)
        part = lower.emit(aten.slice.Tensor, parts, 0, rank * held, (rank + 1) * held)
        begin = most_slices(slices, lower.ranks) - (end - first)
        own.append(lower.emit(aten.narrow.default, part, dim, begin * rows, (end - first) * rows))
    return lower.emit(aten.cat.default, own, dim)


def lower_exact(lower: Lowering, source: fx.Node, before: Sbp, after: Sbp) -> fx.Node:
    """Return the tensor in the SBP ``after``; parts may be unequal along a dimension that either SBP splits."""
    match before, after:
        case PartialSum(), Broadcast():
            return lower.all_reduced(source)
        case Split(dim), Broadcast():
            return lower.gathered(source, dim)
        case Broadcast(), Split(dim):
            return lower.own_part(source, dim)
        case PartialSum(), Split(dim) if lower.is_equal(dim):
            return lower.reduce_scattered(source, dim)
        # Gloo has no all-to-all of complex numbers.
        case Split(joined), Split(dim) if (
            lower.is_equal(joined) and lower.is_equal(dim) and not source.meta["val"].is_complex()
        ):
            parts = lower.contiguous(lower.rearranged(source, cut=dim, join=0))
            sizes = [parts.meta["val"].shape[0] // lower.ranks] * lower.ranks
            received = lower.collective(c10d.all_to_all_single.default, parts, sizes, sizes)
            return lower.rearranged(received, cut=0, join=joined)
    return _exchanged(lower, source, before, split_dim(after))


def _exchanged(lower: Lowering, source: fx.Node, before: Sbp, dim: int) -> fx.Node:
    """Send each rank its part along ``dim`` of what this rank holds; sum the parts that arrive, or join them."""
    if not isinstance(before, Split):
        shape = list(source.meta["val"].shape)
        shape[dim] = lower.part(dim)
        parts = _sent(lower, source, dim, lower.parts(dim), [1] * lower.ranks, [lower.ranks, *shape])
        if lower.ranks > 2:
            return lower.emit(aten.sum.dim_IntList, parts, [0], dtype=parts.meta["val"].dtype)
        return lower.emit(aten.add.Tensor, *(lower.emit(aten.select.int, parts, 0, rank) for rank in (0, 1)))
    # Each rank sends a range of rows of the result if the dimension that is joined comes first.
    joined = before.dim
    held, cut = lower.first(source, joined), joined if dim == 0 else dim
    shape = list(held.meta["val"].shape)
    shape[0], shape[cut] = lower.together[joined], lower.part(dim)
    whole = _sent(lower, held, cut, lower.parts(dim), lower.parts(joined), shape)
    return lower.contiguous(lower.first(whole, joined))


def _sent(
    lower: Lowering, source: fx.Node, cut: int, sizes: list[Size], received: list[Size], shape: list[Size]
) -> fx.Node:
    """Send the pieces of ``source``, of these sizes along ``cut``, one to each rank.

    Args:
        received: number of rows of the result that each rank sends here.
        shape: shape of the result.
    """
    others = math.prod(size for dim, size in enumerate(source.meta["val"].shape) if dim != cut)
    if not cut:
        flat = lower.contiguous(source)
    else:
        starts = itertools.accumulate(sizes, initial=0)
        pieces = [lower.emit(aten.narrow.default, source, cut, *place) for place in zip(starts, sizes, strict=False)]
        flat = lower.emit(aten.cat.default, [lower.emit(aten.reshape.default, piece, [-1]) for piece in pieces])
    return lower.collective(exchange_rows, flat, [others * size for size in sizes], received, shape)


def with_entry(sbp: NdSbp, dim: int, entry: Sbp) -> NdSbp:
    """Return an SBP with another entry for one mesh dimension."""
    return (*sbp[:dim], entry, *sbp[dim + 1 :])


def split_dim(sbp: Sbp) -> int:
    """Return the tensor dimension that is split."""
    assert isinstance(sbp, Split), sbp
    return sbp.dim
