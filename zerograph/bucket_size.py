"""The size of buckets under a memory budget: the largest that it allows, as fewer collectives cost less latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from zerograph.errors import MemoryBudgetError
from zerograph.passes.pipeline import PassRecord
from zerograph.step_graph import collective_runs

# Smaller ones would cost latency for little memory; much larger ones than usual would have nothing to hide behind.
_LEAST, _TIMES = 2**20, 4


class Laid(Protocol):
    """A step whose parameters lie in buckets of some size."""

    @property
    def passes(self) -> tuple[PassRecord, ...]: ...


Step = TypeVar("Step", bound=Laid)


def fitting(lay: Callable[[int], Step], usual: int) -> Step:
    """The step with smaller buckets than usual where only these fit, and with larger ones as long as no more is sent.

    Args:
        lay: makes the step with buckets of at most so many bytes.
        usual: bytes of a bucket without a budget.

    Raises:
        MemoryBudgetError: not even the smallest fit.
    """
    size = usual
    while True:
        try:
            found = lay(size)
        except MemoryBudgetError as error:
            # Buckets of any size hold no less than nothing.
            if size // 2 < _LEAST or error.missing > error.in_buckets:
                raise
            size //= 2
        else:
            break
    while usual <= size < _TIMES * usual:
        size *= 2
        try:
            larger = lay(size)
        except MemoryBudgetError:
            break
        (count, sent), (before, least) = traffic(larger), traffic(found)
        if count >= before or sent > least:
            break
        found = larger
    return found


def traffic(step: Laid) -> tuple[int, float]:
    """How many collectives a step has, and how many bytes each rank sends in them."""
    moved = collective_runs(step.passes[-1].graph.graph)
    return sum(times for _, times in moved), sum(node.meta["boxing"].sent * times for node, times in moved)
