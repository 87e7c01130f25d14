"""``flow.amp``: loss scalers for ``graph.set_grad_scaler``; other names are ``torch.amp``'s."""

from __future__ import annotations

import torch

from zerograph.compat.oneflow.names import names_of
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


__getattr__ = names_of(torch.amp)
