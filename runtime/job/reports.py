"""Reports of ranks on themselves, and what they tell about the rank at fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

# The failure of a rank whose script is over.
ENDED = "its script has ended, without an error"
# Lines of a message for the other ranks' answers.
_MAX_LINES = 8


@dataclass(frozen=True)
class Report:
    """A rank's report on itself.

    Attributes:
        doing: what it is doing, or was doing when it failed.
        failed: its error, in one line; None if it has not failed.
        lost: the ranks that it lost, if that was the error.
    """

    doing: str
    failed: str | None = None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answers:
    """The answers to a rank's inquiry.

    Attributes:
        rank: the rank that inquired.
        doing: what it was doing.
        reports: by rank.
        silent: ranks without a report.
        reached: the store answered.
        store_rank: if it did not, the rank whose process hosts the store; None if that is the launcher's.
        ended: ranks without a report whose process is known to have ended.
    """

    rank: int
    doing: str
    reports: Mapping[int, Report]
    silent: tuple[int, ...] = ()
    reached: bool = True
    store_rank: int | None = None
    ended: tuple[int, ...] = ()

    def lost(self) -> tuple[int, ...]:
        """Return the ranks at fault, as far as they can be known.

        These are the ranks that failed by themselves, are silent or have ended; else those that other ranks lost; else
        the host of the unreachable store; else the ranks that do something else.
        """
        reports = self.reports
        failed = {rank for rank, report in reports.items() if report.failed is not None and not report.lost}
        lost_by_others = {rank for report in reports.values() for rank in report.lost} - {self.rank}
        store_host = set() if self.store_rank is None or self.store_rank in reports else {self.store_rank}
        diverged = {rank for rank, report in reports.items() if report.failed is None and report.doing != self.doing}
        return tuple(sorted(failed | set(self.silent) | set(self.ended) or lost_by_others or store_host or diverged))

    def has_ended(self, ranks: Iterable[int]) -> bool:
        """Return whether the scripts of all these ranks have ended in order."""
        return all(rank in self.reports and self.reports[rank].failed == ENDED for rank in ranks)

    def lines(self, name: Callable[[Iterable[int]], str]) -> list[str]:
        """Return the answers as lines of a message: ended and silent ranks first, equal reports together.

        Args:
            name: names ranks, with their hosts where there are several.
        """
        lines = []
        if self.ended:
            lines.append(f"{name(self.ended)}: its process has ended without a report: killed, or out of memory")
        if self.silent:
            lines.append(
                f"{name(self.silent)}: no sign of life: died, is stopped, is held up in native code, or the "
                "network to it is cut"
            )
        if not self.reached:
            host = "the launcher hosts" if self.store_rank is None else f"rank {self.store_rank} hosts"
            lines.append(
                f"the store of the rendezvous, which {host}, does not answer: its process has ended, or the network to "
                "it is cut"
            )
        ranks_by_text: dict[str, list[int]] = {}
        for rank, report in self.reports.items():
            text = f"alive, {report.doing}" if report.failed is None else f"failed, {report.doing}: {report.failed}"
            text = f"{report.doing}: {ENDED}" if report.failed == ENDED else text
            ranks_by_text.setdefault(text, []).append(rank)
        lines += [f"{name(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        return lines if len(lines) <= _MAX_LINES else [*lines[:_MAX_LINES], f"... and {len(lines) - _MAX_LINES} more"]


def encode(report: Report) -> str:
    """Return a report as text for the store."""
    return json.dumps([report.doing, report.failed, report.lost])


def decode(text: bytes) -> Report:
    """Return the report of a text."""
    doing, failed, lost = json.loads(text)
    return Report(doing, failed, tuple(lost))


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 1, 2, 5``."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))
