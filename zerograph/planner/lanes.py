"""Steps over time: what the device computes, and beside it what is on the wire, lane by lane."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.planner import pictures
from zerograph.planner.plan import Plan
from zerograph.planner.timeline import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the top; names as they are shown.
LANES = {"compute": "compute", "communication": "collectives", "host": "to and from host", "files": "files"}
WAITING, CARRYING = "waiting", "carrying collectives"
COLOURS = {
    "forward": "#3B6FB6",
    "backward": "#8E6BBF",
    "update": "#F28E2B",
    "recompute": "#CBB8E6",
    CARRYING: "#E8D9A8",
    WAITING: "#4D4D4D",
    "all-gather": "#59A14F",
    "reduce-scatter": "#D1495B",
    "all-reduce": "#C9A227",
    "all-to-all": "#17BECF",
    "transfer": "#7F7F7F",
}
# Seconds, and how many of them make one.
_UNITS = (("s", 1.0), ("ms", 1e3), ("\N{MICRO SIGN}s", 1e6))

Span = tuple[float, float]


def draw(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Draw each plan's step below the other, on one axis of time: PNG, SVG or PDF, as the path's ending says.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pictures.save(figure(plans), path)


def figure(plans: Sequence[Plan]) -> Figure:
    """One picture of all steps; of a loop's turns the first is drawn, and how many follow is said."""
    lanes = [[lane for lane in LANES if lane == "compute" or _has(plan.time, lane)] for plan in plans]
    drawn = pictures.figure(8.5, 1.1 + sum(0.55 + 0.4 * len(own) for own in lanes))
    ratios = [0.4 + len(own) for own in lanes]
    rows = drawn.subplots(len(plans), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    longest = max(plan.time.seconds for plan in plans)
    unit, times = next((one for one in _UNITS if longest * one[1] >= 2), _UNITS[-1])
    shown: dict[str, Artist] = {}
    for axes, plan, own in zip(rows, plans, lanes, strict=True):
        for place, lane in enumerate(own):
            for what, spans in bars(plan.time, lane).items():
                at = [(start * times, seconds * times) for start, seconds in spans]
                shown[what] = axes.broken_barh(at, (place - 0.36, 0.72), facecolors=COLOURS[what], label=what)
        _more_turns(axes, plan, len(own), times)
        axes.set_yticks(range(len(own)), [LANES[lane] for lane in own])
        axes.set_ylim(len(own) - 0.5, -0.5)
        axes.set_xlim(0, longest * times)
        axes.set_title(_said(plan, unit, times), fontsize=9, loc="left")
        pictures.plain(axes)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    rows[-1].set_xlabel(unit, fontsize=9)
    order = [what for what in COLOURS if what in shown]
    drawn.legend([shown[what] for what in order], order, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return drawn


def bars(time: Timeline, lane: str) -> dict[str, list[Span]]:
    """By what it is, the spans of a lane: start and seconds. What touches is one span."""
    found: dict[str, list[Span]] = defaultdict(list)
    for what, start, seconds in _spans(time, lane):
        last = found[what][-1] if found[what] else None
        if last is not None and start - sum(last) <= 1e-9 * time.seconds:
            found[what][-1] = last[0], start + seconds - last[0]
        else:
            found[what].append((start, seconds))
    return {what: found[what] for what in COLOURS if what in found}


def _spans(time: Timeline, lane: str) -> Iterator[tuple[str, float, float]]:
    done = 0.0
    turns = _turns(time)
    for event in time.events:
        if event.stream != lane:
            continue
        if lane == "compute":
            if turns is not None and event.turn is None and done <= turns[0] < event.start:
                done = turns[1]
            if event.start - done > 1e-9 * time.seconds:
                # The device's clock went on, and no node of its own ran.
                yield CARRYING, done, event.start - done
            done = event.end
        yield _what(event), event.start, event.seconds


def _what(event: Event) -> str:
    if event.waits:
        return WAITING
    boxing = boxing_of(event.node)
    if event.stream == "communication" and boxing is not None:
        return boxing.kind
    if event.stream != "compute":
        return "transfer"
    return "recompute" if meta(event.node).get("recomputed") else origin(event.node).phase


def _turns(time: Timeline) -> Span | None:
    """Where the first turn of a loop ends, and where what follows the last begins; None where nothing is repeated."""
    own = [event.end for event in time.events if event.turn is not None and event.stream == "compute"]
    if not own:
        return None
    end = max(own)
    behind = [event.start for event in time.events if event.turn is None and event.start > end]
    return end, min(behind, default=time.seconds)


def _more_turns(axes: Axes, plan: Plan, lanes: int, times: float) -> None:
    between = _turns(plan.time)
    turns = plan.prepared.context.batch.micro_batches
    if between is None or turns == 1:
        return
    start, end = (one * times for one in between)
    axes.broken_barh([(start, end - start)], (-0.36, lanes - 0.28), facecolors="#F7F7F7", edgecolors="#C8C8C8")
    axes.text((start + end) / 2, (lanes - 1) / 2, f"{turns - 1} more micro-batches", ha="center", va="center", size=8)


def _has(time: Timeline, lane: str) -> bool:
    return any(event.stream == lane for event in time.events)


def _said(plan: Plan, unit: str, times: float) -> str:
    seconds = plan.time.seconds or 1.0
    idle = (plan.time.exposed + plan.time.transfers) / seconds
    where = f"{plan.stage} on {pictures.ranks(plan)} ranks, each on {plan.machine}, in {plan.precision}"
    waits = f", {idle:.0%} of it waiting" if idle >= 0.005 else ""
    return f"{where}: {plan.time.seconds * times:,.3g} {unit}{waits}"
