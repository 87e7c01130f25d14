"""The size of buckets under a memory budget: the largest that it allows, as fewer collectives cost less latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from zerograph.errors import MemoryBudgetError
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import collective_runs
from zerograph.passes.pipeline import PassRecord

# Smaller ones would cost latency for little memory; much larger ones than usual would have nothing to hide behind.
_LEAST, _TIMES = 2**20, 4


class Laid(Protocol):
    """A step whose parameters lie in buckets of some size."""

    @property
    def passes(self) -> tuple[PassRecord, ...]: ...


Step = TypeVar("Step", bound=Laid)


def fitting(lay: Callable[[int], Step], usual: int, *, tight: bool = False) -> Step:
    """The step with smaller buckets than usual where only these fit, and with larger ones as long as no more is sent.

    To lay a step out is to compile it. Where the usual size does not fit, the smallest tells whether any does.

    Args:
        lay: makes the step with buckets of at most so many bytes.
        usual: bytes of a bucket without a budget.
        tight: the usual size is not expected to fit, and not tried first.

    Raises:
        MemoryBudgetError: not even the smallest fit.
    """
    sizes = _down_from(usual)
    size = usual
    if tight:
        found, size = _largest(lay, sizes)
    else:
        try:
            found = lay(usual)
        except MemoryBudgetError as error:
            # Buckets of any size hold no less than nothing.
            if len(sizes) == 1 or error.missing > error.in_buckets:
                raise
            found, size = _largest(lay, sizes[:-1])
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


def _down_from(usual: int) -> list[int]:
    """Halves of halves of it, and itself, the smallest first."""
    sizes = [usual]
    while sizes[0] // 2 >= _LEAST:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def _largest(lay: Callable[[int], Step], sizes: Sequence[int]) -> tuple[Step, int]:
    """Of ascending sizes the largest that fits, found by halving: what a smaller one lacks, a larger one lacks too.

    Raises:
        MemoryBudgetError: the smallest does not.
    """
    found, fits, fails = lay(sizes[0]), 0, len(sizes)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            found, fits = lay(sizes[middle]), middle
        except MemoryBudgetError:
            fails = middle
    return found, sizes[fits]


def traffic(step: Laid) -> tuple[int, float]:
    """How many collectives a step has, and how many bytes each rank sends in them."""
    moved = collective_runs(step.passes[-1].graph.graph)
    return sum(times for _, times in moved), sum(meta(node)["boxing"].sent * times for node, times in moved)
