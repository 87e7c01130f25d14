"""The results of all tests of faults, as one table at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

PROPERTY = "fault"


@dataclass
class Tally:
    """One fault: how often it was tried, and what became of it.

    Attributes:
        fault: what happened, in a few words.
        tried, survived: how often; survived: noticed as it must be, or gone on from with the right numbers.
        lost_steps: the largest number of updates that had to be repeated; None if there is none to repeat.
        seconds: the longest until it was noticed; None where nothing has to notice it.
    """

    fault: str
    tried: int = 0
    survived: int = 0
    lost_steps: int | None = None
    seconds: float | None = None

    def add(self, survived: bool, *, lost_steps: int | None = None, seconds: float | None = None) -> None:
        """One more try."""
        self.tried += 1
        self.survived += survived
        if lost_steps is not None:
            self.lost_steps = max(lost_steps, self.lost_steps or 0)
        if seconds is not None:
            self.seconds = max(seconds, self.seconds or 0.0)

    def text(self) -> str:
        return json.dumps(asdict(self))


def table(texts: Iterable[str]) -> Table:
    """Return the table of texts of :meth:`Tally.text`; several tallies of one fault are one row."""
    rows: dict[str, Tally] = {}
    for text in texts:
        one = Tally(**json.loads(text))
        row = rows.setdefault(one.fault, Tally(one.fault))
        row.tried += one.tried
        row.survived += one.survived
        row.lost_steps = _most(row.lost_steps, one.lost_steps)
        row.seconds = _most(row.seconds, one.seconds)
    shown = Table("fault", "tried", "survived", "lost steps", "seconds until noticed")
    for row in rows.values():
        lost = "" if row.lost_steps is None else str(row.lost_steps)
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        shown.add_row(row.fault, str(row.tried), str(row.survived), lost, seconds)
    return shown


def _most(a: Any, b: Any) -> Any:
    return a if b is None else b if a is None else max(a, b)
