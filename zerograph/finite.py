"""Whether loss and gradients are finite, as one number of the step graph: its *residue*.

The residue is 0 where all of them are finite, and not a number where one is not. It is made by arithmetic alone, so
that what is not finite can be followed back from it through the graph, operator by operator (``runtime.trace``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.gradients import TOTAL_NORM
from zerograph.step_graph import Role

# Outputs of the captured graph; ``guard`` makes the second part of the first.
NOT_FINITE = Role("check", "not_finite")
SCALED_GRADIENTS = Role("check", "scaled_gradients")


@torch.no_grad()
def residues(
    losses: Sequence[Tensor], gradients: Sequence[Tensor], overflow: tuple[Tensor, Tensor] | None
) -> list[tuple[Role, Tensor]]:
    """What the graph returns besides, 0-d and fp32: nothing if there is nothing to check.

    Args:
        losses: tensors that must be finite.
        gradients: as the update reads them.
        overflow: under loss scaling, the largest scaled gradient, and 1.0 where that is not finite. What overflows
            there is the scaler's business, and comes apart.
    """
    # Another tensor of the same values must not be reduced once more.
    distinct = {id(loss): loss for loss in losses if _torch.has_fractions(loss)}
    found = [_residue(loss.detach()) for loss in distinct.values()]
    if gradients:
        gradient = _residue(TOTAL_NORM(list(gradients), float("inf")))
        if overflow is not None:
            gradient = torch.where(overflow[1] != 0, torch.zeros_like(gradient), gradient)
        found.append(gradient)
    if not found:
        return []
    total = found[0]
    for one in found[1:]:
        total = total + one
    if overflow is None:
        return [(NOT_FINITE, total)]
    return [(SCALED_GRADIENTS, _residue(overflow[0])), (NOT_FINITE, total)]


def _residue(value: Tensor) -> Tensor:
    # Of the magnitude: a partial sum is then summed first, as it is for whoever else reads it.
    none = value.abs() * 0
    return (none.sum() if none.dim() else none).float()
