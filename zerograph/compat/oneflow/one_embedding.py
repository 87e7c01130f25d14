"""``flow.one_embedding``: only its optimizer FTRL is supported."""

from __future__ import annotations

from typing import Any

from zerograph.compat.oneflow.optim.optimizers import FTRL

__all__ = ["FTRL", "Ftrl"]

Ftrl = FTRL


def __getattr__(name: str) -> Any:
    raise AttributeError(f"flow.one_embedding has no {name!r} here, only FTRL: OneEmbedding's tables are not supported")
