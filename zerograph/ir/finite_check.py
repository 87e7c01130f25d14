"""Compute in the step graph whether loss and gradients are finite, as one number: the *residue*.

The residue is 0 if all of them are finite, else NaN. Only arithmetic leads to it, so that ``runtime.find_nonfinite``
can follow a value that is not finite back through the graph, operator by operator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.ir.gradient_edits import TOTAL_NORM
from zerograph.ir.metadata import Role

# Outputs of the captured graph; ``skip_overflowed_update`` adds the second to the first.
NOT_FINITE = Role("check", "not_finite")
SCALED_GRADIENTS = Role("check", "scaled_gradients")


@dataclass(frozen=True, eq=False)
class Overflow:
    """Overflow in the scaled gradients of one optimizer.

    Attributes:
        optimizer: name of the optimizer; ``""`` if there is only one.
        largest: largest magnitude among the gradients, 0-d.
        flag: 1.0 if ``largest`` is infinite or NaN, else 0.0; 0-d.
    """

    optimizer: str
    largest: Tensor
    flag: Tensor


@torch.no_grad()
def residues(
    losses: Sequence[Tensor], gradients: Sequence[Tensor], overflows: Sequence[Overflow]
) -> list[tuple[Role, Tensor]]:
    """Return the residues as outputs of the graph with their roles, 0-d and fp32; none if there is nothing to check.

    Args:
        losses: tensors that must be finite.
        gradients: the gradients as the update reads them.
        overflows: the overflow of each optimizer under loss scaling. It is the scaler's to handle, and so has a
            residue of its own.
    """
    # The same tensor must not be reduced twice.
    distinct = {id(loss): loss for loss in losses if has_fractions(loss)}
    values = [_residue(loss.detach()) for loss in distinct.values()]
    if gradients:
        gradient = _residue(TOTAL_NORM(list(gradients), float("inf")))
        for overflow in overflows:
            gradient = torch.where(overflow.flag != 0, torch.zeros_like(gradient), gradient)
        values.append(gradient)
    if not values:
        return []
    total = _sum(values)
    if not overflows:
        return [(NOT_FINITE, total)]
    return [(SCALED_GRADIENTS, _sum([_residue(overflow.largest) for overflow in overflows])), (NOT_FINITE, total)]


def has_fractions(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors; the elements of others are always finite."""
    return tensor.is_floating_point() or tensor.is_complex()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


def _residue(value: Tensor) -> Tensor:
    # The magnitude makes a partial sum be all-reduced first, as for its other readers.
    zero = value.abs() * 0
    return (zero.sum() if zero.dim() else zero).float()
