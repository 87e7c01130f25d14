"""``flow.optim.lr_scheduler``: torch's schedulers."""

from __future__ import annotations

from typing import Any

import torch


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.optim.lr_scheduler, name)
    except AttributeError:
        raise AttributeError(f"torch.optim.lr_scheduler has no {name!r}, and OneFlow's own is not there") from None
