"""Predicted against seen memory: a table of model x stage, written to benchmarks/results/memory.md.

python benchmarks/memory.py                    # all models, a minute
python benchmarks/memory.py small resnet       # these only, shown but not written

Two ranks over gloo, one thread each, fp32, AdamW, backend eager; MiB on rank 0. Predicted: `step.inspect.memory`, from
the emitted graph alone. Live tensors: the bytes of all storages that are alive at an operator of a running step, at
most.
Allocated: what torch's allocator has given out by then, at most, what C++ takes within an operator or a collective
included; the profiler's count of a step, on top of what the step finds there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import TASKS  # noqa: E402
from benchmarks.peers import SIZES  # noqa: E402
from benchmarks.tables import Table, asked_names, write  # noqa: E402
from benchmarks.task_steps import eager_step  # noqa: E402
from tests.peak_memory import most_alive_bytes, most_allocated_bytes  # noqa: E402
from tests.pool import Pool  # noqa: E402

MODELS = ("small", "mid", "resnet")
HEADER = ["model", "stage", "predicted", "live tensors", "ratio", "allocated", "ratio", "at the peak"]


def measure(name: str, stage: int) -> tuple[int, int, int, str]:
    """Predicted, live and allocated bytes of a step that is not the first, and what the prediction consists of."""
    task = TASKS[name]
    step = eager_step(task, stage)
    first, second, third, *_ = task.batches(zg.rank())
    # The first update may be another program than the later ones.
    step(*first)
    step(*second)
    memory = step.inspect.memory
    live = most_alive_bytes(step, *third)
    allocated = most_allocated_bytes(step, *third) + memory.at_rest + memory.kinds["inputs"]
    return memory.peak, live, allocated, str(memory)


def row(pool: Pool, name: str, stage: int) -> list[str]:
    predicted, live, allocated, what = pool.run(2, measure, name, stage)[0]
    ratios = f"{predicted / live:.3f}", f"{predicted / allocated:.3f}"
    sizes = [f"{count / 2**20:.1f}" for count in (predicted, live, allocated)]
    return [name, str(stage or "off"), sizes[0], sizes[1], ratios[0], sizes[2], ratios[1], what]


def main() -> None:
    asked = asked_names(__doc__, "models", TASKS, ", ".join(MODELS))
    table = Table(HEADER)
    pool = Pool(size=2)
    for name in asked or MODELS:
        for stage in range(4):
            table.add(row(pool, name, stage))
    pool.close()
    if not asked:
        command = f"`python benchmarks/memory.py`, torch {torch.__version__}"
        models = [f"- {name}: {SIZES[name]}" for name in MODELS]
        write("Memory, predicted and seen", command, __doc__, *models, "", *table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
