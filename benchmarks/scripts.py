"""Training scripts as they are: the losses of public examples, and the time of a step through each front door.

python -m benchmarks.scripts                  # all parts, saved to results/scripts.md
python -m benchmarks.scripts --only losses    # one part of the page, which keeps the others
python -m benchmarks.scripts --only run_glue  # one script, printed and not saved
python -m benchmarks.scripts --quick          # a few steps at stage 3, printed and not saved

On two ranks of one machine, gloo, one thread per rank, eager backend. A framework that is not installed is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.front_doors import light, loops, losses, steps  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from zerograph.base import source  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scripts.md"
RANKS = 2
TITLES = {
    "losses": "Losses",
    "steps": "Steps through front doors",
    "loops": "Plain loops",
    "light": "Light steps and operators",
}
LOSSES = f"""\
Public example scripts in short, on generated data: 50 steps of 8 samples of one process, and of 4 samples on each of
2 ranks. The largest absolute difference of any loss, and of what the script evaluates at its end. Sentences, sounds
and labels are padded, and the last batch of an epoch has 5 samples. Dropout is off: N processes do not draw the
numbers of one. All in fp32, except for the ImageNet loop in fp64. The goal is {losses.GOAL:.0e}."""
STEPS = """\
A GPT of 6 layers and width 128, 8 rows of 96 tokens per rank, AdamW. After each step through a front door a step of a
`ZeroGraph` with the same model runs; medians, and the median of the ratios. Loading batches and what else a framework
does between steps counts for the front door. "Without zerograph" is by how much a step of the framework alone is
longer than that of a plain PyTorch loop, both in one process; "ours" is what the front door adds to a native step
beyond that. FSDP2 is `fully_shard` in a plain loop, as Accelerate has no FSDP on CPUs. The goal is 1.03."""
LOOPS = """\
The same GPT, and a perceptron whose step is almost only host work. Each round runs one step of either; medians, and
the median of the ratios. "plain" is forward, backward, step, zero_grad; "clip" adds clip_grad_norm_; "early" reads
the loss before backward; build() cannot do it and is measured as for "plain"."""

LIGHT = f"""\
A perceptron of three layers (32 rows per rank, AdamW), whose step is host work: medians, and the median of the ratios
of steps in turn. Then the host time of one operator on 8 x 16 numbers that two ranks split by rows: medians of the
means of {light.CALLS} calls, for which no rank waits for another. The goal is at most 30 us on global tensors."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table; rows that are too short end with empty cells."""
    padded = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    return [line(cells) for cells in (header, ["---", *["---:"] * (len(header) - 1)], *padded)]


def sections(text: str) -> dict[str, str]:
    """Return the parts of a page by their titles."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def measure(part: str, options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return a paragraph about a part, and its table."""
    if part == "losses":
        count = 10 if options.quick else options.steps
        rows = losses.compare(losses.SCRIPTS, count, options.quick)
        return LOSSES, table(losses.header(options.quick), rows)
    rounds = 5 if options.quick else options.rounds
    if part == "steps":
        rows = steps.compare(RANKS, rounds, (3,) if options.quick else (2, 3))
        return STEPS, table(steps.HEADER, rows)
    if part == "loops":
        return LOOPS, table(loops.HEADER, loops.compare(RANKS, rounds))
    of_steps, of_operators = light.compare(rounds)
    return LIGHT, [*table(light.STEPS_HEADER, of_steps), "", *table(light.OPERATORS_HEADER, of_operators)]


def main() -> None:
    parts = list(TITLES)
    scripts = {script.name: script for script in losses.SCRIPTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*parts, *scripts])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=50, help="of each script")
    parser.add_argument("--rounds", type=int, default=30, help="of each pair of steps")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.only in scripts:
        rows = losses.compare([scripts[options.only]], options.steps, options.quick)
        print("\n".join(table(losses.header(options.quick), rows)))
        return
    kept = sections(RESULTS.read_text()) if RESULTS.is_file() else {}
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    machine = f"commit {source.commit(ROOT)}, {versions}, {date.today()}"
    for part in [options.only] if options.only else parts[: 2 if options.quick else None]:
        about, rows = measure(part, options)
        print("\n".join(["", *rows]), flush=True)
        count = f"--steps {options.steps}" if part == "losses" else f"--rounds {options.rounds}"
        when = f"`python -m benchmarks.scripts --only {part} {count}`, {machine}."
        kept[TITLES[part]] = "\n".join(["", when, "", about, "", *rows, ""])
    if not options.quick:
        shown = [f"## {title}\n{kept[title]}" for title in TITLES.values() if title in kept]
        RESULTS.write_text(page("Training scripts", "`benchmarks/scripts.py`", __doc__, *shown).rstrip() + "\n")


if __name__ == "__main__":
    main()
