"""What the pictures of plans have in common: how they are made and kept, what plans are called, colours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerograph.errors import ConfigError
from zerograph.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kinds of memory, from the bottom of a bar up; what is not named here is "other". Model states stand together.
KINDS = {
    "parameters": "#3B6FB6",
    "gathered": "#9CC5EA",
    "gradients": "#F28E2B",
    "optimizer state": "#59A14F",
    "activations": "#B6A3CF",
}
OTHER = "#BAB0AC"


def check(path: str | os.PathLike[str]) -> None:
    """Find out whether a picture can be kept there, before work is spent on what it shows.

    Raises:
        ConfigError: matplotlib is not installed, it draws no such files, or there is no such folder.
    """
    file = Path(path)
    known = figure(1, 1).canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ConfigError(f"{file} is no picture's name: it ends in .png, .svg or .pdf")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be drawn: {file.parent} is no folder that can be written")


def figure(width: float, height: float) -> Figure:
    """An empty picture of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing plans needs matplotlib: pip install 'zerograph[plot]', or matplotlib alone"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: str | os.PathLike[str]) -> None:
    """Keep a picture: PNG, SVG or PDF, as the path's ending says.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        drawn.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"{path} cannot be drawn: {error.strerror}") from error


def names(plans: Sequence[Plan]) -> list[str]:
    """What sets each plan apart from the others: its stage, its ranks, or both."""
    by_stage = len({plan.stage for plan in plans}) > 1
    by_ranks = len({plan.mesh for plan in plans}) > 1 or not by_stage
    return ["\n".join([ranks(plan)] * by_ranks + [plan.stage] * by_stage) for plan in plans]


def ranks(plan: Plan) -> str:
    """``64``, or ``8x8``."""
    return "x".join(f"{size:,}" for size in plan.mesh)


def stacked(axes: Axes, labels: Sequence[str], heights: Sequence[dict[str, float]]) -> None:
    """Bars of memory, by kind."""
    known = [{kind: of.get(kind, 0.0) for kind in KINDS} for of in heights]
    rest = [sum(of.values()) - sum(own.values()) for of, own in zip(heights, known, strict=True)]
    below = [0.0] * len(labels)
    for kind, colour in {**KINDS, "other": OTHER}.items():
        counts = rest if kind == "other" else [own[kind] for own in known]
        axes.bar(labels, counts, bottom=below, label=kind, color=colour, width=0.7)
        below = [a + b for a, b in zip(below, counts, strict=True)]


def plain(axes: Axes) -> None:
    """No frame where nothing is read off it."""
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
