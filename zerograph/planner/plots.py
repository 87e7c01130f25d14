"""Plans of several numbers of ranks as curves: memory, time of a step, efficiency."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zerograph.errors import ConfigError
from zerograph.planner.plan import Plan

_KINDS = {
    "parameters": "#4477AA",
    "optimizer state": "#66CCEE",
    "gathered": "#228833",
    "gradients": "#CCBB44",
    "activations": "#EE6677",
}


def draw(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Draw one picture of all plans, by their number of ranks: PNG, SVG or PDF, as the path's ending says.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing plans needs matplotlib: pip install matplotlib") from error
    plans = sorted(plans, key=lambda plan: (plan.world_size, len(plan.mesh)))
    ranks = ["x".join(f"{size:,}" for size in plan.mesh) for plan in plans]
    figure = Figure(figsize=(12, 4), layout="constrained")
    memory, seconds, efficiency = figure.subplots(1, 3)

    below = [0.0] * len(plans)
    known = [{str(kind): count / 2**30 for kind, count in plan.memory.kinds.items()} for plan in plans]
    for kind, colour in _KINDS.items():
        counts = [of.get(kind, 0.0) for of in known]
        memory.bar(ranks, counts, bottom=below, label=kind, color=colour)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    rest = [plan.memory.peak / 2**30 - done for plan, done in zip(plans, below, strict=True)]
    memory.bar(ranks, rest, bottom=below, label="other", color="#BBBBBB")
    if max(plan.memory.peak for plan in plans) > plans[0].capacity / 10:
        # Beside what takes next to nothing the bars would not be seen.
        memory.axhline(plans[0].capacity / 2**30, color="black", linestyle="--", linewidth=1, label="there is")
    memory.set(title="peak of a rank, GiB", xlabel="ranks")

    seconds.bar(ranks, [plan.time.compute for plan in plans], label="computing", color="#4477AA")
    seconds.bar(
        ranks,
        [plan.time.seconds - plan.time.compute for plan in plans],
        bottom=[plan.time.compute for plan in plans],
        label="waiting",
        color="#EE6677",
    )
    seconds.set(title="a step, seconds", xlabel="ranks")

    for name, colour, grid in (("in a line", "#228833", False), ("on a grid of nodes", "#AA3377", True)):
        own = [plan for plan in plans if (len(plan.mesh) > 1) == grid]
        sizes, shares = [plan.world_size for plan in own], [100 * plan.efficiency for plan in own]
        efficiency.plot(sizes, shares, marker="o", color=colour, label=name)
    efficiency.set(title="share of the step computing, %", xlabel="ranks", ylim=(0, 105), xscale="log")
    for axes in (memory, seconds, efficiency):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
