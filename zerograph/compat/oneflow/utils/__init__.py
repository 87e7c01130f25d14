"""``flow.utils``: ``global_view``, and ``torch.utils``."""

from __future__ import annotations

import torch

from zerograph.compat.oneflow.names import names_of
from zerograph.compat.oneflow.utils import global_view

__all__ = ["global_view"]

__getattr__ = names_of(torch.utils)
