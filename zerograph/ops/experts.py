"""Products of tokens with the weights of the experts that a router chose for them.

Experts form groups of equally many, and every result has a leading dimension of groups: zero where a token's expert is
in another group. Along that dimension ranks split the experts, each computes the products of its own, and a sum over
groups is a sum over ranks. The products are those of a loop over experts: no token is dropped, none is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("zerograph::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, ids: Tensor, total: int, first: int) -> Tensor:
    """Return the product of each token with each of its experts: [groups, tokens, choices, out].

    Args:
        x: tokens [tokens, in], or those of each group [groups, tokens, in], or one row for each expert of a token,
            [groups, tokens, choices, in].
        weight: [groups, experts of a group, in, out].
        ids: number of each expert that a token goes to [tokens, choices].
        total: number of experts of all ranks.
        first: number of the first group in ``weight``.
    """
    routes = _Routes(ids, weight.shape[0], weight.shape[1], first)
    result = routes.products(routes.rows_of(x), weight.flatten(0, 1))
    return routes.scattered(result)


@torch.library.custom_op("zerograph::expert_mm_summed", mutates_args=())
def expert_mm_summed(x: Tensor, weight: Tensor, ids: Tensor, total: int, first: int) -> Tensor:
    """Return :func:`expert_mm` summed over the experts of each token: [tokens, out]."""
    result: Tensor = expert_mm(x, weight, ids, total, first).sum((0, 2))
    return result


@torch.library.custom_op("zerograph::expert_weight_gradient", mutates_args=())
def expert_weight_gradient(x: Tensor, gradient: Tensor, ids: Tensor, experts: int, total: int, first: int) -> Tensor:
    """Return the gradient of the weight of :func:`expert_mm`: [groups, experts of a group, in, out].

    Args:
        x, ids, total, first: as there.
        gradient: the gradient of the result.
        experts: number of experts of a group.
    """
    routes = _Routes(ids, gradient.shape[0], experts, first)
    result = routes.outer_products(routes.rows_of(x), routes.rows_of(gradient))
    return result.view(gradient.shape[0], experts, *result.shape[1:])


class _Routes:
    """The pairs of a token and an expert of these groups, in the order of experts.

    Attributes:
        order: number of each pair among all pairs; those of other groups come last.
        experts: the expert of each pair, counted from the first of these groups.
        ends: end of each expert's pairs in that order.
    """

    def __init__(self, ids: Tensor, groups: int, per_group: int, first: int) -> None:
        self.choices, self.groups, self.per_group = ids.shape[1], groups, per_group
        count = groups * per_group
        number = ids.reshape(-1) - first * per_group
        number = torch.where((number >= 0) & (number < count), number, count)
        self.experts, self.order = number.sort(stable=True)
        self.ends = torch.searchsorted(self.experts, torch.arange(count, device=ids.device), right=True)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the row of each pair: [pairs, width]."""
        if x.dim() == 2:
            return x[self.order // self.choices]
        if x.dim() == 3:
            return x.flatten(0, 1)[self._places() // self.choices]
        return x.flatten(0, -2)[self._places()]

    def scattered(self, rows: Tensor) -> Tensor:
        """Return the row of each pair in its group, zero in other groups: [groups, tokens, choices, width]."""
        pairs = len(self.order)
        shape = self.groups * pairs, rows.shape[1]
        # One group has a row of every pair.
        result = rows.new_empty(shape) if self.groups == 1 else rows.new_zeros(shape)
        result.index_copy_(0, self._places(), rows)
        return result.view(self.groups, pairs // self.choices, self.choices, rows.shape[1])

    def _places(self) -> Tensor:
        """Return the index of each pair in [groups, pairs]; pairs of other groups, of zeros, are in the last one."""
        group = (self.experts // self.per_group).clamp(max=self.groups - 1)
        return group * len(self.order) + self.order

    def products(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the product of each pair's row with its expert's weight, of [experts, in, out]; 0 for other groups."""
        grouped = _grouped_mm(rows, weight)
        if grouped is not None:
            others = self.experts == self.groups * self.per_group
            return grouped(rows, weight, offs=self.ends.int()).masked_fill_(others.unsqueeze(1), 0)
        result, start = rows.new_empty(len(rows), weight.shape[2]), 0
        for expert, end in enumerate(self.ends.tolist()):
            if start < end:
                torch.mm(rows[start:end], weight[expert], out=result[start:end])
            start = end
        result[start:].zero_()
        return result

    def outer_products(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """Return the sum of each expert's outer products: [experts, in, out]."""
        grouped = _grouped_mm(rows, gradients)
        if grouped is not None:
            return grouped(rows.t(), gradients, offs=self.ends.int())
        result, start = rows.new_zeros(len(self.ends), rows.shape[1], gradients.shape[1]), 0
        for expert, end in enumerate(self.ends.tolist()):
            if start < end:
                torch.mm(rows[start:end].t(), gradients[start:end], out=result[expert])
            start = end
        return result


def _grouped_mm(left: Tensor, right: Tensor) -> Callable[..., Tensor] | None:
    """Return torch's grouped product, which reads no value on the host; None where it does not take these tensors."""
    aligned = all(size % 8 == 0 for size in (left.shape[-1], *right.shape[-2 if right.dim() == 3 else -1 :]))
    if left.is_cuda and left.dtype is torch.bfloat16 and aligned:
        return getattr(F, "grouped_mm", None)
    return None


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, total: int, first: int) -> Tensor:
    return x.new_empty((weight.shape[0], *ids.shape, weight.shape[3]))


@expert_mm_summed.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, total: int, first: int) -> Tensor:
    return x.new_empty((ids.shape[0], weight.shape[3]))


@expert_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, ids: Tensor, experts: int, total: int, first: int) -> Tensor:
    return x.new_empty((gradient.shape[0], experts, x.shape[-1], gradient.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ids, ctx.total, ctx.first = inputs
    ctx.save_for_backward(x, weight, ids)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    numbers = ctx.total, ctx.first
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        product = expert_mm_summed if x.dim() == 2 else expert_mm
        of_x = product(gradient, weight.transpose(2, 3), ids, *numbers)
        of_x = of_x.sum(2) if x.dim() == 3 else of_x
    if ctx.needs_input_grad[1]:
        of_weight = expert_weight_gradient(x, gradient, ids, weight.shape[1], *numbers)
    return of_x, of_weight, None, None, None


expert_mm.register_autograd(_backward, setup_context=_save)

# The operators in a graph.
EXPERT_MM = torch.ops.zerograph.expert_mm.default
EXPERT_MM_SUMMED = torch.ops.zerograph.expert_mm_summed.default
EXPERT_WEIGHT_GRADIENT = torch.ops.zerograph.expert_weight_gradient.default
# Position of the argument ``first`` of each.
FIRST: dict[Any, int] = {EXPERT_MM: 4, EXPERT_MM_SUMMED: 4, EXPERT_WEIGHT_GRADIENT: 5}


def _flops(pairs: Sequence[int], weight: Sequence[int], total: int) -> int:
    """Return the operations if each expert has equally many tokens."""
    groups, experts, rows, columns = weight
    return 2 * pairs[0] * pairs[1] * rows * columns * groups * experts // total


@register_flop_formula([torch.ops.zerograph.expert_mm, torch.ops.zerograph.expert_mm_summed])
def _(x: Any, weight: Any, ids: Any, total: int, *_: Any, **__: Any) -> int:
    return _flops(ids, weight, total)


@register_flop_formula(torch.ops.zerograph.expert_weight_gradient)
def _(x: Any, gradient: Any, ids: Any, experts: int, total: int, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _flops(ids, (gradient[0], experts, x[-1], gradient[-1]), total)
