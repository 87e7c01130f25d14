"""``flow.optim``: OneFlow's optimizers where they differ from torch's, and torch's others."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.compat.oneflow.optim import lr_scheduler
from zerograph.compat.oneflow.optim.base import Optimizer
from zerograph.compat.oneflow.optim.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "lr_scheduler"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.optim, name)
    except AttributeError:
        raise AttributeError(f"torch.optim has no {name!r}, and OneFlow's own is not there") from None
