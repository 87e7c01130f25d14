"""Measure what recompute saves and costs: a table, written to benchmarks/results/recompute.md.

python benchmarks/recompute.py                 # a GPT of 12 layers, minutes
python benchmarks/recompute.py --quick         # one of 3 layers and few rounds, shown but not written

One process, one thread, fp32, AdamW, backend eager. Saved: bytes of the peak below that of `"none"`, as
`step.inspect.memory` predicts them and as the live tensors of running steps show. Time: medians of rounds in which the
ways take turns. Added time is a share of the time of a step that keeps all, and so are the others. Recomputed: what the
nodes that backward runs again take by themselves, timed one by one. Allowed: that, and 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

from benchmarks.contenders.tasks import Task, gpt  # noqa: E402
from benchmarks.contenders.zerograph import TrainStep  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from benchmarks.task_steps import eager_step  # noqa: E402
from tests.peak_memory import most_alive_bytes  # noqa: E402

HEADER = [
    "recompute",
    "peak",
    "saved, predicted",
    "saved, seen",
    "ratio",
    "step",
    "added time",
    "recomputed",
    "allowed",
]


class Timed(fx.Interpreter):
    """Runs a graph node by node, and adds up the seconds of those that are recomputed."""

    again = 0.0

    def run_node(self, n: fx.Node) -> Any:
        began = time.perf_counter()
        result = super().run_node(n)
        self.again += (time.perf_counter() - began) * bool(n.meta.get("recomputed"))
        return result


def ready(task: Task, recompute: str, budget: int | None = None) -> TrainStep:
    """A step that has made its first update, which may be another program than the later ones."""
    step = eager_step(task, activation_checkpointing=recompute, memory_budget=budget)
    for batch in task.batches(0)[:2]:
        step(*batch)
    return step


def seconds_again(step: TrainStep, batch: tuple[Tensor, Tensor]) -> float:
    """Time the nodes that backward runs again, in one step run node by node."""
    executor = step._compiled().executor
    timed = Timed(executor.graph)
    usual = executor.low_overhead
    # It runs instead of the function.
    object.__setattr__(executor, "low_overhead", lambda **_: timed.run)
    try:
        step(*batch)
    finally:
        object.__setattr__(executor, "low_overhead", usual)
    return timed.again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    layers, width, rounds = (3, 64, 3) if quick else (12, 256, 15)
    task = gpt(layers=layers, width=width, heads=4, vocabulary=1024, context=128, batch=8)
    steps = {way: ready(task, way) for way in ("none", "blocks")}
    most, least = (one.inspect.memory.peak for one in steps.values())
    for name, share in (("auto, three quarters", 0.75), ("auto, half", 0.5)):
        steps[name] = ready(task, "auto", round(least + share * (most - least)))
    batch = task.batches(0)[2]
    live = {way: most_alive_bytes(step, *batch) for way, step in steps.items()}
    runs = [lambda step=step: step(*batch) for step in steps.values()]
    found = dict(zip(steps, medians(runs, rounds), strict=True))
    again = {way: statistics.median(seconds_again(step, batch) for _ in range(5)) for way, step in steps.items()}
    table = Table(HEADER)
    for way, step in steps.items():
        predicted, seen = most - step.inspect.memory.peak, live["none"] - live[way]
        longer, share = found[way] / found["none"] - 1, (again[way] - again["none"]) / found["none"]
        cells = [way, f"{step.inspect.memory.peak / 2**20:.1f} MiB", f"{predicted / 2**20:.1f}", f"{seen / 2**20:.1f}"]
        cells += [f"{predicted / seen:.3f}" if seen else "", f"{found[way] * 1e3:.0f} ms"]
        cells += [f"{longer:.1%}", f"{share:.1%}", f"{share + 0.05:.1%}"] if seen else ["", "", ""]
        table.add(cells)
    if not quick:
        title = f"Recompute: a GPT of {layers} layers, width {width}, 8 sequences of 128"
        write(title, "`python benchmarks/recompute.py`", __doc__, *table)


if __name__ == "__main__":
    main()
