"""The goals that the project has set itself, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.contenders import OFF, Contender
from benchmarks.report.rows import Row, best_peer, floor, lowest, median, process_growth, ratio

Tables = Mapping[str, Mapping[str, Row]]

GPTS = ("small", "mid")
OVER_FLOOR = {"1": 1.15, "2": 1.15, "3": 1.22}
OVER_PEER = {"1": 1.05, "2": 1.40, "3": 1.40}
MEMORY = {"1": 0.80, "2": 0.75, "3": 0.75}
PLAIN_COMPILED = "alone-2-compiled-both"


@dataclass(frozen=True)
class Verdict:
    """One goal at one size.

    Attributes:
        value: what was reached; None if a contender that it needs was not measured.
        limit: what it should be at most, or at least.
        compared: whose numbers they are.
        floor: what a step without any communication would have reached; None where that says nothing.
    """

    task: str
    goal: str
    value: float | None
    limit: float
    at_most: bool
    compared: str
    floor: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def verdicts(tables: Tables) -> list[Verdict]:
    """One for each goal and size that it is set for; the sizes that were not run are left out."""
    found: list[Verdict] = []
    for task in GPTS:
        if table := tables.get(task):
            found += [*_times(task, table), *(_memory(table) if task == "mid" else ()), *_starts(task, table)]
    return found


def _times(task: str, table: Mapping[str, Row]) -> Iterator[Verdict]:
    base = floor(table)
    for stage, limit in OVER_FLOOR.items():
        ours = _ours(table, stage)
        goal = f"stage {stage}: step time / compute floor"
        yield Verdict(task, goal, _ratio(ours, base), limit, True, _names(ours, base))
    for stage, limit in OVER_PEER.items():
        ours, peer = _ours(table, stage), best_peer(table, stage, median)
        goal = f"stage {stage}: times as fast as the best peer"
        yield Verdict(task, goal, _ratio(peer, ours), limit, False, _names(ours, peer), _ratio(peer, base))
    ours, peer = _ours(table, OFF), best_peer(table, OFF, median)
    goal = "off: times as fast as the best DDP"
    yield Verdict(task, goal, _ratio(peer, ours), 1.0, False, _names(ours, peer), _ratio(peer, base))
    for stage, name in (("2", "fsdp2-kept"), ("3", "fsdp2")):
        ours, peer = _usable(table, f"zerograph-{stage}"), _usable(table, name)
        goal = f"stage {stage}: eager, times as fast as FSDP2 eager"
        yield Verdict(task, goal, _ratio(peer, ours), 1.0, False, _names(ours, peer))


def _memory(table: Mapping[str, Row]) -> Iterator[Verdict]:
    for stage, limit in MEMORY.items():
        ours = lowest(table, process_growth, _ours_at(stage))
        peer = best_peer(table, stage, process_growth)
        value = ratio(process_growth(ours), process_growth(peer)) if ours and peer else None
        goal = f"stage {stage}: peak memory growth / lowest peer"
        yield Verdict("mid", goal, value, limit, True, _names(ours, peer))


def _starts(task: str, table: Mapping[str, Row]) -> Iterator[Verdict]:
    base = _usable(table, PLAIN_COMPILED)
    for stage in (OFF, "1", "2", "3"):
        ours = _usable(table, f"zerograph-{stage}-inductor")
        for what, limit in (("cold", 1.0), ("warm", 0.25)):
            mine = None if ours is None else ours.first_cold if what == "cold" else ours.first_warm
            goal = f"{_named(stage)}: first step, Inductor, {what} / plain torch.compile, cold"
            value = ratio(mine, base.first_cold) if base else None
            yield Verdict(task, goal, value, limit, True, _names(ours, base))


def _ours_at(stage: str) -> Callable[[Contender], bool]:
    def which(one: Contender) -> bool:
        return one.ours and not one.sockets and one.stage == stage

    return which


def _ours(table: Mapping[str, Row], stage: str) -> Row | None:
    """The better of our backends."""
    return lowest(table, median, _ours_at(stage))


def _named(stage: str) -> str:
    return stage if stage == OFF else f"stage {stage}"


def _usable(table: Mapping[str, Row], name: str) -> Row | None:
    row = table.get(name)
    return None if row is None or row.problem else row


def _ratio(above: Row | None, below: Row | None) -> float | None:
    return ratio(above.median, below.median) if above and below else None


def _names(ours: Row | None, other: Row | None) -> str:
    return " / ".join(row.contender.title if row else "not measured" for row in (ours, other))
