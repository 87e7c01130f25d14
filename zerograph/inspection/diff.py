"""What differs between two graph texts, as a unified diff in which lines that only moved say so.

Lines of a graph's text are unique, or nearly so, which makes comparing them cheap: the longest series of common lines
in the same order stays (n log n), everything else was removed, added, or is the same line at another place.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

Kind = Literal[" ", "-", "+"]
_CONTEXT = 3
_STYLES = {"-": "red", "+": "green", " ": ""}


@dataclass(frozen=True)
class Change:
    """One line of a diff.

    Attributes:
        kind: ``"-"`` for one of before, ``"+"`` for one of after, ``" "`` for one of both.
        old, new: its number in each text, from 1; where a line is not in one of them, that of the line behind it.
        moved: by how many lines an equal line stands further down (or up, if negative) on the other side; None for a
            line that has no equal there, or that stays.
    """

    kind: Kind
    text: str
    old: int
    new: int
    moved: int | None = None


@dataclass(frozen=True, repr=False)
class Diff:
    """The changes from one text to another.

    ``str()`` is coloured where standard output is a terminal and ``NO_COLOR`` is not set; ``text`` never is.

    Attributes:
        before, after: what the two texts are called.
        changes: all lines, those of both among them.
    """

    before: str
    after: str
    changes: tuple[Change, ...]

    @property
    def removed(self) -> int:
        """Return the number of removed lines."""
        return sum(one.kind == "-" and one.moved is None for one in self.changes)

    @property
    def added(self) -> int:
        """Return the number of added lines."""
        return sum(one.kind == "+" and one.moved is None for one in self.changes)

    @property
    def moved(self) -> int:
        """Return the number of moved lines."""
        return sum(one.kind == "+" and one.moved is not None for one in self.changes)

    def __bool__(self) -> bool:
        """Return True if the texts differ."""
        return any(one.kind != " " for one in self.changes)

    @property
    def summary(self) -> str:
        """``12 removed, 14 added, 40 moved``, or ``no difference``."""
        if not self:
            return "no difference"
        counts = {"removed": self.removed, "added": self.added, "moved": self.moved}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    @property
    def text(self) -> str:
        """The unified diff without colours."""
        return "\n".join(line for line, _ in self._lines())

    def __str__(self) -> str:
        return self.coloured() if in_colour() else self.text

    __repr__ = __str__

    def coloured(self) -> str:
        """The unified diff with the escape codes of a terminal."""
        # Not wide enough for any line to be wrapped: that is the terminal's business.
        console = Console(force_terminal=True, color_system="standard", width=2**16, highlight=False, no_color=False)
        with console.capture() as shown:
            for line, style in self._lines():
                console.print(Text(line, style=style), soft_wrap=True)
        return shown.get().rstrip("\n")

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Each line and its style."""
        yield f"--- {self.before}", "bold"
        yield f"+++ {self.after}", "bold"
        yield f"# {self.summary}", "bold"
        for hunk in _hunks(self.changes):
            old = sum(one.kind != "+" for one in hunk)
            new = sum(one.kind != "-" for one in hunk)
            yield f"@@ -{_start(hunk[0].old, old)},{old} +{_start(hunk[0].new, new)},{new} @@", "cyan"
            for one in hunk:
                if one.moved is None:
                    yield f"{one.kind}{one.text}", _STYLES[one.kind]
                else:
                    yield f"{one.kind}{one.text}  [{_move(one)}]", "dim yellow" if one.kind == "-" else "yellow"


def in_colour() -> bool:
    """Whether standard output is a terminal that is to have colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def compare(before: Sequence[str], after: Sequence[str], names: tuple[str, str]) -> Diff:
    """The changes that lead from one text to the other, lines that both have in the same order left alone.

    Args:
        before, after: lines without line ends.
        names: what the texts are called.
    """
    old, new = _numbered(before), _numbered(after)
    place = {line: index for index, line in enumerate(new)}
    common = [(index, place[line]) for index, line in enumerate(old) if line in place]
    kept = _longest_rising(common)
    to = dict(common)
    back = {new_index: old_index for old_index, new_index in common}
    changes: list[Change] = []
    at_old = at_new = 0
    for keep_old, keep_new in [*kept, (len(before), len(after))]:
        for index in range(at_old, keep_old):
            moved = to.get(index)
            changes.append(Change("-", before[index], index + 1, at_new + 1, None if moved is None else moved - index))
        for index in range(at_new, keep_new):
            moved = back.get(index)
            changes.append(Change("+", after[index], keep_old + 1, index + 1, None if moved is None else index - moved))
        if keep_old < len(before) or keep_new < len(after):
            changes.append(Change(" ", before[keep_old], keep_old + 1, keep_new + 1))
        at_old, at_new = keep_old + 1, keep_new + 1
    return Diff(*names, tuple(changes))


def _numbered(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Each line with how often it stood there before, which makes it unique."""
    seen: dict[str, int] = {}
    found = []
    for line in lines:
        seen[line] = seen.get(line, -1) + 1
        found.append((line, seen[line]))
    return found


def _longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs with rising first numbers the most whose second numbers rise too."""
    ends: list[int] = []  # the lowest second number that a series of each length ends with
    last: list[int] = []  # which pair that is
    before: list[int] = []  # for each pair the one before it in its series
    for index, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [second]
        last[length : length + 1] = [index]
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]


def _hunks(changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Changes that lie close together, with some lines of both around them."""
    changed = [index for index, one in enumerate(changes) if one.kind != " "]
    start = 0
    while start < len(changed):
        end = start
        while end + 1 < len(changed) and changed[end + 1] - changed[end] <= 2 * _CONTEXT:
            end += 1
        yield changes[max(0, changed[start] - _CONTEXT) : changed[end] + _CONTEXT + 1]
        start = end + 1


def _start(number: int, count: int) -> int:
    # As diff has it: of no lines, the one behind which they would stand.
    return number if count else number - 1


def _move(one: Change) -> str:
    assert one.moved is not None
    if one.kind == "-":
        where = f"line {one.old + one.moved}"
        return f"moves to {where}"
    return f"moved from line {one.new - one.moved}"
