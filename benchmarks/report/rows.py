"""From raw measurements to one row for each contender of a size: medians, ratios, losses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import CONTENDERS, REFERENCE, Contender

# Differences of losses, and of those where codes are exchanged.
TOLERANCE, CODED = 1e-4, 2e-2

# What pair.measure() returned, with "contender", "task", "kind" and "round".
Measurement = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One contender at one size; None where nothing was measured.

    Attributes:
        median: seconds of a step, over all ranks, rounds and steps.
        quartiles: a quarter of the steps took less than the first, a quarter more than the second.
        first_cold, first_warm: seconds to the end of the first step: in round 1, with empty caches; the median of
            the later rounds.
        losses: of the first steps, the mean over the ranks.
        process_growth: bytes: growth of a process within the steps (the largest of the ranks).
        tensor_growth: bytes: growth of its tensors within a step.
        state: bytes of tensors between steps.
        sent: bytes that it sends in a step.
        wire: bytes that a host sends to other hosts in a step, by the counters of its interfaces (the largest).
        listed: bytes that the contender says a rank sends to other hosts in a step; 0 if it says nothing.
        problem: why there is nothing, or what is wrong with it.
    """

    contender: Contender
    median: float | None = None
    quartiles: tuple[float, float] | None = None
    first_cold: float | None = None
    first_warm: float | None = None
    losses: tuple[float, ...] = ()
    process_growth: int | None = None
    tensor_growth: int | None = None
    state: int | None = None
    sent: int | None = None
    wire: int | None = None
    listed: int = 0
    problem: str = ""

    @property
    def peak(self) -> int | None:
        """Bytes of all that training takes: tensors between steps, and what a step takes beyond them."""
        return None if self.state is None or self.process_growth is None else self.state + self.process_growth


def rows(measurements: Iterable[Measurement], task: str) -> dict[str, Row]:
    """By name, in the table's order: those of which there is any measurement."""
    found: dict[str, list[Measurement]] = {}
    for one in measurements:
        if one["task"] == task:
            found.setdefault(one["contender"], []).append(one)
    return {one.name: _row(one, found[one.name]) for one in CONTENDERS.values() if one.name in found}


def _row(contender: Contender, measurements: Sequence[Measurement]) -> Row:
    problem = next((f"{key}: {one[key]}" for key in ("failed", "skipped") for one in measurements if key in one), "")
    good = [one for one in measurements if "ranks" in one]
    timed = [one for one in good if one["kind"] == "time"]
    memory = [rank for one in good if one["kind"] == "memory" for rank in one["ranks"]]
    seconds = [each for one in timed for rank in one["ranks"] for each in rank["seconds"]]
    starts = {one["round"]: max(rank["first_step"] for rank in one["ranks"]) for one in timed}
    later = [value for number, value in starts.items() if number > 1]

    def largest(key: str) -> int | None:
        return max((rank[key] for rank in memory), default=None)

    return Row(
        contender,
        statistics.median(seconds) if seconds else None,
        _quartiles(seconds) if len(seconds) > 1 else None,
        starts.get(1),
        statistics.median(later) if later else None,
        _losses(good[0]) if good else (),
        largest("process_growth"),
        largest("tensor_growth"),
        largest("state"),
        largest("sent"),
        max((rank["wire"] for one in timed for rank in one["ranks"] if "wire" in rank), default=None),
        max((rank.get("listed", 0) for one in timed for rank in one["ranks"]), default=0),
        problem,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, last = statistics.quantiles(values, n=4, method="inclusive")
    return first, last


def _losses(measurement: Measurement) -> tuple[float, ...]:
    """Means over the ranks: each rank's loss is that of its part of the batch, or already the whole batch's."""
    by_rank = [rank["losses"] for rank in measurement["ranks"]]
    return tuple(statistics.fmean(each) for each in zip(*by_rank, strict=True))


def succeeded(tables: Iterable[Mapping[str, Row]]) -> bool:
    """Return whether no contender failed and all losses agree."""
    return not any(
        disagreements(table) or any(row.problem.startswith("failed") for row in table.values()) for table in tables
    )


def disagreements(table: Mapping[str, Row]) -> dict[str, float]:
    """By name, how far a contender's losses are from the others' median, where that is more than the tolerance.

    Contenders that exchange nothing train on their own part of the batch: only their first loss is the others', and
    that of one process only half of it, so it is not compared.
    """
    compared = {
        name: row.losses[:1] if row.contender.alone else row.losses
        for name, row in table.items()
        if row.losses and row.contender.ranks > 1
    }
    found: dict[str, float] = {}
    for index in range(max(map(len, compared.values()), default=0)):
        here = {name: losses[index] for name, losses in compared.items() if len(losses) > index}
        # One that exists, so that of two that differ one is right.
        exact = [loss for name, loss in here.items() if not table[name].contender.coded]
        middle = statistics.median_low(exact or list(here.values()))
        for name, loss in here.items():
            # Not "> tolerance": a loss that is no number agrees with none.
            if not abs(loss - middle) <= (CODED if table[name].contender.coded else TOLERANCE):
                found[name] = max(found.get(name, 0.0), abs(loss - middle))
    return found


def lowest(
    table: Mapping[str, Row], value: Callable[[Row], float | None], which: Callable[[Contender], bool]
) -> Row | None:
    """The row with the lowest value among the contenders that ``which`` picks and that have one."""
    there = [row for row in table.values() if which(row.contender) and value(row) is not None and not row.problem]
    return min(there, key=lambda row: value(row) or 0.0, default=None)


def median(row: Row) -> float | None:
    return row.median


def process_growth(row: Row) -> float | None:
    return row.process_growth


def floor(table: Mapping[str, Row]) -> Row | None:
    """The compute floor: the fastest pair of processes that exchange nothing."""
    return lowest(table, median, lambda one: one.stage == REFERENCE and one.ranks > 1)


def best_peer(table: Mapping[str, Row], stage: str, value: Callable[[Row], float | None]) -> Row | None:
    return lowest(table, value, lambda one: one.peer and one.stage == stage)


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``, where there are both and the base is more than nothing."""
    return value / base if value is not None and base is not None and base > 0 else None
