"""Markdown tables as the benchmarks print and keep them, and the pages of these."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence

from benchmarks.generated import ROOT, stamp


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


class Table(list[str]):
    """The lines of a table, each printed as soon as it is there: a row may take minutes."""

    def __init__(self, header: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> None:
        super().__init__()
        for cells in (header, ["---"] * len(header), *rows):
            self.add(cells)

    def add(self, cells: Sequence[str]) -> None:
        """Add a row."""
        self.append(line(cells))
        print(self[-1], flush=True)


def page(title: str, command: str, doc: str | None, *lines: str) -> str:
    """Return a result page: title, command and stamp, the last paragraph of a benchmark's docstring, and its lines.

    Args:
        command: says how the page is written; it names ``benchmarks/<name>.py``, and the page is ``<name>.md``.
        doc: the docstring of that file.
    """
    about = (doc or "").split("\n\n")[-1].strip()
    return "\n".join([f"# {title}", "", f"Written by {command}.", stamp(_path(command)), "", about, "", *lines, ""])


def write(title: str, command: str, doc: str | None, *lines: str) -> None:
    """Write a result page, as :func:`page` returns it."""
    (ROOT / _path(command)).write_text(page(title, command, doc, *lines))


def _path(command: str) -> str:
    script = re.search(r"benchmarks/(\w+)\.py", command)
    assert script is not None, command
    return f"benchmarks/results/{script[1]}.md"


def asked_names(doc: str | None, what: str, known: Collection[str], default: str = "all") -> list[str]:
    """Return the names on the command line of a benchmark that takes nothing else.

    Args:
        doc: the docstring of the benchmark, as help.
        what: what these are names of, in the plural.
        known: all names.
        default: what is measured if there are none.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(what, nargs="*", help=f"of {', '.join(known)}; {default} if none")
    asked: list[str] = getattr(parser.parse_args(), what)
    if unknown := set(asked) - set(known):
        parser.error(f"no {', '.join(sorted(unknown))} among the {what}; there are {', '.join(known)}")
    return asked
