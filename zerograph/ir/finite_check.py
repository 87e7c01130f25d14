"""Whether loss and gradients are finite, as one number of the step graph: its *residue*.

The residue is 0 where all of them are finite, and not a number where one is not. It is made by arithmetic alone, so
that what is not finite can be followed back from it through the graph, operator by operator
(``runtime.find_nonfinite``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.ir.gradient_edits import TOTAL_NORM
from zerograph.ir.metadata import Role

# Outputs of the captured graph; ``skip_overflowed_update`` makes the second part of the first.
NOT_FINITE = Role("check", "not_finite")
SCALED_GRADIENTS = Role("check", "scaled_gradients")


@dataclass(frozen=True, eq=False)
class Overflow:
    """Of the scaled gradients of one optimizer, or of the only one, whose name is then ``""``.

    Attributes:
        largest: the largest of them; 0-d.
        found: 1.0 where that is infinite or not a number, else 0.0.
    """

    optimizer: str
    largest: Tensor
    found: Tensor


@torch.no_grad()
def residues(
    losses: Sequence[Tensor], gradients: Sequence[Tensor], overflows: Sequence[Overflow]
) -> list[tuple[Role, Tensor]]:
    """What the graph returns besides, 0-d and fp32: nothing if there is nothing to check.

    Args:
        losses: tensors that must be finite.
        gradients: as the update reads them.
        overflows: under loss scaling, of each optimizer. What overflows there is the scaler's business, and comes
            apart.
    """
    # Another tensor of the same values must not be reduced once more.
    distinct = {id(loss): loss for loss in losses if has_fractions(loss)}
    found = [_residue(loss.detach()) for loss in distinct.values()]
    if gradients:
        gradient = _residue(TOTAL_NORM(list(gradients), float("inf")))
        for one in overflows:
            gradient = torch.where(one.found != 0, torch.zeros_like(gradient), gradient)
        found.append(gradient)
    if not found:
        return []
    total = _sum(found)
    if not overflows:
        return [(NOT_FINITE, total)]
    return [(SCALED_GRADIENTS, _sum([_residue(one.largest) for one in overflows])), (NOT_FINITE, total)]


def has_fractions(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors; the elements of others are always finite."""
    return tensor.is_floating_point() or tensor.is_complex()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


def _residue(value: Tensor) -> Tensor:
    # Of the magnitude: a partial sum is then summed first, as it is for its other readers.
    none = value.abs() * 0
    return (none.sum() if none.dim() else none).float()
