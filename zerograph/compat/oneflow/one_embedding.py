"""``flow.one_embedding``: its optimizer FTRL. OneEmbedding itself is not here."""

from __future__ import annotations

from typing import Any

from zerograph.compat.oneflow.optim.optimizers import FTRL

__all__ = ["FTRL", "Ftrl"]

Ftrl = FTRL


def __getattr__(name: str) -> Any:
    raise AttributeError(f"flow.one_embedding has FTRL alone here, no {name!r}: OneEmbedding's tables are not there")
