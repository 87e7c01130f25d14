"""One contender as rank 0 of a job of simulated ranks: builds it, runs it, and writes what was measured as JSON.

The process group is torch's fake one, whose collectives copy this rank's own data: they take the memory of real ones,
but no wire; for a trace it is that of ``streams``, whose collectives run beside the rest. Started by the front door,
each contender in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerograph as zg
from benchmarks.simulated import devices, streams
from benchmarks.simulated.contenders import CONTENDERS
from benchmarks.simulated.sizes import SIZES, model_flops, peak_flops
from benchmarks.simulated.training import build

WARM_UP = 3


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """The measurements: bytes, seconds, floating point operations (per second)."""
    device, size = asked.device, SIZES[asked.size].with_batch(asked.batch)
    # Where a trace is asked for, time and memory are those of what it shows.
    backend = "fake" if asked.trace is None else streams.NAME
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=asked.ranks)
    task = size.task()
    with torch.device(device):
        model = task.model()
    batches = [tuple(part.to(device) for part in batch) for batch in task.batches(0)]
    flops, parameters = model_flops(size, model), sum(p.numel() for p in model.parameters())
    endless = itertools.cycle(batches)
    began = time.perf_counter()
    train = build(CONTENDERS[asked.contender], task, model, device)

    def step() -> Any:
        return train(*next(endless))

    losses = [float(step())]
    first_step = time.perf_counter() - began
    losses += [float(step()) for _ in range(WARM_UP - 1)]
    seconds = devices.seconds(device, step, asked.steps)
    rest, peak = devices.memory(device, step, asked.steps)
    if asked.trace is not None:
        devices.trace(device, step, asked.trace)
    return {
        "losses": losses,
        "first_step": first_step,
        "seconds": seconds,
        "rest": rest,
        "peak": peak,
        "predicted": train.memory.peak if isinstance(train, zg.ZeroGraph) else None,
        "parameters": parameters,
        "model_flops": flops,
        "device": devices.name(device),
        "device_flops": peak_flops(devices.name(device)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    asked.out.write_text(json.dumps(run(asked)))
    # Not through exit handlers: nothing simulated needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
