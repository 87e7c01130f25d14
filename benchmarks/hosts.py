"""Step time and bytes of zerograph and its peers between two hosts, which are namespaces of this machine (root).

python benchmarks/hosts.py                  # GPT mid and small at 1 and 10 Gbit/s, for at most twelve minutes
python benchmarks/hosts.py --resume         # what the run before left out, or what it was interrupted in
python benchmarks/hosts.py --quick          # GPT tiny, three steps, ours and DDP: a minute, to see that everything runs
python benchmarks/hosts.py --settings 1x1gbit --contenders 'alone-2' --contenders 'zerograph-*'
python benchmarks/hosts.py --again benchmarks/results/hosts.json      # the page anew from a run's measurements

Each contender trains the same model from the same seed on the same batches, over gloo, one compute thread per rank,
fp32, fused AdamW. Each host has a network, processes and a name of its own; a veth pair that ``tc tbf`` shapes joins
them. The cores are shared, so four ranks compute at half the speed of two. Times are judged if the load was under 1
before the run. The page is written after each measurement. Ends with status 1 if a contender fails or a loss disagrees.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.choose import choose  # noqa: E402
from benchmarks.contenders import CONTENDERS, Contender  # noqa: E402
from benchmarks.generated import commit_of  # noqa: E402
from benchmarks.measure import pair  # noqa: E402
from benchmarks.measure.hosts import two_hosts, unavailable  # noqa: E402
from benchmarks.peers import SIZES, about  # noqa: E402
from benchmarks.report import hosts, plots  # noqa: E402
from benchmarks.report.hosts import RATES, Setting  # noqa: E402
from benchmarks.report.rows import rows, succeeded  # noqa: E402

EAGER = ["alone-2", "ddp", "zero-redundancy", "fsdp2*", "zerograph-*"]
# Ranks on each host x rate. Four ranks share two cores: there the bytes count, of a small model.
SETTINGS = {"mid": ["1x1gbit", "1x10gbit"], "small": ["2x1gbit"]}
FOR_BYTES = ["alone-2", "ddp", "zerograph-*"]
SIZES_BY_DEFAULT, OF_THE_SIZE = list(SETTINGS), list[str]()
# Load of the machine before the run up to which times are judged.
QUIET = 1.0
RESULTS = ROOT / "benchmarks" / "results" / "hosts"


def main(
    sizes: Annotated[list[str], typer.Option(help=f"of {', '.join(SIZES)}; may be repeated")] = SIZES_BY_DEFAULT,
    settings: Annotated[list[str], typer.Option(help="1x1gbit, 2x10gbit, 1xnone: ranks on a host, rate")] = OF_THE_SIZE,
    contenders: Annotated[list[str], typer.Option(help="names or patterns; may be repeated")] = EAGER,
    rounds: Annotated[int, typer.Option(min=1, help="how often each contender is timed")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="steps measured in each round")] = 3,
    predict: Annotated[bool, typer.Option(help="calibrate the planner with one rank on a host, and predict")] = True,
    quick: Annotated[bool, typer.Option(help="GPT tiny, three steps, ours and DDP")] = False,
    patience: Annotated[float, typer.Option(help="seconds until one measurement is ended")] = 120.0,
    minutes: Annotated[float, typer.Option(help="begin no measurement after so many minutes")] = 11.0,
    resume: Annotated[bool, typer.Option("--resume", help="measure what the JSON file of --out lacks")] = False,
    out: Annotated[Path, typer.Option(help="where to write: this name with .json, .md and -*.png")] = RESULTS,
    again: Annotated[Path | None, typer.Option(help="measure nothing: write the page of this JSON file anew")] = None,
) -> None:
    """Zerograph and its peers between two hosts: time and bytes."""
    if again is not None:
        run = json.loads(again.read_text())
    else:
        if reason := unavailable():
            typer.echo(f"skipped: {reason}")
            return
        if quick:
            sizes, settings, steps = ["tiny"], settings or ["1x1gbit", "2x1gbit"], 3
            contenders = FOR_BYTES if contenders == EAGER else contenders
        if unknown := set(sizes) - set(SIZES):
            raise typer.BadParameter(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
        chosen = [
            one
            for one in choose(contenders, [one for one in CONTENDERS.values() if not one.sockets])
            if not one.compiled
        ]
        wanted = [_setting(size, text) for size in sizes for text in settings or SETTINGS.get(size, ["1x1gbit"])]
        # What takes longest at the rate that most goals are of comes first.
        wanted.sort(key=lambda setting: setting.rate != "1gbit")
        bytes_only = chosen if contenders != EAGER else choose(FOR_BYTES, chosen)
        out.parent.mkdir(parents=True, exist_ok=True)
        run = _run(out.with_suffix(".json"), rounds, steps, resume=resume)
        plan = Plan(wanted, chosen, bytes_only, rounds, steps, predict and not quick)
        for _ in measured(run, plan, patience, time.monotonic() + 60 * minutes):
            write(run, out)
        typer.echo(out.with_suffix(".md").read_text())
    if not write(run, out):
        raise typer.Exit(1)


def _run(file: Path, rounds: int, steps: int, *, resume: bool) -> dict[str, Any]:
    """Return a run without measurements, or the one to go on with.

    Raises:
        typer.BadParameter: the run was measured at another commit.
    """
    load, commit = os.getloadavg()[0], commit_of() or "unknown"
    if resume and file.exists():
        run: dict[str, Any] = json.loads(file.read_text())
        if run["about"].get("commit") != commit:
            raise typer.BadParameter(f"{file} was measured at {run['about'].get('commit')}, not at {commit}")
        # Those that failed are tried again.
        run["measurements"] = [one for one in run["measurements"] if "failed" not in one]
        run["about"]["load"] += f", {load:.1f} before it went on"
        run["quiet"] = run["quiet"] and load < QUIET
        return run
    ranks = "one compute thread each, gloo; the hosts share the cores"
    facts = about(rounds, steps) | {"ranks": ranks, "load": f"{load:.1f} before the run"}
    # Not the page's own, which may be written anew later.
    facts["commit"] = commit
    return {"about": facts, "quiet": load < QUIET, "predicted": {}, "measurements": []}


def _setting(size: str, text: str) -> Setting:
    ranks, _, rate = text.partition("x")
    if not ranks.isdigit() or int(ranks) < 1 or rate not in RATES:
        raise typer.BadParameter(f"no setting {text!r}: ranks on a host, x, and one of {', '.join(RATES)}: 2x1gbit")
    return Setting(size, int(ranks), rate)


@dataclass(frozen=True)
class Plan:
    """Settings and contenders of a run.

    Attributes:
        bytes_only: the contenders where several ranks of a host share the cores.
        predicts: calibrate the planner between the hosts of each setting, and predict our steps.
    """

    settings: Sequence[Setting]
    chosen: Sequence[Contender]
    bytes_only: Sequence[Contender]
    rounds: int
    steps: int
    predicts: bool

    def contenders(self, setting: Setting) -> list[Contender]:
        """Return the contenders of a setting: codes are for slow wires, grids for several ranks on a host."""
        several, is_slow = setting.ranks_per_host > 1, setting.rate == "1gbit"
        everyone = self.bytes_only if several else self.chosen
        return [one for one in everyone if (several or not one.grid) and (is_slow or not one.coded)]


def measured(run: dict[str, Any], plan: Plan, patience: float, deadline: float) -> Iterator[None]:
    """Add to a run what it lacks; yield after each measurement. Nothing is begun after the deadline.

    Each contender runs on hosts of its own; one that fails is not started again in that setting.
    """
    run["missing"] = []
    done = {(one["task"], one["contender"], one["round"]): "ranks" in one for one in run["measurements"]}
    lost = {(task, name) for (task, name, _), good in done.items() if not good}
    with tempfile.TemporaryDirectory() as caches:
        for setting in plan.settings:
            for number, one in itertools.product(range(1, plan.rounds + 1), plan.contenders(setting)):
                if (setting.name, one.name, number) in done or (setting.name, one.name) in lost:
                    continue
                if time.monotonic() > deadline:
                    run["missing"].append(f"{setting.name}: {one.title}")
                    continue
                found = _measured(setting, one, plan.steps, Path(caches) / one.name, patience)
                if "ranks" not in found:
                    lost.add((setting.name, one.name))
                typer.echo(f"{setting.name}, {number}: {one.title}: {_short(found)}")
                place = [setting.size, setting.ranks_per_host, setting.rate]
                task = {"task": setting.name, "setting": place, "contender": one.name, "kind": "time", "round": number}
                run["measurements"].append({**task, **found})
                yield
            if not plan.predicts or run["predicted"].get(setting.name):
                continue
            if time.monotonic() > deadline:
                run["missing"].append(f"{setting.name}: predictions")
                continue
            run["predicted"][setting.name] = predictions(setting, plan.contenders(setting), patience)
            yield
    yield


def _measured(setting: Setting, contender: Contender, steps: int, cache: Path, patience: float) -> dict[str, Any]:
    ranks = replace(contender, ranks=hosts.HOSTS * setting.ranks_per_host)
    with two_hosts(None if setting.rate == "none" else setting.rate) as pair_of_hosts:
        return pair.measure(ranks, setting.size, "time", steps, cache, patience, pair_of_hosts)


def predictions(setting: Setting, chosen: Sequence[Contender], patience: float) -> dict[str, float]:
    """Seconds of a step of each of ours, as planned for the machine that is measured between the hosts."""
    ours, ranks = [one for one in chosen if one.ours], hosts.HOSTS * setting.ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.yaml"
        with two_hosts(None if setting.rate == "none" else setting.rate) as pair_of_hosts:
            problem = pair.run(
                [sys.executable, "-m", "zerograph", "calibrate", str(file)], ranks, patience, pair_of_hosts
            )
        if problem:
            typer.echo(f"{setting.name}: not calibrated: {problem}")
            return {}
        planned = {one.name: _planned(setting.size, one, ranks, file) for one in ours}
    typer.echo(f"{setting.name}: predicted {', '.join(f'{name}: {planned[name] * 1e3:.0f} ms' for name in planned)}")
    return planned


def _planned(size: str, contender: Contender, ranks: int, machine: Path) -> float:
    # Not before it is needed: the page can be written anew without torch.
    import zerograph as zg
    from benchmarks.contenders.tasks import TASKS
    from benchmarks.contenders.zerograph import columns, step_of

    task = TASKS[size]
    mesh: dict[str, Any] = {"mesh": columns(ranks)} if contender.grid else {"world_size": ranks}
    return zg.plan(step_of(task, **contender.options), task.batches(0)[0], device=machine, **mesh).time.seconds


def _short(measured: dict[str, Any]) -> str:
    if "ranks" not in measured:
        return ", ".join(f"{key}: {value}" for key, value in measured.items())
    first = measured["ranks"][0]
    return f"{min(first['seconds']) * 1000:.1f} ms at least, a host sends {first['wire'] / 1e6:.1f} MB a step"


def write(run: dict[str, Any], out: Path) -> bool:
    """Write measurements, page and picture; return whether nothing failed and all losses agree."""
    # Not over the file: an interrupted run goes on with it.
    file, new = out.with_suffix(".json"), out.with_suffix(".json.new")
    new.write_text(json.dumps(run))
    new.replace(file)
    weights = {tuple(one["setting"]): one["ranks"][0]["weight"] for one in run["measurements"] if "ranks" in one}
    places = dict.fromkeys(tuple(one["setting"]) for one in run["measurements"])
    settings = [Setting(*place, weights.get(place, 0)) for place in places]
    tables = {setting: rows(run["measurements"], setting.name) for setting in settings}
    pictures = plots.draw({setting.name: table for setting, table in tables.items()}, out) if run["quiet"] else []
    page = hosts.page(
        run["about"],
        SIZES,
        tables,
        pictures,
        run.get("predicted"),
        quiet=run["quiet"],
        missing=run.get("missing", ()),
    )
    out.with_suffix(".md").write_text(page)
    return succeeded(tables.values())


if __name__ == "__main__":
    # So that the processes of a contender end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    typer.run(main)
