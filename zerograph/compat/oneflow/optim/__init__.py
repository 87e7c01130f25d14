"""``flow.optim``: torch's optimizers. A group's ``clip_grad_max_norm`` and ``clip_grad_norm_type`` are honoured."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.compat.oneflow.optim import lr_scheduler

__all__ = ["lr_scheduler"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.optim, name)
    except AttributeError:
        raise AttributeError(f"torch.optim has no {name!r}, and OneFlow's own is not there") from None
