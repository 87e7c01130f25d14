"""Losses that OneFlow has in another form than torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zerograph.compat.oneflow.nn.functional import class_numbers


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss``, which also takes class numbers of shape (N, 1) and of any integer type."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, class_numbers(input, target))


class NLLLoss(torch.nn.NLLLoss):
    """``torch.nn.NLLLoss``, which also takes class numbers of shape (N, 1) and of any integer type."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, class_numbers(input, target))
