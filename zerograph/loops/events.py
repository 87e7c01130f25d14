"""Recorded calls that change gradients: ``backward()`` and edits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from zerograph.loops.deferred import Result


@dataclass
class Event:
    """A recorded ``backward()`` or edit of gradients.

    Attributes:
        touches: the numbers of the optimizers whose gradients it changes.
        cleared: those of them whose gradients were cleared since.
        added: those of them whose accumulated gradients it has changed already.
        loss: the result that ``backward()`` was called on; None for an edit.
    """

    touches: set[int]
    loss: Result | None = None
    cleared: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)

    def concerns(self, optimizers: Iterable[int]) -> set[int]:
        """Return those of the optimizers that use its gradients."""
        return (self.touches & set(optimizers)) - self.cleared


def run_backward(loss: Tensor, *, retain_graph: bool | None = None) -> None:
    """Run ``backward()`` in the step."""
    loss.backward(retain_graph=retain_graph)
