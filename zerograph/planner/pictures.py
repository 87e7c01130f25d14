"""Pictures of plans, with matplotlib: memory by kind, steps over time, and curves over numbers of ranks.

Each function returns a figure; :func:`save` writes it as PNG, SVG or PDF.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerograph.base.palette import ACTIVITIES, MEMORY
from zerograph.base.sizes import show_bytes
from zerograph.errors import ConfigError
from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.planner.plan_data import Plan
from zerograph.planner.timeline import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30

# Kinds of memory, from the bottom of a bar up; all other kinds are "other". Model states are next to each other.
_KINDS = {kind: MEMORY[kind][0] for kind in ("parameters", "gathered", "gradients", "optimizer state", "activations")}
_OTHER = MEMORY["inputs"][0]

# Lanes of a step from the top, with their labels.
_LANES = {"compute": "compute", "communication": "collectives", "host": "to and from host", "files": "files"}
WAITING, CARRYING = "waiting", "carrying collectives"
COLOURS = {activity: shades[0] for activity, shades in ACTIVITIES.items()}
# Units of time, and their number in a second.
_UNITS = (("s", 1.0), ("ms", 1e3), ("\N{MICRO SIGN}s", 1e6))

# Colours of curves by stage; the line is dashed for grids of nodes.
_STAGES = {
    "off": COLOURS["transfer"],
    "stage 1": COLOURS["reduce-scatter"],
    "stage 2": COLOURS["backward"],
    "stage 3": MEMORY["parameters"][0],
}

# Start and duration in seconds.
Span = tuple[float, float]


def check(path: str | os.PathLike[str]) -> None:
    """Check that a picture can be written, before the work of planning.

    Raises:
        ConfigError: matplotlib is not installed, the format is unknown, or the folder is not writable.
    """
    file = Path(path)
    formats = _figure(1, 1).canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise ConfigError(f"{file} is not the name of a picture: use .png, .svg or .pdf")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be drawn: {file.parent} is not a writable folder")


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture as PNG, SVG or PDF, by the suffix of the path.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"{path} cannot be drawn: {error.strerror}") from error


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing plans needs matplotlib: pip install 'zerograph[plot]', or matplotlib alone"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _labels(plans: Sequence[Plan]) -> list[str]:
    """Return labels that tell the plans apart: length of sequences, ranks, stage."""
    by_stage, by_length = len({plan.stage for plan in plans}) > 1, _lengths_differ(plans)
    by_ranks = len({plan.mesh for plan in plans}) > 1 or not (by_stage or by_length)
    return [
        "\n".join([f"{plan.length or 0:,}"] * by_length + [_ranks(plan)] * by_ranks + [plan.stage] * by_stage)
        for plan in plans
    ]


def _lengths_differ(plans: Sequence[Plan]) -> bool:
    return len({plan.length for plan in plans}) > 1


def _ranks(plan: Plan) -> str:
    """Return ``64``, or ``8x8``."""
    return "x".join(f"{size:,}" for size in plan.mesh)


def _draw_memory(axes: Axes, labels: Sequence[str], bytes_by_kind: Sequence[Mapping[str, int]]) -> None:
    """Draw a bar of memory by kind for each label, in GiB."""
    named = [{kind: counts.get(kind, 0) for kind in _KINDS} for counts in bytes_by_kind]
    others = [sum(counts.values()) - sum(own.values()) for counts, own in zip(bytes_by_kind, named, strict=True)]
    bottom = [0.0] * len(labels)
    for kind, colour in {**_KINDS, "other": _OTHER}.items():
        heights = [count / _GIB for count in (others if kind == "other" else [own[kind] for own in named])]
        axes.bar(labels, heights, bottom=bottom, label=kind, color=colour, width=0.7)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]


def _draw_capacity(axes: Axes, capacity: int) -> None:
    axes.axhline(capacity / _GIB, color="black", linestyle="--", linewidth=1, label="usable memory")


def _unframed(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def memory_figure(plans: Sequence[Plan]) -> Figure:
    """Draw the memory of each plan as two bars: at the peak, and the maximum of each kind.

    At the peak, where activations are largest, there are few gradients; the second bar shows them. It is higher than
    the memory at any moment. One bar per stage is Figure 1 of the ZeRO paper, for the compiled step.
    """
    figure = _figure(max(7.5, 3.5 + 1.1 * len(plans)), 4.2)
    peak, most = figure.subplots(1, 2, sharey=True)
    labels = _labels(plans)
    _draw_memory(peak, labels, [{str(kind): count for kind, count in plan.memory.kinds.items()} for plan in plans])
    _draw_memory(most, labels, [plan.most for plan in plans])
    for index, plan in enumerate(plans):
        peak.annotate(
            show_bytes(plan.memory.peak),
            (index, plan.memory.peak / _GIB),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 2),
            textcoords="offset points",
        )
    capacity = min(plan.usable for plan in plans)
    if max(plan.memory.peak for plan in plans) > capacity / 2:
        # A line far above all bars would only make them small.
        for axes in (peak, most):
            _draw_capacity(axes, capacity)
    peak.set_title("at the peak", fontsize=10)
    peak.set_ylabel("GiB on each rank", fontsize=9)
    most.set_title("maximum of each kind", fontsize=10)
    for axes in (peak, most):
        _unframed(axes)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    first = plans[0]
    ranks = "" if len({plan.mesh for plan in plans}) > 1 else f" on {_ranks(first)} ranks"
    figure.suptitle(
        f"{first.parameters:,} parameters{ranks}, each on {first.machine}, in {first.precision}", fontsize=10
    )
    handles, texts = peak.get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=len(texts), fontsize=8, frameon=False)
    return figure


def timeline_figure(plans: Sequence[Plan]) -> Figure:
    """Draw each plan's step over time, lane by lane; of a loop the first micro-batch, and the number of the others."""
    lanes = [[lane for lane in _LANES if lane == "compute" or _has(plan.time, lane)] for plan in plans]
    figure = _figure(8.5, 1.1 + sum(0.55 + 0.4 * len(own) for own in lanes))
    ratios = [0.4 + len(own) for own in lanes]
    rows = figure.subplots(len(plans), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    longest = max(plan.time.seconds for plan in plans)
    unit, per_second = next((each for each in _UNITS if longest * each[1] >= 2), _UNITS[-1])
    artists: dict[str, Artist] = {}
    for axes, plan, own in zip(rows, plans, lanes, strict=True):
        for row, lane in enumerate(own):
            for activity, lane_spans in spans(plan.time, lane).items():
                bars = [(start * per_second, seconds * per_second) for start, seconds in lane_spans]
                artists[activity] = axes.broken_barh(
                    bars, (row - 0.36, 0.72), facecolors=COLOURS[activity], label=activity
                )
        _draw_more_micro_batches(axes, plan, len(own), per_second)
        axes.set_yticks(range(len(own)), [_LANES[lane] for lane in own])
        axes.set_ylim(len(own) - 0.5, -0.5)
        axes.set_xlim(0, longest * per_second)
        axes.set_title(_step_title(plan, unit, per_second), fontsize=9, loc="left")
        _unframed(axes)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    rows[-1].set_xlabel(unit, fontsize=9)
    order = [activity for activity in COLOURS if activity in artists]
    handles = [artists[activity] for activity in order]
    figure.legend(handles, order, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def spans(time: Timeline, lane: str) -> dict[str, list[Span]]:
    """Return the spans of a lane by activity; adjacent spans are joined."""
    by_activity: dict[str, list[Span]] = defaultdict(list)
    for activity, start, seconds in _spans(time, lane):
        joined = by_activity[activity]
        if joined and start - sum(joined[-1]) <= 1e-9 * time.seconds:
            joined[-1] = joined[-1][0], start + seconds - joined[-1][0]
        else:
            joined.append((start, seconds))
    return {activity: by_activity[activity] for activity in COLOURS if activity in by_activity}


def _spans(time: Timeline, lane: str) -> Iterator[tuple[str, float, float]]:
    end = 0.0
    others = _other_micro_batches(time)
    for event in time.events:
        if event.stream != lane:
            continue
        if lane == "compute":
            if others is not None and event.turn is None and end <= others[0] < event.start:
                end = others[1]
            if event.start - end > 1e-9 * time.seconds:
                # The device's clock advanced without a node: it carried a collective.
                yield CARRYING, end, event.start - end
            end = event.end
        yield _activity(event), event.start, event.seconds


def _activity(event: Event) -> str:
    if event.waits:
        return WAITING
    boxing = boxing_of(event.node)
    if event.stream == "communication" and boxing is not None:
        return boxing.kind
    if event.stream != "compute":
        return "transfer"
    return "recompute" if meta(event.node).get("recomputed") else origin(event.node).phase


def _other_micro_batches(time: Timeline) -> tuple[float, float] | None:
    """Return start and end of the micro-batches after the first, in seconds; None if there is no loop."""
    ends = [event.end for event in time.events if event.turn is not None and event.stream == "compute"]
    if not ends:
        return None
    after = [event.start for event in time.events if event.turn is None and event.start > max(ends)]
    return max(ends), min(after, default=time.seconds)


def _draw_more_micro_batches(axes: Axes, plan: Plan, lanes: int, per_second: float) -> None:
    others = _other_micro_batches(plan.time)
    count = plan.prepared.context.batch.micro_batches
    if others is None or count == 1:
        return
    start, end = (seconds * per_second for seconds in others)
    axes.broken_barh([(start, end - start)], (-0.36, lanes - 0.28), facecolors="#F7F7F7", edgecolors="#C8C8C8")
    axes.text((start + end) / 2, (lanes - 1) / 2, f"{count - 1} more micro-batches", ha="center", va="center", size=8)


def _has(time: Timeline, lane: str) -> bool:
    return any(event.stream == lane for event in time.events)


def _step_title(plan: Plan, unit: str, per_second: float) -> str:
    idle = (plan.time.exposed + plan.time.transfers) / (plan.time.seconds or 1.0)
    where = f"{plan.stage} on {_ranks(plan)} ranks, each on {plan.machine}, in {plan.precision}"
    waits = f", {idle:.0%} of it waiting" if idle >= 0.005 else ""
    return f"{where}: {plan.time.seconds * per_second:,.3g} {unit}{waits}"


def scaling_figure(plans: Sequence[Plan]) -> Figure:
    """Draw plans by number of ranks: peak memory, seconds per step, and the share of the step that computes.

    Plans of the same ranks for sequences of several lengths are drawn by length.
    """
    plans = sorted(plans, key=lambda plan: (plan.world_size, len(plan.mesh), plan.length or 0, plan.stage))
    by_length = _lengths_differ(plans) and len({plan.mesh for plan in plans}) == 1
    unit = "positions" if by_length else "ranks"
    labels = _labels(plans)
    figure = _figure(12, 4)
    memory, seconds, efficiency = figure.subplots(1, 3)

    _draw_memory(memory, labels, [{str(kind): count for kind, count in plan.memory.kinds.items()} for plan in plans])
    if max(plan.memory.peak for plan in plans) > plans[0].usable / 10:
        # A line far above all bars would make them invisible.
        _draw_capacity(memory, plans[0].usable)
    memory.set(title="peak of a rank, GiB", xlabel=unit)

    compute = [plan.time.compute for plan in plans]
    waiting = [plan.time.seconds - plan.time.compute for plan in plans]
    seconds.bar(labels, compute, label="computing", color=COLOURS["forward"])
    seconds.bar(labels, waiting, bottom=compute, label="waiting", color=COLOURS[WAITING])
    seconds.set(title="a step, seconds", xlabel=unit)

    for stage, grid in dict.fromkeys((plan.stage, len(plan.mesh) > 1) for plan in plans):
        own = [plan for plan in plans if (plan.stage, len(plan.mesh) > 1) == (stage, grid)]
        sizes = [(plan.length or 0) if by_length else plan.world_size for plan in own]
        shares = [100 * plan.efficiency for plan in own]
        name, line = f"{stage}, {'on a grid of nodes' if grid else 'in a line'}", "--" if grid else "-"
        efficiency.plot(sizes, shares, line, marker="o", color=_STAGES[stage.partition(",")[0]], label=name)
    efficiency.set(title="share of the step computing, %", xlabel=unit, ylim=(0, 105), xscale="log")
    for axes, columns in ((memory, 4), (seconds, 2), (efficiency, 2)):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=columns, frameon=False)
        _unframed(axes)
    return figure
