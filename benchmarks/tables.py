"""Markdown tables as the benchmarks print and keep them."""

from __future__ import annotations

from collections.abc import Sequence


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(title: str, command: str, doc: str | None, *lines: str) -> str:
    """What a benchmark found, under its title, the command that wrote it and the last paragraph of its docstring."""
    about = (doc or "").split("\n\n")[-1].strip()
    return "\n".join([f"# {title}", "", f"Written by {command}.", "", about, "", *lines, ""])
