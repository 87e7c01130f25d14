"""``flow.sbp``: ``broadcast``, ``split(d)`` and ``partial_sum``; ``broadcast()`` and ``partial_sum()`` are the same.

They are zerograph's own, so they print as ``B``, ``S(d)`` and ``P``.
"""

from __future__ import annotations

from zerograph.ir.sbp import (
    Sbp as sbp,  # noqa: N813 (OneFlow's name of the type)
    broadcast,
    partial_sum,
    split,
)

__all__ = ["broadcast", "partial_sum", "sbp", "split"]
