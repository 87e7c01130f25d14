"""``flow.nn``: ``Graph``, and ``torch.nn`` with OneFlow's losses."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.compat.oneflow.nn import functional, graph
from zerograph.compat.oneflow.nn.functional import CrossEntropyLoss, NLLLoss
from zerograph.compat.oneflow.nn.graph import Graph

__all__ = ["CrossEntropyLoss", "Graph", "NLLLoss", "functional", "graph"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(torch.nn, name)
    except AttributeError:
        raise AttributeError(f"neither zerograph.compat.oneflow.nn nor torch.nn has {name!r}") from None
