"""``flow.nn.functional``: torch's, with OneFlow's cross entropy and negative log likelihood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerograph.compat.oneflow.names import names_of
from zerograph.errors import InputError


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """Call ``torch.nn.functional.cross_entropy`` with labels that :func:`class_numbers` converts.

    Raises:
        InputError: as :func:`class_numbers`.
    """
    return torch.nn.functional.cross_entropy(input, class_numbers(input, target), *args, **options)


def nll_loss(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """Call ``torch.nn.functional.nll_loss`` with labels that :func:`class_numbers` converts.

    Raises:
        InputError: as :func:`class_numbers`.
    """
    return torch.nn.functional.nll_loss(input, class_numbers(input, target), *args, **options)


def class_numbers(input: Tensor, target: Tensor) -> Tensor:
    """Convert OneFlow's labels to torch's.

    Args:
        input: scores, [N, C].
        target: labels of any integer type, [N] or [N, 1]; or probabilities, which are returned unchanged.

    Raises:
        InputError: integer labels have two dimensions and several columns.
    """
    if target.is_floating_point():
        return target
    if target.dim() == input.dim() == 2:
        if target.shape[1] != 1:
            raise InputError(
                f"integer labels of shape {tuple(target.shape)} for scores of shape {tuple(input.shape)}\n"
                "Give class numbers as labels (N,) or (N, 1), or probabilities (N, C) as floating point numbers."
            )
        target = target.squeeze(1)
    return target.long() if target.dtype in (torch.int8, torch.int16, torch.int32) else target


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss``, which also takes class numbers of shape (N, 1) and of any integer type."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, class_numbers(input, target))


class NLLLoss(torch.nn.NLLLoss):
    """``torch.nn.NLLLoss``, which also takes class numbers of shape (N, 1) and of any integer type."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, class_numbers(input, target))


__getattr__ = names_of(torch.nn.functional)
