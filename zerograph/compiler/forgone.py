"""How many bytes of activations a step gives up under a memory budget: as few as it can do with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from zerograph.errors import MemoryBudgetError

Step = TypeVar("Step")

# Of the activations at the peak: what is given up more, at least, where what was missing has not been enough. Twice as
# much each time as long as that makes no difference.
_SHARE = 16


def giving_up(lay: Callable[[int, bool], Step], *, may_spill: bool) -> Step:
    """The step that gives up no more activations than the budget asks for.

    First those that may wait elsewhere for backward at no cost of time, if there are any, then others.

    What is missing is given up next. Where that lowers the peak by less, because it is another place of the step then
    that holds the most, it takes several rounds, at most as many as there are sixteenths of the activations, and few
    where they make no difference.

    Args:
        lay: makes the step that gives up at least so many bytes on a rank, with spilling or without.
        may_spill: activations can wait in the CPU's memory.

    Raises:
        MemoryBudgetError: not even a step that gives up all that it can fits.
    """
    forgone, most, spills = 0, 0, False
    least, parts = math.inf, 1
    while True:
        try:
            return lay(forgone, spills)
        except MemoryBudgetError as error:
            if may_spill and not spills:
                spills = True
                continue
            most = most or error.activations
            # Where all of them together are not enough, with the smallest buckets, no round is.
            if forgone >= most or error.missing > error.activations + error.in_buckets:
                raise
            parts = 2 * parts if error.missing >= least else 1
            least = min(least, error.missing)
            forgone += max(error.missing, parts * -(-most // _SHARE)) if forgone else error.missing
