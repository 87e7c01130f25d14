"""Elastic jobs of GPT mid: the time that a job needs to go on after the loss of a rank, and what snapshots cost.

python benchmarks/elastic.py recovery --ranks 4    # 4 ranks, then 3: seconds after the death of a rank, by phase
python benchmarks/elastic.py snapshots --ranks 2   # some minutes: the part of the time that steps wait for snapshots

ZeRO stage 2, one thread for each rank, the backend "eager", two sequences for each virtual rank. Nothing is written.
Seconds of the processor are those of the first rank's main thread: they tell more where ranks share cores.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import TASKS  # noqa: E402
from benchmarks.task_steps import eager_step  # noqa: E402
from zerograph.compiler.compiler import Compiler  # noqa: E402
from zerograph.loops.elastic import _Loop  # noqa: E402
from zerograph.runtime.job import elastic as generations  # noqa: E402

# The step in which the last rank dies, and the ones between two snapshots before it.
KILLED_IN, EVERY = 6, 4


def main(what: str, ranks: int = 4, steps: int = 150) -> None:
    """Start the job; in its processes, train."""
    if generations.ELASTIC not in os.environ:
        command = ["launch", "--elastic", f"{max(ranks - 1, 1)}:{ranks}", __file__, "--", what]
        arguments = ["--ranks", str(ranks), "--steps", str(steps)]
        sys.exit(subprocess.run([sys.executable, "-m", "zerograph", *command, *arguments], cwd=ROOT).returncode)
    torch.set_num_threads(1)
    task = TASKS["mid"]
    step = eager_step(task, stage=2, virtual_ranks=ranks)
    steps = steps if what == "snapshots" else KILLED_IN + 2
    parts = [task.draw(torch.Generator().manual_seed(seed)) for seed in range(ranks * steps)]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=ranks * parts[0][0].shape[0])
    if what == "snapshots":
        snapshots(step, loader)
    else:
        recovery(step, loader, ranks)


def after(owner: Any, name: str, act: Callable[[float, float], object]) -> None:
    """Call a function after each call of a method, with the moment and the processor's time when the call began."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic(), time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            act(*began)

    setattr(owner, name, patched)


def recovery(step: Any, loader: DataLoader[Any], ranks: int) -> None:
    """Kill the last rank, and print when the first one has come how far."""
    worker = generations.worker()
    assert worker is not None
    moments: dict[str, tuple[float, float]] = {}

    def mark(phase: str) -> None:
        moments[phase] = time.monotonic(), time.thread_time()

    def notice(*began: float) -> None:
        moments.clear()
        moments["noticed"] = began[0], began[1]

    after(_Loop, "_leave", notice)
    after(generations.Worker, "next_generation", lambda *_: mark("regrouped"))
    after(_Loop, "_begin", lambda *_: mark("resharded"))
    after(_Loop, "_snapshot", lambda *_: moments.setdefault("snapshot copied", (time.monotonic(), time.thread_time())))
    after(Compiler, "compile", lambda *_: mark("compiled"))

    def train_step(number: int, batch: list[Tensor]) -> None:
        if number == KILLED_IN and zg.rank() == ranks - 1:
            worker.store.set("killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        step(*batch).item()
        if worker.generation.number > 1 and "first step done" not in moments:
            mark("first step done")

    zg.elastic(train_step, step, loader, snapshot_every=EVERY)
    if zg.rank() == 0:
        killed, busy = float(worker.store.get("killed")), moments["noticed"][1]
        print(f"\n{ranks} ranks, then {zg.world_size()}  | s after the kill | s of the processor")
        for phase, (moment, used) in moments.items():
            print(f"{phase:20}| {moment - killed:16.2f} | {used - busy:16.2f}")


def snapshots(step: Any, loader: DataLoader[Any]) -> None:
    """Print the part of the time that the first rank's steps wait, with the default interval of snapshots."""
    waits: list[float] = []
    times: list[float] = []
    after(_Loop, "_snapshot", lambda began, _: waits.append(time.monotonic() - began))

    def train_step(_: int, batch: list[Tensor]) -> None:
        start = time.monotonic()
        step(*batch).item()
        times.append(time.monotonic() - start)

    zg.elastic(train_step, step, loader)
    if zg.rank() == 0:
        # Without the first step, which compiles, and the first snapshot, before it.
        median, wait, trained = statistics.median(times), sum(waits[1:]), sum(times[1:])
        print(f"\n{len(times)} steps, {len(waits) - 1} snapshots: a step takes {median:.2f} s")
        print(f"steps waited {wait:.2f} s, {wait / (wait + trained):.1%} of the time")
        slower = trained - median * len(times[1:])
        print(f"sending: steps took {slower:.2f} s more than the median, {slower / (wait + trained):.1%} of the time")


if __name__ == "__main__":
    typer.run(main)
