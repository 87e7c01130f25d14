"""A run as pictures: step times over the compute floor, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib

from benchmarks.contenders import REFERENCE, Contender
from benchmarks.report.goals import Tables
from benchmarks.report.rows import Row, floor, process_growth, ratio

matplotlib.use("Agg")  # no screen needed
from matplotlib import pyplot

COLOURS = {"ours": "#1b7f5c", "peer": "#8a94a6", "reference": "#d8c48f"}
Values = Callable[[Mapping[str, Row]], dict[str, float]]


def draw(tables: Tables, stem: Path) -> list[str]:
    """Writes ``<stem>-time.png`` and ``<stem>-memory.png``, where there is anything to show; returns their names."""
    pictures = {"time": (over_floor, "step time / compute floor"), "memory": (growth, "peak memory growth, MB")}
    names = []
    for kind, (values, label) in pictures.items():
        panels = {task: found for task, table in tables.items() if (found := values(table))}
        if panels:
            path = stem.with_name(f"{stem.name}-{kind}.png")
            _bars(panels, tables, label, path)
            names.append(path.name)
    return names


def over_floor(table: Mapping[str, Row]) -> dict[str, float]:
    base = floor(table)
    found = {name: ratio(row.median, base.median) if base else None for name, row in table.items()}
    return {name: value for name, value in found.items() if value is not None and not table[name].problem}


def growth(table: Mapping[str, Row]) -> dict[str, float]:
    there = {name: process_growth(row) for name, row in table.items() if not row.problem}
    return {name: value / 1e6 for name, value in there.items() if value is not None}


def _bars(panels: Mapping[str, Mapping[str, float]], tables: Tables, label: str, path: Path) -> None:
    height = 1.5 + 0.26 * max(map(len, panels.values()))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.4 * len(panels), height), squeeze=False)
    for axis, (task, values) in zip(axes[0], panels.items(), strict=True):
        who = [tables[task][name].contender for name in values]
        colours = [COLOURS[_kind(one)] for one in who]
        bars = axis.barh([_label(one) for one in who], list(values.values()), color=colours)
        axis.bar_label(bars, fmt="%.2f" if max(values.values()) < 20 else "%.0f", padding=2, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12, y=0.01)
        axis.set_title(task)
        axis.set_xlabel(label)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(one: Contender) -> str:
    return one.title if one.ours or one.stage == REFERENCE else f"{one.title} ({one.stage})"


def _kind(one: Contender) -> str:
    return "ours" if one.ours else "reference" if one.stage == REFERENCE else "peer"
