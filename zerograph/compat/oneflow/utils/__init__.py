"""``flow.utils``: ``global_view``, and ``torch.utils``."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.compat.oneflow.utils import global_view

__all__ = ["global_view"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.utils, name)
    except AttributeError:
        raise AttributeError(f"neither zerograph.compat.oneflow.utils nor torch.utils has {name!r}") from None
