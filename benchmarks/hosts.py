"""Step time and bytes of zerograph and its peers between two hosts, which are namespaces of this machine (root).

python benchmarks/hosts.py                  # GPT mid and small at 1 and 10 Gbit/s: some ten minutes on two quiet cores
python benchmarks/hosts.py --quick          # GPT tiny, three steps, ours and DDP: a minute, to see that everything runs
python benchmarks/hosts.py --settings 1x1gbit --contenders 'alone-2' --contenders 'zerograph-*'
python benchmarks/hosts.py --again benchmarks/results/hosts.json      # the page anew from a run's measurements

Each contender trains the same model from the same seed on the same batches, over gloo, one compute thread per rank,
fp32, fused AdamW. Each host has a network, processes and a name of its own; a veth pair that ``tc tbf`` shapes joins
them. The cores are shared, so four ranks compute at half the speed of two. Times are judged if the load was under 1
before the run. Ends with status 1 if a contender fails or a loss disagrees.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.choose import choose  # noqa: E402
from benchmarks.contenders import TABLE, Contender  # noqa: E402
from benchmarks.measure import pair  # noqa: E402
from benchmarks.measure.hosts import two_hosts, unavailable  # noqa: E402
from benchmarks.peers import SIZES, about  # noqa: E402
from benchmarks.report import hosts, plots  # noqa: E402
from benchmarks.report.hosts import RATES, Setting  # noqa: E402
from benchmarks.report.rows import rows, succeeded  # noqa: E402
from zerograph.base import source  # noqa: E402

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
    patience: Annotated[float, typer.Option(help="seconds until one measurement is ended")] = 300.0,
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
        chosen = [one for one in choose(contenders, TABLE) if not one.compiled]
        wanted = [_setting(size, text) for size in sizes for text in settings or SETTINGS.get(size, ["1x1gbit"])]
        out.parent.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()[0]
        ranks = "one compute thread each, gloo; the hosts share the cores"
        facts = about(rounds, steps) | {"ranks": ranks, "load": f"{load:.1f} before the run"}
        # Not the page's own, which may be written anew later.
        facts["commit"] = source.commit(ROOT) or "unknown"
        run = {"about": facts, "quiet": load < QUIET, "predicted": {}, "measurements": []}
        bytes_only = chosen if contenders != EAGER else choose(FOR_BYTES, chosen)
        for one in measurements(wanted, chosen, bytes_only, rounds, steps, patience):
            run["measurements"].append(one)
            out.with_suffix(".json").write_text(json.dumps(run))
        for setting in wanted if predict and not quick else ():
            if setting.ranks_per_host == 1:
                run["predicted"][setting.name] = predictions(setting, chosen, patience)
                out.with_suffix(".json").write_text(json.dumps(run))
    if not write(run, out):
        raise typer.Exit(1)


def _setting(size: str, text: str) -> Setting:
    ranks, _, rate = text.partition("x")
    if not ranks.isdigit() or int(ranks) < 1 or rate not in RATES:
        raise typer.BadParameter(f"no setting {text!r}: ranks on a host, x, and one of {', '.join(RATES)}: 2x1gbit")
    return Setting(size, int(ranks), rate)


def predictions(setting: Setting, chosen: Sequence[Contender], patience: float) -> dict[str, float]:
    """Seconds of a step at each stage of ours, as planned for the machine that is measured between the hosts."""
    stages = [one.stage for one in chosen if one.name.startswith("zerograph")]
    ranks = hosts.HOSTS * setting.ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.yaml"
        with two_hosts(None if setting.rate == "none" else setting.rate) as pair_of_hosts:
            problem = pair.run(
                [sys.executable, "-m", "zerograph", "calibrate", str(file)], ranks, patience, pair_of_hosts
            )
        if problem:
            typer.echo(f"{setting.name}: not calibrated: {problem}")
            return {}
        planned = _planned(setting.size, stages, ranks, file)
    typer.echo(f"{setting.name}: predicted {', '.join(f'{stage}: {planned[stage] * 1e3:.0f} ms' for stage in planned)}")
    return planned


def _planned(size: str, stages: Sequence[str], ranks: int, machine: Path) -> dict[str, float]:
    # Not before it is needed: the page can be written anew without torch.
    import zerograph as zg
    from benchmarks.contenders.tasks import TASKS
    from benchmarks.contenders.zerograph import step_of

    task, seconds = TASKS[size], {}
    for stage in stages:
        step = step_of(task, stage, "eager")
        seconds[stage] = zg.plan(step, task.batches(0)[0], world_size=ranks, device=machine).time.seconds
    return seconds


def measurements(
    wanted: Sequence[Setting],
    chosen: Sequence[Contender],
    bytes_only: Sequence[Contender],
    rounds: int,
    steps: int,
    patience: float,
) -> Iterator[dict[str, Any]]:
    """One after the other, each on hosts of its own; a contender that fails is not started again in that setting.

    Args:
        bytes_only: the contenders where several ranks of a host share the cores.
    """
    with tempfile.TemporaryDirectory() as caches:
        lost: set[tuple[Setting, str]] = set()
        for setting, number, one in itertools.product(wanted, range(1, rounds + 1), chosen):
            if (setting, one.name) in lost or (setting.ranks_per_host > 1 and one not in bytes_only):
                continue
            ranks = replace(one, ranks=hosts.HOSTS * setting.ranks_per_host)
            with two_hosts(None if setting.rate == "none" else setting.rate) as pair_of_hosts:
                cache = Path(caches) / one.name
                measured = pair.measure(ranks, setting.size, "time", steps, cache, patience, pair_of_hosts)
            if "ranks" not in measured:
                lost.add((setting, one.name))
            typer.echo(f"{setting.name}, {number}: {one.title}: {_short(measured)}")
            place = [setting.size, setting.ranks_per_host, setting.rate]
            task = {"task": setting.name, "setting": place, "contender": one.name, "kind": "time", "round": number}
            yield {**task, **measured}


def _short(measured: dict[str, Any]) -> str:
    if "ranks" not in measured:
        return ", ".join(f"{key}: {value}" for key, value in measured.items())
    first = measured["ranks"][0]
    return f"{min(first['seconds']) * 1000:.1f} ms at least, a host sends {first['wire'] / 1e6:.1f} MB a step"


def write(run: dict[str, Any], out: Path) -> bool:
    """The page and the picture; whether nothing failed and all losses agree."""
    weights = {tuple(one["setting"]): one["ranks"][0]["weight"] for one in run["measurements"] if "ranks" in one}
    places = dict.fromkeys(tuple(one["setting"]) for one in run["measurements"])
    settings = [Setting(*place, weights.get(place, 0)) for place in places]
    tables = {setting: rows(run["measurements"], setting.name) for setting in settings}
    pictures = plots.draw({setting.name: table for setting, table in tables.items()}, out) if run["quiet"] else []
    page = hosts.page(run["about"], SIZES, tables, pictures, run.get("predicted"), quiet=run["quiet"])
    out.with_suffix(".md").write_text(page)
    typer.echo(page)
    return succeeded(tables.values())


if __name__ == "__main__":
    # So that the processes of a contender end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    typer.run(main)
