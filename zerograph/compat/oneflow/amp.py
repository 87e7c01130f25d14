"""``flow.amp``: loss scalers for ``graph.set_grad_scaler``; other names are ``torch.amp``'s."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.ir import grad_scaler
from zerograph.ir.grad_scaler import GradScaler

__all__ = ["GradScaler", "StaticGradScaler"]


class StaticGradScaler(grad_scaler.StaticGradScaler):
    """A constant loss scale; an update whose gradients overflow is skipped.

    Raises:
        ConfigError: the scale is not a finite number above 0.
    """

    def __init__(self, scale_factor: float) -> None:
        super().__init__(scale_factor)


def __getattr__(name: str) -> Any:
    return getattr(torch.amp, name)
