"""One contender on one rank: builds it, runs it, and writes what was measured as JSON. Started by ``pair``.

The first step's time goes from after all imports and the process group's start to the loss of the first step: making
the model, wrapping or capturing it, compiling, and running once.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import CONTENDERS
from benchmarks.contenders.tasks import TASKS
from benchmarks.contenders.training import Trainer
from benchmarks.measure import process, tensors

WARM_UP = 2

NextStep = Callable[[], Any]


def measure_time(step: NextStep, steps: int) -> dict[str, Any]:
    """Seconds of each step; all ranks begin each together. And the bytes that the host sends to others in a step."""
    seconds = []
    dist.barrier()
    wire = process.on_the_wire()
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return {"seconds": seconds, "wire": (process.on_the_wire() - wire) // steps}


def measure_memory(step: NextStep, steps: int, trainer: Trainer, batch_bytes: int) -> dict[str, Any]:
    """Bytes: growth of the process over the steps, tensors at rest and in flight, and what a step sends."""
    state = tensors.alive() + trainer.hidden_bytes() - batch_bytes
    dist.barrier()
    process.forget_most_resident()
    before, sent = process.resident(), process.written() + trainer.read_bytes()
    for _ in range(steps):
        step()
    sent = process.written() + trainer.read_bytes() - sent
    return {
        "process_growth": process.most_resident() - before,
        "state": state,
        "sent": sent // steps,
        "tensor_growth": tensors.most_allocated(step),
    }


def run(contender_name: str, task_name: str, kind: str, steps: int) -> dict[str, Any]:
    """Return this rank's measurements; only the reason, if a package of the contender is not installed."""
    contender, task = CONTENDERS[contender_name], TASKS[task_name]
    try:
        build = importlib.import_module(contender.module).build
    except ImportError as error:
        return {"skipped": f"{type(error).__name__}: {error}"}
    dist.init_process_group("gloo")
    batches = task.batches(dist.get_rank())
    endless = itertools.cycle(batches)
    dist.barrier()
    began = time.perf_counter()
    trainer: Trainer = build(task, **contender.options)

    def step() -> Any:
        return trainer.step(*next(endless))

    losses = [float(step())]
    first_step = time.perf_counter() - began
    losses += [float(step()) for _ in range(WARM_UP)]
    if kind == "time":
        measured = measure_time(step, steps)
    else:
        measured = measure_memory(step, steps, trainer, sum(one.nbytes for batch in batches for one in batch))
    dist.barrier()
    with torch.device("meta"):
        weight = sum(parameter.nbytes for parameter in task.create().parameters())
    listed = trainer.listed_bytes()
    return {"losses": losses, "first_step": first_step, "weight": weight, "listed": listed, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("kind", choices=("time", "memory"))
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = run(asked.contender, asked.task, asked.kind, asked.steps)
    asked.out.write_text(json.dumps(found))
    # Not through exit handlers: engines of others wait there for threads that are no part of what is measured.
    os._exit(0)


if __name__ == "__main__":
    main()
