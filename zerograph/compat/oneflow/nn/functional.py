"""``flow.nn.functional``: torch's, with OneFlow's cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """``torch.nn.functional.cross_entropy``, which also takes class numbers of shape (N, 1), as OneFlow's does."""
    return torch.nn.functional.cross_entropy(input, class_numbers(input, target), *args, **options)


def class_numbers(input: Tensor, target: Tensor) -> Tensor:
    """Class numbers of shape (N, 1) for scores of shape (N, C) without their last dimension; others as they are."""
    column = target.dim() == input.dim() == 2 and target.shape[1] == 1
    return target.squeeze(1) if column and not target.is_floating_point() else target


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.nn.functional, name)
    except AttributeError:
        raise AttributeError(f"neither OneFlow's functional here nor torch.nn.functional has {name!r}") from None
