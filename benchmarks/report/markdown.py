"""A run as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.contenders import OFF, REFERENCE
from benchmarks.generated import stamp
from benchmarks.report.goals import Tables, Verdict, verdicts
from benchmarks.report.rows import Row, best_peer, disagreements, floor, median, process_growth, ratio
from benchmarks.tables import line

NOTES = """\
**the floor would**: what a step that exchanges nothing, the compute floor, would reach; only by updating half of the
parameters can a system do better, and by little.

**step**: median milliseconds of a step, with quartiles, over all rounds, steps and ranks; all ranks begin each step
together. **/ floor**: over the fastest pair of processes that exchange nothing. **/ peer**: over the best peer of the
stage (time), or the lowest (memory).
**memory**, in MB of 10^6 bytes, from a run of its own in which glibc gives freed blocks back
(`MALLOC_MMAP_THRESHOLD_=MALLOC_TRIM_THRESHOLD_=131072`): **process**: `VmHWM` over the measured steps, reset before
them, less what was resident then; **tensors**: the most that a step's tensors take beyond those at its start, by the
allocator's own reports; **state**: tensors between steps, parameters, optimizer state and gradient buffers that stay
(gradients are cleared at the end of a step by all); **peak**: process and state together, all that training takes:
who keeps whole parameters between steps grows less within one, and needs no less. **sent**: MB that a rank writes to
its sockets in a step, and that the other reads out of its memory. **first step**, in seconds: from after the imports
and the start of the process group to the end of the first step, model and wrapper included; **cold**: round 1, with
empty caches (Inductor's, and what DeepSpeed builds); **warm**: median of the later rounds. **losses**: mean over the
ranks, of the first steps."""

HEAD = (
    *("contender", "step", "quartiles", "/ floor", "/ peer"),
    *("process", "/ peer", "tensors", "state", "peak", "sent", "first step cold", "warm", "losses"),
)


def page(about: Mapping[str, str], titles: Mapping[str, str], tables: Tables, plots: Sequence[str]) -> str:
    """The whole page.

    Args:
        about: date, versions, machine.
        titles: by size, what is trained.
        plots: names of the pictures beside the page.
    """
    made = stamp("benchmarks/results/peers-mid.md")
    parts = ["# Beside its peers", f"Written by `make bench` (`python benchmarks/peers.py`).\n{made}", facts(about)]
    parts += [f"![{name}]({name})" for name in plots]
    found = verdicts(tables)
    if found:
        met = sum(one.met is True for one in found)
        parts += ["## Goals", f"{met} of {len(found)} met.", goals_table(found)]
    for task, table in tables.items():
        parts += [f"## {task}", titles[task], _table(table), *problems(table)]
    return "\n\n".join([*parts, "## What the columns mean", NOTES, ""])


def facts(about: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in about.items())


def goals_table(found: Sequence[Verdict]) -> str:
    """Goals, limits and whether they are met."""
    head = ("size", "goal", "limit", "reached", "", "the floor would", "whose numbers")
    lines = [line(head), line(["---"] * len(head))]
    for one in found:
        limit = f"{'at most' if one.at_most else 'at least'} {one.limit:.2f}"
        value = "" if one.value is None else f"{one.value:.3f}"
        verdict = {True: "met", False: "**missed**", None: "not measured"}[one.met]
        best = "" if one.floor is None else f"{one.floor:.3f}"
        lines.append(line((one.task, one.goal, limit, value, verdict, best, one.compared)))
    return "\n".join(lines)


def _table(table: Mapping[str, Row]) -> str:
    lines = [line(HEAD), line(["---", *["---:"] * (len(HEAD) - 2), "---"])]
    for stage in (REFERENCE, OFF, "1", "2", "3"):
        of_stage = [row for row in table.values() if row.contender.stage == stage]
        if of_stage:
            title = {REFERENCE: "nothing exchanged", OFF: "data parallel (off)"}.get(stage, f"stage {stage}")
            lines.append(line([f"**{title}**", *[""] * (len(HEAD) - 1)]))
            lines += [line(_cells(row, table)) for row in of_stage]
    return "\n".join(lines)


def _cells(row: Row, table: Mapping[str, Row]) -> list[str]:
    stage, base = row.contender.stage, floor(table)
    fast, lean = best_peer(table, stage, median), best_peer(table, stage, process_growth)
    return [
        row.contender.title,
        number(row.median, 1000, 1),
        "" if row.quartiles is None else " to ".join(f"{one * 1000:.0f}" for one in row.quartiles),
        number(ratio(row.median, base.median if base else None), 1, 3),
        number(ratio(row.median, fast.median if fast else None), 1, 3),
        number(row.process_growth, 1e-6, 1),
        number(ratio(row.process_growth, lean.process_growth if lean else None), 1, 3),
        number(row.tensor_growth, 1e-6, 1),
        number(row.state, 1e-6, 1),
        number(row.peak, 1e-6, 1),
        number(row.sent, 1e-6, 1),
        number(row.first_cold, 1, 1),
        number(row.first_warm, 1, 1),
        " ".join(f"{loss:.5f}" for loss in row.losses),
    ]


def problems(table: Mapping[str, Row]) -> list[str]:
    lines = [f"- {row.contender.title}: {row.problem}" for row in table.values() if row.problem]
    lines += [
        f"- **losses of {table[name].contender.title} are {off:.2g} from the others'**"
        for name, off in disagreements(table).items()
    ]
    coded = any(row.contender.coded for row in table.values())
    return ["\n".join(lines) or f"All losses agree to 1e-4{', those with codes to 2e-2' if coded else ''}."]


def number(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"
