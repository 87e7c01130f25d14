"""``flow.amp``: loss scaling for ``graph.set_grad_scaler``; the rest is ``torch.amp``."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.ir import grad_scaler
from zerograph.ir.grad_scaler import GradScaler

__all__ = ["GradScaler", "StaticGradScaler"]


class StaticGradScaler(grad_scaler.StaticGradScaler):
    """One scale for all steps; an update whose gradients overflow is skipped all the same.

    Raises:
        ConfigError: the scale is no finite number above 0.
    """

    def __init__(self, scale_factor: float) -> None:
        super().__init__(scale_factor)


def __getattr__(name: str) -> Any:
    return getattr(torch.amp, name)
