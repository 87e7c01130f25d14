"""Sums over the slices of a batch along one fixed binary tree, whatever number of ranks computes them.

With ``config.virtual_ranks`` every sum over slices adds the same pairs: first slices 2i and 2i + 1, then their sums,
and so on. Of a number of slices that is no power of two, the first ones up to the largest power are such a tree, to
which that of the others is added. A rank that holds all slices of one node of the tree computes that node by itself,
one slice after the other. The nodes of several ranks are added by the same rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("zerograph", "FRAGMENT")
_library.define("sum_in_tree(Tensor parts) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
# The sum of ``parts`` over dimension 0.
sum_in_tree = torch.ops.zerograph.sum_in_tree.default
_library.define(
    "accumulate_in_tree(Tensor(a!) sum, Tensor(b!) partial, Tensor part, Tensor micro_batch, int micro_batches) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Add a micro-batch's part. ``partial`` has room for the sums that wait for others, [levels(micro_batches), *sum.shape];
# ``sum`` is complete after the last micro-batch.
accumulate_in_tree = torch.ops.zerograph.accumulate_in_tree.default


def levels(parts: int) -> int:
    """Return how many partial sums wait for others while parts are added one after the other."""
    return parts.bit_length() - 1


def _sum_in_tree(parts: Tensor) -> Tensor:
    sums: list[Tensor] = []
    for number, part in enumerate(parts.unbind()):
        total, own = part, False
        for _ in range(_complete(number)):
            # A sum of two parts has memory of its own, which the next sums are written to.
            total, own = torch.add(sums.pop(), total, out=total if own else torch.empty_like(total)), True
        sums.append(total)
    total = sums.pop()
    while sums:
        total = sums.pop() + total
    return total.clone() if len(parts) == 1 else total


def _accumulate_in_tree(sum: Tensor, partial: Tensor, part: Tensor, micro_batch: Tensor, micro_batches: int) -> None:
    number = int(micro_batch)
    sums: Sequence[Tensor] = [*partial.unbind(), sum]
    complete = _complete(number)
    if not complete:
        sums[0].copy_(part)
    for level in range(complete):
        torch.add(sums[level], part, out=sums[level + 1] if level + 1 == complete else sums[level])
        part = sums[level]
    if number == micro_batches - 1:
        waiting = [level for level in range(len(sums)) if micro_batches >> level & 1]
        for lower, level in itertools.pairwise(waiting):
            sums[level].add_(sums[lower])


def _complete(number: int) -> int:
    """Return how many sums are complete with the part of this number: the ones at the end of its binary form."""
    return ((number + 1) & ~number).bit_length() - 1


_library.impl("sum_in_tree", _sum_in_tree, "CompositeExplicitAutograd")
_library.impl("accumulate_in_tree", _accumulate_in_tree, "CompositeExplicitAutograd")
torch.library.register_fake("zerograph::sum_in_tree", lambda parts: parts.new_empty(parts.shape[1:]), lib=_library)
torch.library.register_fake("zerograph::accumulate_in_tree", lambda *_: None, lib=_library)
