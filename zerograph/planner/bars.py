"""Memory of plans as bars by kind: one bar a stage is Figure 1 of the ZeRO paper, of a step as it is compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerograph.base.sizes import show_bytes
from zerograph.planner import pictures
from zerograph.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNIT = 2**30


def draw(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Draw what each plan holds, in the order given: PNG, SVG or PDF, as the path's ending says.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pictures.save(figure(plans), path)


def figure(plans: Sequence[Plan]) -> Figure:
    """Two rows of bars: all kinds at the moment at which they are the most together; and each at its own.

    Gradients are seldom there at the peak, which is where activations are: the second has them. Its bars are higher
    than anything that is ever held at once.
    """
    drawn = pictures.figure(max(7.5, 3.5 + 1.1 * len(plans)), 4.2)
    together, apart = drawn.subplots(1, 2, sharey=True)
    labels = pictures.names(plans)
    pictures.stacked(together, labels, [_in_units(plan.memory.kinds) for plan in plans])
    pictures.stacked(apart, labels, [_in_units(plan.most) for plan in plans])
    for place, plan in enumerate(plans):
        peak = plan.memory.peak
        together.annotate(
            show_bytes(peak),
            (place, peak / _UNIT),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 2),
            textcoords="offset points",
        )
    capacity = min(plan.usable for plan in plans) / _UNIT
    if max(plan.memory.peak for plan in plans) > capacity * _UNIT / 2:
        # Far above all bars it would only make them small.
        for axes in (together, apart):
            axes.axhline(capacity, color="black", linestyle="--", linewidth=1, label="there is")
    together.set_title("at the peak: the most at once", fontsize=10)
    together.set_ylabel("GiB on each rank", fontsize=9)
    apart.set_title("each kind at its own most", fontsize=10)
    for axes in (together, apart):
        pictures.plain(axes)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    first = plans[0]
    where = "" if len({plan.mesh for plan in plans}) > 1 else f" on {pictures.ranks(first)} ranks"
    each = f"each on {first.machine}, in {first.precision}"
    drawn.suptitle(f"{first.parameters:,} parameters{where}, {each}", fontsize=10)
    handles, said = together.get_legend_handles_labels()
    drawn.legend(handles, said, loc="outside lower center", ncols=len(said), fontsize=8, frameon=False)
    return drawn


def _in_units(counts: object) -> dict[str, float]:
    assert hasattr(counts, "items")
    return {str(kind): count / _UNIT for kind, count in counts.items()}
