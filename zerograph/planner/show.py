"""Plans as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zerograph.base.sizes import show_bytes, show_seconds
from zerograph.compiler.memory_search import remedies
from zerograph.planner.plan_data import Candidate, PlanData


def text(plan: PlanData, width: int = 100) -> str:
    """Return a plan as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(page(plan))
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return shown.getvalue().rstrip()


def page(plan: PlanData) -> RenderableType:
    """Return a plan on a page: title, memory, traffic, time, and the candidates of the search."""
    grid = "x".join(map(str, plan.mesh))
    head = Text(f"{plan.parameters:,} parameters on {grid} ranks, each on {plan.machine}, in {plan.precision}")
    head.append(f"\n{plan.options}", style="dim")
    if plan.longer:
        head.append(f"\nsequences of {plan.length:,} positions; {plan.longer}")
    if plan.memory.sizes:
        head.append(f"\nall numbers are for inputs of {plan.memory.validity}")
    parts: list[RenderableType] = [head, _memory(plan), _wire(plan), _time(plan)]
    if plan.alternatives:
        parts.append(candidates(plan.alternatives))
    return Group(*parts)


def _memory(plan: PlanData) -> RenderableType:
    table = _table("memory of a rank", "stored", "maximum", "at the peak")
    for kind in dict.fromkeys([*plan.memory.kinds, *plan.most]):
        cells = (plan.at_rest.get(kind, 0), plan.most.get(kind, 0), plan.memory.kinds.get(kind, 0))  # type: ignore[call-overload]
        table.add_row(kind, *(show_bytes(count) if count else "" for count in cells))
    fits = "fits" if plan.memory.peak <= plan.usable else "does not fit"
    table.add_section()
    table.add_row("together", show_bytes(plan.memory.at_rest), "", show_bytes(plan.memory.peak))
    where = plan.memory.where
    place = ", ".join(filter(None, (where.phase, where.module)))
    room = show_bytes(plan.capacity)
    if plan.headroom:
        room = f"{show_bytes(plan.usable)} ({room} less a headroom of {show_bytes(plan.headroom)})"
    verdict = f"{fits} into {room}; the peak is in {place}"
    lines: list[RenderableType] = [table, Text(verdict, style="green" if plan.fits else "bold red")]
    if plan.memory.peak > plan.usable:
        lines.append(Text(f"What would help: {'; '.join(remedies(plan.memory, plan.prepared.context))}."))
    if plan.host is not None and plan.host.peak >= _WORTH_A_LINE:
        room = "" if plan.cpu_capacity is None else f", of {show_bytes(plan.cpu_capacity)}"
        bytes_used = f"{show_bytes(plan.host.at_rest)} stored, {show_bytes(plan.host.peak)} at the peak{room}"
        lines.append(Text(f"in the CPU's memory: {bytes_used}", style="" if plan.host_fits else "bold red"))
    if plan.in_files:
        lines.append(Text(f"in files: {show_bytes(plan.in_files)}"))
    return Group(*lines)


# Step counts are always on the CPU.
_WORTH_A_LINE = 2**14


def _wire(plan: PlanData) -> RenderableType:
    table = _table("sent by a rank in a step", "times", "bytes")
    for sent in plan.wire:
        along = f" along {sent.mesh_dim}" if len(plan.mesh) > 1 else ""
        table.add_row(f"{sent.phase}: {sent.kind}{along}", f"{sent.times:,}", show_bytes(sent.bytes))
    table.add_section()
    table.add_row("together", "", show_bytes(plan.wire_bytes))
    return table


def _time(plan: PlanData) -> RenderableType:
    table = _table("time of a step", "time", "share")
    whole = plan.time.seconds or 1.0
    for activity, seconds in (
        ("computing", plan.time.compute),
        ("waiting for collectives", plan.time.exposed),
        ("waiting for transfers", plan.time.transfers),
        *([("waiting for the CPU's update", plan.time.updating)] if plan.time.updating else ()),
    ):
        table.add_row(activity, show_seconds(seconds), f"{seconds / whole:.1%}")
    table.add_section()
    table.add_row("together", show_seconds(plan.time.seconds), "")
    hidden = max(0.0, plan.time.communication - plan.time.exposed)
    text = f"collectives take {show_seconds(plan.time.communication)}, {show_seconds(hidden)} of it while it computes"
    return Group(table, Text(_speed(plan)), Text(text))


def _speed(plan: PlanData) -> str:
    """Return the speed of each device: tokens or samples per second, operations, and the share of its peak."""
    count, unit = plan.samples_per_second, "samples"
    if plan.tokens_per_second is not None:
        count, unit = plan.tokens_per_second, "tokens"
    number = f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
    rate = plan.operations / (plan.time.seconds or 1.0) / 1e12
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    return f"each device: {number} {unit}/s, {rate:.3g} Tflop/s in products{mfu}"


def candidates(tried: Sequence[Candidate]) -> Table:
    """Return a table of the candidates of a search, with verdicts."""
    table = Table("stage", "mesh", "trade-offs", "peak", "time", "verdict", box=box.SIMPLE_HEAD, title_justify="left")
    for each in tried:
        peak = "" if each.plan is None else show_bytes(each.plan.memory.peak)
        seconds = "" if each.plan is None else show_seconds(each.plan.time.seconds)
        style = "bold green" if each.verdict.startswith("the fastest") else ""
        grid = "x".join(map(str, each.mesh))
        table.add_row(each.stage, grid, each.trade_offs, peak, seconds, each.verdict, style=style)
    return table


def _table(*columns: str) -> Table:
    table = Table(columns[0], box=box.SIMPLE_HEAD)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table
