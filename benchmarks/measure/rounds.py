"""Seconds of several functions that run in turn, so that what slows the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def medians(
    runs: Sequence[Callable[[], Any]], rounds: int, *, warm_up: int = 0, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the median seconds of each function.

    Args:
        runs: the functions; each round calls all of them in order.
        rounds: number of measured rounds.
        warm_up: number of rounds before these.
        clock: returns seconds.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(-warm_up, rounds):
        for run, taken in zip(runs, seconds, strict=True):
            began = clock()
            run()
            if number >= 0:
                taken.append(clock() - began)
    return list(map(statistics.median, seconds))
