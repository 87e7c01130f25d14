"""Sums over the slices of a batch along one fixed binary tree, whatever number of ranks computes them.

With ``config.virtual_ranks`` every sum over slices adds the same pairs: first slices 2i and 2i + 1, then their sums,
and so on. Of a number of slices that is no power of two, the first ones up to the largest power are such a tree, to
which that of the others is added. A rank computes the largest nodes of the tree of which it holds all slices, one slice
after the other; these are added by the same rule. A node is a range of slices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.ir.mesh import most_slices, own_slices
from zerograph.ops.definition import define


@functools.cache
def nodes(first: int, end: int, slices: int) -> tuple[tuple[int, int], ...]:
    """Return the largest nodes of the tree over ``slices`` in the range of slices from ``first`` up to ``end``."""
    found: list[tuple[int, int]] = []
    for number in range(first, end):
        begin = number
        while found and _is_node(found[-1][0], number + 1, slices):
            begin = found.pop()[0]
        found.append((begin, number + 1))
    return tuple(found)


def nodes_per_rank(slices: int, ranks: int) -> int:
    """Return the largest number of nodes that a rank holds after its last slice."""
    return max(len(nodes(*own_slices(slices, ranks, rank), slices)) for rank in range(ranks))


def levels(slices: int, ranks: int) -> int:
    """Return how many sums wait for others at most, besides those that a rank holds after its last slice."""
    parts = [own_slices(slices, ranks, rank) for rank in range(ranks)]
    waiting = max(len(nodes(first, number + 1, slices)) for first, end in parts for number in range(first, end))
    return waiting - nodes_per_rank(slices, ranks)


def _is_node(first: int, end: int, slices: int) -> bool:
    width = 1 << (end - first - 1).bit_length()
    return first % width == 0 and (end - first == width or end == slices)


def _sum_in_tree(parts: Sequence[Tensor], slices: int) -> Tensor:
    sums: list[tuple[int, Tensor]] = []
    for rank in range(len(parts[0])):
        own = own_slices(slices, len(parts[0]), rank)
        for part, (begin, end) in zip(parts, nodes(*own, slices), strict=False):
            total, is_new, first = part[rank], False, begin
            while sums and _is_node(sums[-1][0], end, slices):
                # A sum of two parts has memory of its own, which the next sums are written to.
                first, left = sums.pop()
                total, is_new = torch.add(left, total, out=total if is_new else torch.empty_like(total)), True
            sums.append((first, total))
    ((_, total),) = sums
    return total if is_new else total.clone()


def _accumulate_in_tree(
    sum: Tensor, partial: Tensor, part: Tensor, micro_batch: Tensor, slices: int, ranks: int, rank: int
) -> None:
    first, end = own_slices(slices, ranks, rank)
    number = max(first, end - most_slices(slices, ranks) + int(micro_batch))
    sums = [*(sum.unbind() if sum.dim() > part.dim() else [sum]), *partial.unbind()]
    top = len(nodes(first, number, slices))
    complete = top + 1 - len(nodes(first, number + 1, slices))
    if not complete:
        sums[top].copy_(part)
    for level in range(top - 1, top - 1 - complete, -1):
        sums[level].add_(part)
        part = sums[level]


# The sum of all ranks' nodes. ``parts[n][r]`` is node n of rank r, if that rank has so many.
sum_in_tree = define(
    "sum_in_tree",
    "(Tensor[] parts, int slices) -> Tensor",
    _sum_in_tree,
    lambda parts, slices: parts[0].new_empty(parts[0].shape[1:]),
)
# Add a micro-batch's part, that of a slice of the rank. After the last one ``sum`` is the rank's node, or
# [n, *part.shape] has its nodes. Sums that wait for others are in ``sum`` and ``partial``, [levels, *part.shape].
# On a rank that has fewer slices than others, the first micro-batch is none of its own. What it adds is overwritten.
accumulate_in_tree = define(
    "accumulate_in_tree",
    "(Tensor(a!) sum, Tensor(b!) partial, Tensor part, Tensor micro_batch, int slices, int ranks, int rank) -> ()",
    _accumulate_in_tree,
    lambda *_: None,
)
