"""The difference of two graph texts, as a unified diff that marks moved lines.

Nodes are matched by what they compute, not by the number at the end of their name: one node more renumbers all that
follow. Lines of a graph's text are unique, or nearly so. This makes the comparison cheap: the longest series of common
lines in the same order is kept (n log n); every other line was removed, added or moved.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[" ", "-", "+"]
_CONTEXT = 3
# The label of a node, `module:name`, and a node's name where another reads it.
_NODE = re.compile(r"(?P<head>[| ]*(?:>>|<<)? *\S*:)(?P<name>[A-Za-z_]\w*)(?P<call> = .*)")
_READ = re.compile(r"(?<![\w.:])[A-Za-z_]\w*\b(?![.(=])")
_STYLES = {"-": "red", "+": "green", " ": ""}


@dataclass(frozen=True)
class Change:
    """One line of a diff.

    Attributes:
        kind: ``"-"`` for a line of the old text, ``"+"`` for one of the new text, ``" "`` for one of both.
        old, new: line number in each text, from 1; if a text lacks the line, the number of the line after it.
        moved: number of lines by which an equal line is further down in the other text (negative: further up); None if
            there is no equal line, or the line did not move.
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
        before, after: titles of the two texts.
        changes: all lines, unchanged ones included.
    """

    before: str
    after: str
    changes: tuple[Change, ...]

    @property
    def removed(self) -> int:
        """Return the number of removed lines."""
        return sum(change.kind == "-" and change.moved is None for change in self.changes)

    @property
    def added(self) -> int:
        """Return the number of added lines."""
        return sum(change.kind == "+" and change.moved is None for change in self.changes)

    @property
    def moved(self) -> int:
        """Return the number of moved lines."""
        return sum(change.kind == "+" and change.moved is not None for change in self.changes)

    def __bool__(self) -> bool:
        """Return True if the texts differ."""
        return any(change.kind != " " for change in self.changes)

    @property
    def summary(self) -> str:
        """Text such as ``12 removed, 14 added, 40 moved``, or ``no difference``."""
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
        """Return the unified diff with the escape codes of a terminal."""
        # Imported here because a training script needs no colours.
        from rich.console import Console
        from rich.text import Text

        # So wide that rich wraps no line: the terminal does.
        console = Console(force_terminal=True, color_system="standard", width=2**16, highlight=False, no_color=False)
        with console.capture() as capture:
            for line, style in self._lines():
                console.print(Text(line, style=style), soft_wrap=True)
        return capture.get().rstrip("\n")

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line and its style."""
        yield f"--- {self.before}", "bold"
        yield f"+++ {self.after}", "bold"
        yield f"# {self.summary}", "bold"
        for hunk in _hunks(self.changes):
            old = sum(change.kind != "+" for change in hunk)
            new = sum(change.kind != "-" for change in hunk)
            yield f"@@ -{_start(hunk[0].old, old)},{old} +{_start(hunk[0].new, new)},{new} @@", "cyan"
            for change in hunk:
                text = f"{change.kind}{change.text}"
                if change.moved is None:
                    yield text, _STYLES[change.kind]
                else:
                    yield f"{text}  [{_move(change)}]", "dim yellow" if change.kind == "-" else "yellow"


def in_colour() -> bool:
    """Return True if standard output is a terminal with colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def compare(before: Sequence[str], after: Sequence[str], names: tuple[str, str]) -> Diff:
    """Compare two texts; lines that both have in the same order are unchanged, whatever their nodes are called.

    Args:
        before, after: lines without line ends.
        names: titles of the texts.
    """
    old, new = _numbered(_renamed(before, after)), _numbered(after)
    indices = {line: index for index, line in enumerate(new)}
    common = [(index, indices[line]) for index, line in enumerate(old) if line in indices]
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


def _renamed(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the old lines with the names of the new text's nodes, where a node of one text is that of the other.

    A node's match is the first one left in the new text that reads the same nodes, or else one whose line differs in
    numbers of names only, or else one of the same label. Names without a match are changed, so that they equal none.
    """
    # Lines that may be the match of an old one, by each of their keys, the first line last.
    waiting: dict[object, list[int]] = defaultdict(list)
    for index in reversed(range(len(after))):
        for key in _keys(after[index], {}):
            waiting[key].append(index)
    taken: set[int] = set()
    # New names by old ones, for each depth of nested loops, which have names of their own.
    names: dict[str, dict[str, str]] = defaultdict(dict)
    renamed = []
    for line in before:
        node = _NODE.match(line)
        scope = names[line[: len(line) - len(line.lstrip(" |"))].strip()]
        if node is None:
            renamed.append(_with_names(line, scope))
            continue
        new_name = f"{node['name']}\0"
        for queue in (waiting[key] for key in _keys(line, scope)):
            while queue and queue[-1] in taken:
                queue.pop()
            if queue:
                taken.add(queue[-1])
                new_name = _NODE.match(after[queue[-1]])["name"]  # type: ignore[index]
                break
        scope[node["name"]] = new_name
        renamed.append(f"{node['head']}{new_name}{_with_names(node['call'], scope)}")
    return renamed


def _keys(line: str, names: Mapping[str, str]) -> Iterator[object]:
    """Yield the keys of a node's line by which it is matched, the strictest first, with other names where it reads."""
    node = _NODE.match(line)
    if node is not None:
        head, name, call = node["head"], _unnumbered(node["name"]), _with_names(node["call"], names)
        yield head, name, call
        yield head, name, _READ.sub(lambda read: _unnumbered(read[0]), call), "without numbers"
        yield head, name


def _with_names(text: str, names: Mapping[str, str]) -> str:
    text, *comment = text.split("  # ", 1)
    return "  # ".join([_READ.sub(lambda read: names.get(read[0], read[0]), text), *comment])


def _unnumbered(name: str) -> str:
    return re.sub(r"(_\d+)+\0?$", "", name)


def _numbered(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Make each line unique by the number of its earlier occurrences."""
    seen: dict[str, int] = {}
    numbered = []
    for line in lines:
        seen[line] = seen.get(line, -1) + 1
        numbered.append((line, seen[line]))
    return numbered


def _longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence with rising second numbers; first numbers rise already."""
    ends: list[int] = []  # lowest last number of a series of each length
    last: list[int] = []  # index of the pair with that number
    before: list[int] = []  # for each pair, its predecessor in its series
    for index, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [second]
        last[length : length + 1] = [index]
    series: list[tuple[int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        series.append(pairs[index])
        index = before[index]
    return series[::-1]


def _hunks(changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Group nearby changes, with some unchanged lines around them."""
    changed = [index for index, change in enumerate(changes) if change.kind != " "]
    start = 0
    while start < len(changed):
        end = start
        while end + 1 < len(changed) and changed[end + 1] - changed[end] <= 2 * _CONTEXT:
            end += 1
        yield changes[max(0, changed[start] - _CONTEXT) : changed[end] + _CONTEXT + 1]
        start = end + 1


def _start(number: int, count: int) -> int:
    # As in diff: an empty hunk has the number of the line before it.
    return number if count else number - 1


def _move(change: Change) -> str:
    assert change.moved is not None
    if change.kind == "-":
        return f"moves to line {change.old + change.moved}"
    return f"moved from line {change.new - change.moved}"
