"""Plans of several numbers of ranks as curves: memory, time of a step, efficiency."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerograph.planner import pictures
from zerograph.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By stage; on grids of nodes the line is dashed.
_LINES = {"off": "#7F7F7F", "stage 1": "#F28E2B", "stage 2": "#59A14F", "stage 3": "#3B6FB6"}


def draw(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Draw one picture of all plans, by their number of ranks: PNG, SVG or PDF, as the path's ending says.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pictures.save(figure(plans), path)


def figure(plans: Sequence[Plan]) -> Figure:
    """Three drawings beside each other: memory at the peak, seconds of a step, and which share of them computes."""
    plans = sorted(plans, key=lambda plan: (plan.world_size, len(plan.mesh), plan.stage))
    labels = pictures.names(plans)
    drawn = pictures.figure(12, 4)
    memory, seconds, efficiency = drawn.subplots(1, 3)

    pictures.stacked(
        memory, labels, [{str(kind): count / 2**30 for kind, count in plan.memory.kinds.items()} for plan in plans]
    )
    if max(plan.memory.peak for plan in plans) > plans[0].usable / 10:
        # Beside what takes next to nothing the bars would not be seen.
        memory.axhline(plans[0].usable / 2**30, color="black", linestyle="--", linewidth=1, label="there is")
    memory.set(title="peak of a rank, GiB", xlabel="ranks")

    seconds.bar(labels, [plan.time.compute for plan in plans], label="computing", color="#4477AA")
    seconds.bar(
        labels,
        [plan.time.seconds - plan.time.compute for plan in plans],
        bottom=[plan.time.compute for plan in plans],
        label="waiting",
        color="#EE6677",
    )
    seconds.set(title="a step, seconds", xlabel="ranks")

    series = dict.fromkeys((plan.stage, len(plan.mesh) > 1) for plan in plans)
    for stage, grid in series:
        own = [plan for plan in plans if (plan.stage, len(plan.mesh) > 1) == (stage, grid)]
        sizes, shares = [plan.world_size for plan in own], [100 * plan.efficiency for plan in own]
        name, line = f"{stage}, {'on a grid of nodes' if grid else 'in a line'}", "--" if grid else "-"
        efficiency.plot(sizes, shares, line, marker="o", color=_LINES[stage.partition(",")[0]], label=name)
    efficiency.set(title="share of the step computing, %", xlabel="ranks", ylim=(0, 105), xscale="log")
    for axes, columns in ((memory, 4), (seconds, 2), (efficiency, 2)):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=columns, frameon=False)
        pictures.plain(axes)
    return drawn
