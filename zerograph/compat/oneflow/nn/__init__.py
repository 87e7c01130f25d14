"""``flow.nn``: ``Graph``, and ``torch.nn`` with OneFlow's losses."""

from __future__ import annotations

import torch

from zerograph.compat.oneflow.names import names_of
from zerograph.compat.oneflow.nn import functional, graph
from zerograph.compat.oneflow.nn.functional import CrossEntropyLoss, NLLLoss
from zerograph.compat.oneflow.nn.graph import Graph

__all__ = ["CrossEntropyLoss", "Graph", "NLLLoss", "functional", "graph"]

__getattr__ = names_of(torch.nn)
