"""Compare what `zg.plan` predicts with a job: a table written to benchmarks/results/planner.md.

python benchmarks/planner.py                     # three models, four stages, 2 ranks; a quarter of an hour
python benchmarks/planner.py small --ranks 2 4   # shown but not written

Ranks over gloo on one machine of two cores, one thread each, fp32, fused AdamW, backend eager. The machine is measured
before each model, with as many ranks, as `zerograph calibrate` does: others share it, its speed changes by the minute.
Memory: the most that rank 0's process holds during a step (VmHWM), less what it holds between steps, plus the state
that it has then; in MiB, malloc's thresholds for mmap and trim at 128 KiB, so that the allocator keeps nothing back.
The first row also has what a process allocates only once. Time: the median of a step, in milliseconds, without them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import TASKS  # noqa: E402
from benchmarks.contenders.zerograph import TrainStep, step_of  # noqa: E402
from benchmarks.measure.process import forget_most_resident, most_resident, resident  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph.planner.front.calibrate import calibrate  # noqa: E402
from zerograph.planner.machine import Machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "planner.md"
MODELS = ("small", "mid", "resnet")
STEPS = 9
# Numbers of glibc's mallopt().
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEADER = ["model", "ranks", "stage", *("memory predicted", "seen", "ratio"), *("step predicted", "seen", "ratio")]


def measured_machine() -> Machine:
    return calibrate("this machine")


def started(name: str, stage: int) -> tuple[TrainStep, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A step that has made its first two updates: the second may be another program."""
    task = TASKS[name]
    step = step_of(task, str(stage) if stage else "off", "eager")
    batches = task.batches(dist.get_rank())
    for batch in batches[:2]:
        step(*batch)
    return step, batches


def memory_seen(name: str, stage: int) -> int:
    libc = ctypes.CDLL("libc.so.6")
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        libc.mallopt(threshold, 131072)
    step, batches = started(name, stage)
    # Garbage of the compilation is no part of a step.
    libc.malloc_trim(0)
    between = resident()
    forget_most_resident()
    for batch in batches:
        step(*batch)
    return most_resident() - between + step.state_bytes()


def time_seen(name: str, stage: int) -> float:
    step, batches = started(name, stage)
    seen = []
    for number in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        step(*batches[number % len(batches)])
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def predicted(name: str, stage: int, ranks: int, machine: Machine) -> zg.Plan:
    task = TASKS[name]
    step = step_of(task, str(stage) if stage else "off", "eager")
    return zg.plan(step, task.batches(0)[0], world_size=ranks, device=machine)


def row(name: str, stage: int, ranks: int, machine: Machine, lean: Pool, usual: Pool) -> list[str]:
    plan = predicted(name, stage, ranks, machine)
    memory = lean.run(ranks, memory_seen, name, stage)[0]
    seconds = usual.run(ranks, time_seen, name, stage)[0]
    return [
        *(name, str(ranks), str(stage or "off")),
        *(f"{plan.memory.peak / 2**20:.1f}", f"{memory / 2**20:.1f}", f"{plan.memory.peak / memory:.2f}"),
        *(f"{plan.time.seconds * 1e3:.0f}", f"{seconds * 1e3:.0f}", f"{plan.time.seconds / seconds:.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(TASKS)}; {', '.join(MODELS)} if none")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2])
    asked = parser.parse_args()
    if unknown := set(asked.models) - set(TASKS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    lines = [line(HEADER), line(["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    for ranks in asked.ranks:
        usual = Pool(size=ranks)
        lean = Pool(size=ranks)
        for name in asked.models or MODELS:
            machine = usual.run(ranks, measured_machine)[0]
            for stage in range(4):
                lines.append(line(row(name, stage, ranks, machine, lean, usual)))
                print(lines[-1], flush=True)
        usual.close()
        lean.close()
    if not asked.models and asked.ranks == [2]:
        command = f"`python benchmarks/planner.py`, torch {torch.__version__}"
        RESULTS.write_text(page("Plans, and what came of them", command, __doc__, *lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
