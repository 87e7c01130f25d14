"""The result of ``fit_memory_budget`` for a step that exceeds its memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from zerograph.base.sizes import show_bytes


@dataclass(frozen=True)
class Shortage:
    """A step needs more memory than its budget, however its collectives are scheduled.

    Attributes:
        peak: lowest predicted peak that ``fit_memory_budget`` reached, in bytes.
        budget: the memory budget in bytes.
        activations: bytes of activations at the peak.
        in_buckets: bytes of gathered parameters and of gradients at the peak.
        explanation: lines for the user: where the peak is, what is in memory there, and what would help.
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
