"""Step time, memory and start of zerograph beside every peer, in one run.

make bench                                              # sets up .venv with the peers, and runs everything
python benchmarks/peers.py                              # everything: an hour or more on two cores
python benchmarks/peers.py --quick                      # GPT small, two rounds, nothing compiled: some minutes
python benchmarks/peers.py --sizes mid --contenders 'alone-2*' --contenders 'fsdp2*' --contenders 'zerograph-[23]'
python benchmarks/peers.py --again benchmarks/results/peers-mid.json  # the report anew from a run's measurements

Every contender trains the same model from the same seed on the same batches, each in a pair of processes of its own
over gloo, one compute thread per rank, fp32, fused AdamW. A round goes through all contenders, so that what else the
machine does falls on all alike. Memory is measured apart, in one more round. After each measurement the JSON file is
written; the Markdown page and the pictures at the end. Ends with status 1 if a contender fails or a loss disagrees.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.choose import choose  # noqa: E402
from benchmarks.contenders import TABLE, Contender  # noqa: E402
from benchmarks.generated import commit_of  # noqa: E402
from benchmarks.measure import pair  # noqa: E402
from benchmarks.report import markdown, plots  # noqa: E402
from benchmarks.report.rows import rows, succeeded  # noqa: E402

SIZES = {
    "small": "GPT, 4 layers, d 256, 4 heads, vocabulary 8192, 4 x 128 tokens per rank: 7.4 M parameters",
    "mid": "GPT, 8 layers, d 512, 8 heads, vocabulary 16384, 2 x 256 tokens per rank: 42 M parameters",
    "resnet": "ResNet-18 with a 3x3 stem, 16 x 3 x 32 x 32 per rank, batch norm of each rank's part: 11 M parameters",
    "tiny": "GPT, 2 layers, d 32: only to see that everything runs",
}
DEFAULT_SIZES = ["small", "mid", "resnet"]
EVERYBODY = ["*"]
PACKAGES = ("torch", "deepspeed", "fairscale", "zerograph")
RESULTS = ROOT / "benchmarks" / "results" / "peers"


def main(
    sizes: Annotated[list[str], typer.Option(help=f"of {', '.join(SIZES)}; may be repeated")] = DEFAULT_SIZES,
    contenders: Annotated[list[str], typer.Option(help="names or patterns; may be repeated")] = EVERYBODY,
    rounds: Annotated[int, typer.Option(min=1, help="how often each contender is timed")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="steps measured in each round")] = 6,
    memory: Annotated[bool, typer.Option(help="measure memory as well")] = True,
    quick: Annotated[bool, typer.Option(help="GPT small, two rounds, three steps, nothing compiled")] = False,
    patience: Annotated[float, typer.Option(help="seconds until one measurement is given up")] = 900.0,
    out: Annotated[Path, typer.Option(help="where to write: this name with .json, .md and -*.png")] = RESULTS,
    again: Annotated[Path | None, typer.Option(help="measure nothing: write the report of this JSON file anew")] = None,
) -> None:
    """Zerograph beside its peers: time, memory, start."""
    if again is not None:
        run = json.loads(again.read_text())
    else:
        if quick:
            sizes, rounds, steps = ["small"], 2, 3
        chosen = [one for one in choose(contenders, TABLE) if not (quick and one.compiled)]
        if unknown := set(sizes) - set(SIZES):
            raise typer.BadParameter(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not the page's own commit, which may be written anew later.
        facts = about(rounds, steps) | {"commit": commit_of() or "unknown"}
        run = {"about": facts, "sizes": list(sizes), "measurements": []}
        for one in measurements(sizes, chosen, rounds, steps, memory, patience):
            run["measurements"].append(one)
            out.with_suffix(".json").write_text(json.dumps(run))
    if not write(run, out):
        raise typer.Exit(1)


def measurements(
    sizes: Sequence[str], chosen: Sequence[Contender], rounds: int, steps: int, memory: bool, patience: float
) -> Iterator[dict[str, Any]]:
    """One after the other; a contender that fails or is missing is not started again."""
    with tempfile.TemporaryDirectory() as caches:
        for task in sizes:
            lost: set[str] = set()
            kinds = [*(("time", number) for number in range(1, rounds + 1)), *([("memory", 1)] if memory else [])]
            for kind, number in kinds:
                for one in chosen:
                    if one.name in lost:
                        continue
                    # Kept from round to round: the first start is a cold one, the later are warm.
                    cache = Path(caches) / f"{task}-{one.name}"
                    found = pair.measure(one, task, kind, steps, cache, patience)
                    if "ranks" not in found:
                        lost.add(one.name)
                    typer.echo(f"{task}, {kind} {number}: {one.title}: {_short(found)}")
                    yield {"task": task, "contender": one.name, "kind": kind, "round": number, **found}


def _short(found: dict[str, Any]) -> str:
    if "ranks" not in found:
        return ", ".join(f"{key}: {value}" for key, value in found.items())
    first = found["ranks"][0]
    if "seconds" in first:
        return f"{min(first['seconds']) * 1000:.1f} ms at least, first step {first['first_step']:.1f} s"
    return f"grows by {first['process_growth'] / 1e6:.1f} MB"


def about(rounds: int, steps: int) -> dict[str, str]:
    """When and where this run is."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
        "machine": f"{os.cpu_count()} cores, {_processor()}, {platform.system()} {platform.machine()}",
        "ranks": "2, one compute thread each, gloo",
        "measured": f"{rounds} round{'s' * (rounds != 1)} of {steps} steps after 3 that are not counted",
    }


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def write(run: dict[str, Any], out: Path) -> bool:
    """The page and the pictures; whether nothing failed and all losses agree."""
    tables = {task: rows(run["measurements"], task) for task in run["sizes"]}
    pictures = plots.draw(tables, out)
    page = markdown.page(run["about"], SIZES, tables, pictures)
    out.with_suffix(".md").write_text(page)
    typer.echo(page)
    return succeeded(tables.values())


if __name__ == "__main__":
    # So that the processes of a contender end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    typer.run(main)
