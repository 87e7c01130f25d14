"""The nodes that replace one boxing node; boxing along symbolic sizes, of which ranks may hold unequal parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.ir.dims import Size
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import Boxing, meta
from zerograph.ir.rewrite import emit_like
from zerograph.ir.rows import gather_rows
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Split, broadcast
from zerograph.ir.sizes import sizes_of
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
        sbp = list(self.change.source)
        sbp[self.change.dim] = broadcast
        return local_shape(meta(self.node)["global"], sbp, self.context.mesh)

    @property
    def rank(self) -> int:
        """Position of this rank along it."""
        return self.context.mesh.position[self.change.dim]

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

    def rearranged(self, source: fx.Node, cut: int, join: int) -> fx.Node:
        """Cut ``source`` along ``cut`` into one equal part per rank; concatenate the parts along ``join``."""
        if cut == join:
            return source
        size = source.meta["val"].shape[cut] // self.ranks
        parts = [self.emit(aten.slice.Tensor, source, cut, i * size, (i + 1) * size) for i in range(self.ranks)]
        return self.emit(aten.cat.default, parts, join)

    def gathered(self, source: fx.Node, dim: int) -> fx.Node:
        """Gather a tensor that is split in equal parts along ``dim``."""
        whole = self.collective(c10d.all_gather_into_tensor.default, self.contiguous(source), self.ranks)
        return self.rearranged(whole, cut=0, join=dim)

    def all_reduced(self, source: fx.Node) -> fx.Node:
        """Sum a tensor over the ranks."""
        return self.collective(c10d.all_reduce.default, self.contiguous(source), "sum")

    def own_part(self, whole: fx.Node, dim: int) -> fx.Node:
        """Take this rank's part of a tensor, of which each has an equal part along ``dim``."""
        size = whole.meta["val"].shape[dim] // self.ranks
        start = self.rank * size
        return self.cut(aten.slice.Tensor, whole, dim, start, start + size, rank_arguments=(2, 3))

    def cut(self, target: Any, *args: Any, rank_arguments: tuple[int, ...]) -> fx.Node:
        """Emit the operator that takes this rank's part; the arguments at ``rank_arguments`` differ between ranks."""
        part = self.emit(target, *args)
        meta(part)["boxing"] = self.change
        meta(part)["rank_arguments"] = rank_arguments
        return self.contiguous(part)


def is_symbolic(size: Size) -> bool:
    """Return whether ranks may hold unequal parts of a dimension of this global size, or parts of symbolic size."""
    return not isinstance(size, int)


def lower_symbolic(lower: Lowering, source: fx.Node, before: Sbp, after: Sbp) -> fx.Node:
    """Return the tensor in the SBP ``after``, where either SBP splits a row dimension.

    A sum that is to be split is summed whole; what is split along another dimension is gathered first.
    """
    shape, whole = lower.together, source
    if isinstance(before, PartialSum):
        whole = lower.all_reduced(source)
    elif isinstance(before, Split):
        dim, size = before.dim, shape[before.dim]
        whole = lower.gathered(source, dim) if isinstance(size, int) else _gather_rows(lower, source, dim, size)
    if isinstance(after, Broadcast):
        return whole
    dim = split_dim(after)
    size = shape[dim]
    return lower.own_part(whole, dim) if isinstance(size, int) else _own_rows(lower, whole, dim, size)


def _gather_rows(lower: Lowering, source: fx.Node, dim: int, size: torch.SymInt) -> fx.Node:
    """Gather a tensor that is split along ``dim``, in parts that may be unequal, to the global ``size``."""
    first = source if dim == 0 else lower.emit(aten.transpose.int, source, 0, dim)
    rows = sizes_of(size).parts(size, lower.ranks, lower.change.dim)
    whole = lower.collective(gather_rows, lower.contiguous(first), rows, size)
    return whole if dim == 0 else lower.contiguous(lower.emit(aten.transpose.int, whole, 0, dim))


def _own_rows(lower: Lowering, whole: fx.Node, dim: int, size: torch.SymInt) -> fx.Node:
    """Take this rank's part along ``dim``, of the global ``size``; parts may be unequal."""
    sizes = sizes_of(size)
    place = size, lower.ranks, lower.change.dim
    return lower.cut(aten.narrow.default, whole, dim, sizes.start(*place), sizes.part(*place), rank_arguments=(2,))


def split_dim(sbp: Sbp) -> int:
    """Return the tensor dimension that is split."""
    assert isinstance(sbp, Split), sbp
    return sbp.dim
