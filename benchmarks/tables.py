"""Markdown tables as the benchmarks print and keep them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.generated import stamp


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(title: str, command: str, doc: str | None, *lines: str) -> str:
    """Return a result page: title, command and stamp, the last paragraph of a benchmark's docstring, and its lines.

    Args:
        command: says how the page is written; it names ``benchmarks/<name>.py``, and the page is ``<name>.md``.
        doc: the docstring of that file.
    """
    script = re.search(r"benchmarks/(\w+)\.py", command)
    assert script is not None, command
    about = (doc or "").split("\n\n")[-1].strip()
    made = stamp(f"benchmarks/results/{script[1]}.md")
    return "\n".join([f"# {title}", "", f"Written by {command}.", made, "", about, "", *lines, ""])
