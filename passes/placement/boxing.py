"""The boxing node, which changes the SBP of a global tensor."""

from __future__ import annotations

from torch import Tensor


def boxing(x: Tensor, sbp: str) -> Tensor:
    """Return the same global tensor under another SBP. ``localize`` replaces the node by a collective or a slice."""
    return x.view_as(x)
