"""The result of fitting a step into a memory budget that it cannot keep."""

from __future__ import annotations

from dataclasses import dataclass

from zerograph.base.sizes import show_bytes


@dataclass(frozen=True)
class Shortage:
    """A step needs more memory than its budget, however its collectives are scheduled.

    Attributes:
        peak: bytes that the step holds at most, as few as ``fit_memory_budget`` could make them.
        budget: bytes that it may hold.
        activations: bytes of activations at the peak.
        in_buckets: bytes of gathered parameters and of gradients at the peak.
        explanation: lines for the user: where the peak is reached, what is held there, and what would help.
    """

    peak: int
    budget: int
    activations: int
    in_buckets: int
    explanation: str

    @property
    def missing(self) -> int:
        """Bytes of the peak above the budget."""
        return self.peak - self.budget

    def __str__(self) -> str:
        return (
            f"the step needs {show_bytes(self.peak)} on this rank, and config.memory_budget is "
            f"{show_bytes(self.budget)}: {self.missing:,} bytes are missing\n{self.explanation}"
        )
