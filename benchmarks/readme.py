"""Measure what README.md and docs/benchmarks.md show beside other systems, and write their tables.

make readme                                       # sets up .venv with the peers, measures, and writes; over an hour
python benchmarks/readme.py                       # the same: GPT mid by peers.py, and two hosts by hosts.py (root)
python benchmarks/readme.py --rounds 1 --contenders 'alone-2*' --contenders 'fsdp2*' --contenders 'deepspeed-*' \\
    --contenders zero-redundancy --contenders 'zerograph-[123]*'       # other options are those of peers.py
python benchmarks/readme.py --again               # measure nothing: the tables of the results that there are
python benchmarks/readme.py --again --peers benchmarks/results/peers-mid.json

Times need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.contenders import Contender  # noqa: E402
from benchmarks.generated import recorded  # noqa: E402
from benchmarks.report.goals import verdicts  # noqa: E402
from benchmarks.report.hosts import Setting  # noqa: E402
from benchmarks.report.markdown import number  # noqa: E402
from benchmarks.report.rows import Row, best_peer, floor, lowest, median, ratio, rows  # noqa: E402
from benchmarks.tables import line  # noqa: E402

README, PAGE, RESULTS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results"
PEERS, SMALL, HOSTS = (RESULTS / f"{name}.json" for name in ("peers-mid", "peers-small", "hosts"))
BEGIN, END = "<!-- {}: written by benchmarks/readme.py -->\n", "<!-- end -->\n"
SYSTEMS = ("zerograph", "zero_redundancy", "fsdp2", "deepspeed")
SETTINGS = (Setting("mid", 1, "1gbit"), Setting("mid", 1, "10gbit"))


def peers_table(file: Path) -> str:
    """Return the fastest variant of each system at each stage, and where the numbers are from."""
    run = json.loads(file.read_text())
    table = rows(run["measurements"], "mid")
    base = floor(table)
    head = ("stage", "system", "step, ms", "relative", "peak, MB", "sent, MB")
    lines = [line(head), "|---|---|---:|---:|---:|---:|"]
    for stage in ("1", "2", "3"):
        for row in _fastest(table, stage):
            relative = ratio(row.median, base.median if base else None)
            cells = (number(row.median, 1000, 1), number(relative, 1, 3), number(row.peak, 1e-6, 1))
            lines.append(line((stage, row.contender.title, *cells, number(row.sent, 1e-6, 1))))
    goals = verdicts({"mid": table})
    judged = [goal.met for goal in goals if goal.met is not None]
    met = f"{sum(judged)} of {len(judged)} goals of this model met, {len(goals) - len(judged)} not measured"
    facts = f"{run['about']['measured']}; {met}"
    return "\n".join([*lines, "", _source(file, run["about"], facts), ""])


def _fastest(table: Mapping[str, Row], stage: str) -> Iterator[Row]:
    """Yield the fastest variant of each system; ours over sockets is a system of its own."""
    for system in SYSTEMS:
        for sockets in (False, True):

            def which(one: Contender, system: str = system, sockets: bool = sockets) -> bool:
                return one.stage == stage and one.system == system and one.sockets is sockets

            row = lowest(table, median, which)
            if row is not None:
                yield row


def hosts_table(file: Path) -> str:
    """Return our step times between two hosts beside those of the best peer, by stage."""
    run = json.loads(file.read_text())
    tables = [rows(run["measurements"], setting.name) for setting in SETTINGS]
    head = [f"{rate}: {who}" for rate in ("1 Gbit/s", "10 Gbit/s") for who in ("zerograph, ms", "best other, ms")]
    lines = [line(("stage", *head)), "|---|---:|---:|---:|---:|"]
    for stage in ("off", "1", "2", "3"):
        cells = [stage]
        for table in tables:
            ours, peer = table.get(f"zerograph-{stage}"), best_peer(table, stage, median)
            cells.append("" if ours is None else number(ours.median, 1000, 0))
            cells.append("" if peer is None else f"{number(peer.median, 1000, 0)} ({peer.contender.title})")
        lines.append(line(cells))
    facts = run["about"]["measured"] + ("" if run["quiet"] else "; the machine did other work meanwhile")
    return "\n".join([*lines, "", _source(file, run["about"], facts), ""])


def models_table(files: Mapping[str, Path]) -> str:
    """Return our step times and peaks beside those of the best peers, by model and stage.

    Args:
        files: results of ``peers.py``, by size.
    """
    head = ("model", "stage", "zerograph", "best other system", "peak, MB", "lowest other peak, MB")
    lines, sources = [line(head), "|---|---|---:|---:|---:|---:|"], []
    for size, file in files.items():
        run = json.loads(file.read_text())
        table = rows(run["measurements"], size)
        base = floor(table)
        for stage in ("off", "1", "2", "3"):
            ours = next((row for row in _fastest(table, stage) if row.contender.system == "zerograph"), None)
            peer, smallest = best_peer(table, stage, median), best_peer(table, stage, lambda row: row.peak)
            if ours is None or peer is None:
                continue
            times = [number(ratio(row.median, base.median if base else None), 1, 2) for row in (ours, peer)]
            peaks = [number(None if row is None else row.peak, 1e-6, 0) for row in (ours, smallest)]
            lines.append(line((f"GPT {size}", stage, times[0], f"{times[1]} ({peer.contender.title})", *peaks)))
        sources.append(_source(file, run["about"], run["about"]["measured"], "../"))
    return "\n".join([*lines, "", *sources, ""])


def _source(file: Path, about: Mapping[str, Any], facts: str, top: str = "") -> str:
    page = file.with_suffix(".md")
    stamped = recorded(page)
    commit = about.get("commit") or (stamped[0] if stamped else "unknown")
    name = f"{top}{page.relative_to(ROOT)}" if page.is_relative_to(ROOT) else page
    return f"Source: [{page.stem}]({name}), commit {commit}, {about['date'][:10]}; {facts}."


def written(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables between its marks."""
    for name, table in tables.items():
        before, rest = text.split(BEGIN.format(name))
        text = before + BEGIN.format(name) + table + END + rest.split(END, 1)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure nothing")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FILE", help="results of peers.py")
    asked, others = parser.parse_known_args()
    if others and asked.again:
        parser.error(f"nothing is measured with {' '.join(others)}")
    if not asked.again:
        scripts = (["peers.py", "--sizes", "mid", "--out", asked.peers.with_suffix(""), *others], ["hosts.py"])
        for script, *options in scripts:
            # A contender that fails is named on the page.
            subprocess.run([sys.executable, ROOT / "benchmarks" / script, *options], check=False)
    peers = asked.peers.resolve()
    README.write_text(written(README.read_text(), {"peers": peers_table(peers), "hosts": hosts_table(HOSTS)}))
    PAGE.write_text(written(PAGE.read_text(), {"peers": models_table({"mid": peers, "small": SMALL})}))


if __name__ == "__main__":
    main()
