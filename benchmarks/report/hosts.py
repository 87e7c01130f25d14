"""A run between two hosts as a page: step times beside compute and wire, and the bytes that leave a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import CONTENDERS, OFF, REFERENCE, STAGES
from benchmarks.generated import stamp
from benchmarks.report.goals import Verdict
from benchmarks.report.markdown import facts, goals_table, number, problems
from benchmarks.report.rows import Row, best_peer, floor, median, ratio
from benchmarks.tables import line

HOSTS = 2
RATES: Mapping[str, float | None] = {"1gbit": 1e9, "10gbit": 1e10, "none": None}

# Limits of step time / max(compute, wire), and of step time / compute where the wire is fast.
OVER_WIRE = {OFF: 1.15, "1": 1.15, "2": 1.15, "3": 1.08}
OVER_COMPUTE = 1.10
# Of steps with an int8 wire at 1 Gbit/s: step time / compute at stage 2, and times as fast as these.
FASTER_BY_CODES = {"2": {"ddp": 2.5, "fsdp2-kept": 2.5}, "3": {"zerograph-3": 2.2}}
# Headers and the ranks' notes may add this much to the bytes that must leave a host.
HEADERS = 1.06
# Limit of predicted / measured step time, and of its inverse.
PREDICTION = 1.15

NOTES = """\
**step**: median milliseconds of a step over all steps and ranks; all ranks begin each step together. **compute**: the
step of as many processes that exchange nothing, on the same cores. **wire**: bytes that must leave a host / its rate:
the parameters once (stages off to 2: half for the gradients, half for the update or the parameters), one and a half
times at stage 3. **limit**: the greater of the two, reached if exchanges overlap computation entirely. **/ peer**:
over the best peer of the stage. **sent**: MB of 10^6 bytes that a host sends in a step, by the counters of its
interface, headers included. **listed**: those that `step.inspect.collectives()` lists; with codes and with hpZ,
**wire** is the time of these. **predicted**: milliseconds of a step that `zg.plan` predicts for the machine that
`zerograph calibrate` has measured between the same hosts, and **/ step**: that over the measured one. **flat**: bytes
of whole parameters and gradients if every rank sent its pieces to every rank of the other host; a step that exchanges
rows of an embedding sends less on any number of ranks.
**losses**: mean over the ranks, of the first steps."""


@dataclass(frozen=True)
class Setting:
    """A model, a rate and a number of ranks on each of the two hosts.

    Attributes:
        weight: bytes of the model's parameters; 0 where nothing was measured.
    """

    size: str
    ranks_per_host: int
    rate: str
    weight: int = 0

    @property
    def name(self) -> str:
        """Name of the setting in results."""
        rate = "no limit" if RATES[self.rate] is None else self.rate.replace("gbit", " Gbit/s")
        ranks = "1 rank" if self.ranks_per_host == 1 else f"{self.ranks_per_host} ranks"
        return f"{self.size}, {HOSTS} hosts of {ranks}, {rate}"

    def least_sent(self, stage: str) -> float:
        """Return the bytes that must leave a host in a step of a stage."""
        return self.weight * _passes(stage) * (HOSTS - 1) / HOSTS

    def flat_sent(self, stage: str) -> float:
        """Return the bytes that leave a host if each rank sends a piece to each rank of the other host."""
        return self.least_sent(stage) * self.ranks_per_host

    def wire(self, stage: str, sent: float = 0.0) -> float | None:
        """Return the seconds that the wire takes at least; None without a limit.

        Args:
            sent: the bytes that leave a host, if they are fewer because they are codes; 0: those of the stage.
        """
        rate = RATES[self.rate]
        return None if rate is None else 8 * (sent or self.least_sent(stage)) / rate


def _passes(stage: str) -> int:
    """Return how often a whole bucket is gathered or reduced in a step; an all-reduce is both."""
    return 3 if stage == "3" else 0 if stage == REFERENCE else 2


Table = Mapping[str, Row]
# By the setting's name and that of the contender: seconds of a step as the planner predicts them.
Predicted = Mapping[str, Mapping[str, float]]


def _wire(setting: Setting, row: Row) -> float | None:
    """Return the seconds that the wire takes at least in a contender's step."""
    is_less = row.contender.coded or row.contender.grid
    return setting.wire(row.contender.stage, row.listed * setting.ranks_per_host if is_less else 0.0)


def limit(setting: Setting, row: Row, table: Table) -> float | None:
    """Return the seconds that a contender's step takes if compute and wire overlap completely."""
    base, wire = floor(table), _wire(setting, row)
    times = [time for time in (base.median if base else None, wire) if time is not None]
    return max(times) if base else None


def verdicts(
    setting: Setting, table: Table, predicted: Mapping[str, float] | None = None, *, quiet: bool = True
) -> Iterator[Verdict]:
    """Yield the goals of a setting, met or not; those of times only if the machine was quiet."""
    for ours in table.values():
        stage, name = ours.contender.stage, ours.contender.name
        if not ours.contender.ours or ours.problem:
            continue
        title = ours.contender.title.removeprefix("zerograph ").removesuffix(", eager")
        title = f"stage {title}" if title[0] in STAGES else title
        if quiet:
            yield from _times(setting, stage, title, ours, table)
            if predicted and name in predicted and ours.median is not None:
                value = max(predicted[name] / ours.median, ours.median / predicted[name])
                goal = f"{title}: predicted and measured step time, the greater / the less"
                yield Verdict(setting.name, goal, value, PREDICTION, True, ours.contender.title)
        if ours.listed and ours.wire is not None:
            value = ratio(ours.wire, ours.listed * setting.ranks_per_host)
            goal = f"{title}: bytes that leave a host / those that collectives() lists"
            yield Verdict(setting.name, goal, value, HEADERS, True, ours.contender.title)
        if setting.ranks_per_host > 1 and ours.wire is not None and not ours.contender.coded:
            value = ratio(ours.wire, setting.flat_sent(stage))
            goal = f"{title}: bytes that leave a host / of the flat exchange"
            yield Verdict(setting.name, goal, value, HEADERS / setting.ranks_per_host, True, ours.contender.title)


def _times(setting: Setting, stage: str, title: str, ours: Row, table: Table) -> Iterator[Verdict]:
    name, base = ours.contender.title, floor(table)
    if ours.contender.coded:
        yield from _times_with_codes(setting, title, ours, table)
        return
    if setting.ranks_per_host == 1 and base is not None and setting.rate == "1gbit":
        value = ratio(ours.median, limit(setting, ours, table))
        yield Verdict(setting.name, f"{title}: step time / max(compute, wire)", value, OVER_WIRE[stage], True, name)
    if setting.ranks_per_host == 1 and base is not None and setting.rate == "10gbit":
        value = ratio(ours.median, base.median)
        yield Verdict(setting.name, f"{title}: step time / compute", value, OVER_COMPUTE, True, name)
    peer = best_peer(table, stage, median)
    if peer is not None:
        value, names = ratio(peer.median, ours.median), f"{name} / {peer.contender.title}"
        yield Verdict(setting.name, f"{title}: times as fast as the best peer", value, 1.0, False, names)


def _times_with_codes(setting: Setting, title: str, ours: Row, table: Table) -> Iterator[Verdict]:
    if setting.rate != "1gbit" or setting.ranks_per_host > 1:
        return
    name, stage, base = ours.contender.title, ours.contender.stage, floor(table)
    if stage == "2" and base is not None:
        value = ratio(ours.median, base.median)
        yield Verdict(setting.name, f"{title}: step time / compute", value, OVER_COMPUTE, True, name)
    for other, least in FASTER_BY_CODES[stage].items():
        row = table.get(other)
        if row is not None and row.median is not None:
            goal = f"{title}: times as fast as {CONTENDERS[other].title}"
            yield Verdict(setting.name, goal, ratio(row.median, ours.median), least, False, name)


def page(
    about: Mapping[str, str],
    titles: Mapping[str, str],
    tables: Mapping[Setting, Table],
    plots: Sequence[str],
    predicted: Predicted | None = None,
    *,
    quiet: bool = True,
    missing: Sequence[str] = (),
) -> str:
    """Return the whole page.

    Args:
        about: date, versions, machine.
        titles: by size, what is trained.
        tables: by setting the rows of its contenders.
        plots: names of the pictures beside the page.
        predicted: what the planner predicts.
        quiet: the machine did nothing else. Else no goal of a time is judged.
        missing: what was left out for lack of time.
    """
    made = stamp("benchmarks/results/hosts.md")
    parts = ["# Between two hosts", f"Written by `python benchmarks/hosts.py`.\n{made}", facts(about)]
    parts += ["\n".join(f"- {size}: {titles[size]}" for size in dict.fromkeys(one.size for one in tables))]
    parts += [f"![{name}]({name})" for name in plots]
    if not quiet:
        parts.append("The machine did other work during this run: its times say nothing, only its bytes and losses do.")
    if missing:
        parts.append(f"Not measured within the time of the run: {'; '.join(missing)}.")
    plans = {setting: (predicted or {}).get(setting.name, {}) for setting in tables}
    goals = [
        goal for setting, table in tables.items() for goal in verdicts(setting, table, plans[setting], quiet=quiet)
    ]
    if goals:
        parts += ["## Goals", f"{sum(goal.met is True for goal in goals)} of {len(goals)} met.", goals_table(goals)]
    for setting, table in tables.items():
        parts += [f"## {setting.name}", _table(setting, table, plans[setting]), *problems(table)]
    return "\n\n".join([*parts, "## What the columns mean", NOTES, ""])


def _table(setting: Setting, table: Table, predicted: Mapping[str, float]) -> str:
    head = (
        "contender",
        "stage",
        "step",
        "quartiles",
        "predicted",
        "/ step",
        "wire",
        "/ limit",
        "/ peer",
        "sent",
        "listed",
    )
    head = (*head, "/ flat", "losses")
    lines = [line(head), line(["---", "---", *["---:"] * (len(head) - 3), "---"])]
    for row in table.values():
        stage = row.contender.stage
        peer = best_peer(table, stage, median)
        cells = [
            row.contender.title,
            "" if stage == REFERENCE else stage,
            number(row.median, 1000, 0),
            "" if row.quartiles is None else " to ".join(f"{one * 1000:.0f}" for one in row.quartiles),
            number(predicted.get(row.contender.name), 1000, 0),
            number(ratio(predicted.get(row.contender.name), row.median), 1, 2),
            "" if stage == REFERENCE else number(_wire(setting, row), 1000, 0),
            number(ratio(row.median, limit(setting, row, table)), 1, 2),
            number(ratio(row.median, peer.median if peer else None), 1, 2),
            number(row.wire, 1e-6, 1),
            number(row.listed * setting.ranks_per_host, 1e-6, 1) if row.listed else "",
            number(ratio(row.wire, setting.flat_sent(stage)), 1, 2),
            " ".join(f"{loss:.4f}" for loss in row.losses),
        ]
        lines.append(line(cells))
    return "\n".join(lines)
