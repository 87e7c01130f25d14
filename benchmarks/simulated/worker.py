"""One contender as rank 0 of simulated ranks: builds it, waits for its turns, and adds a row of JSON to a file.

The process group is torch's fake one, whose collectives copy this rank's own data: they take the memory of real ones,
but no wire; for a trace it is that of ``streams``, whose collectives run beside the rest. Started by ``schedule``, each
contender in a process of its own. Its turns are files of a folder, see :class:`Turns`.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # takes seconds, which are not those of the first step
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerograph as zg
from benchmarks.simulated import devices, kernels, streams
from benchmarks.simulated.contenders import CONTENDERS
from benchmarks.simulated.sizes import SIZES, model_flops, peak_flops
from benchmarks.simulated.training import build

WARM_UP = 3
PROFILED = 2


class Turns:
    """Files by which a worker and the schedule tell each other how far they are.

    ``loaded``: all is imported. ``admitted``: there is room on the device, compile. ``ready``: the first steps are
    done. ``go``: the device is the worker's alone, measure. ``done``: its row is written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name.replace("/", "-")

    def has(self, turn: str) -> bool:
        return (self.folder / f"{turn}-{self.name}").exists()

    def say(self, turn: str) -> None:
        (self.folder / f"{turn}-{self.name}").touch()

    def wait(self, turn: str) -> None:
        """Wait for a turn; end with the parent."""
        parent = os.getppid()
        while not self.has(turn):
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(0.05)


def run(asked: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """Return the measurements: bytes, milliseconds, floating-point operations."""
    device, size = asked.device, SIZES[asked.size]
    # Where a trace is asked for, time and memory are those of what it shows.
    backend = "fake" if asked.trace is None else streams.NAME
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=asked.ranks)
    task = size.task()
    began = time.perf_counter()
    with torch.device(device):
        model = task.model()
    batches = [tuple(part.to(device) for part in batch) for batch in task.batches(0)]
    flops, parameters = model_flops(size, model), sum(p.numel() for p in model.parameters())
    endless = itertools.cycle(batches)
    train = build(CONTENDERS[asked.contender], task, model, device)

    def step() -> Any:
        return train(*next(endless))

    losses = [float(step())]
    first_step = time.perf_counter() - began
    losses += [float(step()) for _ in range(WARM_UP)]
    if device == "cuda":
        torch.cuda.empty_cache()
    turns.say("ready")
    turns.wait("go")
    for _ in range(2):
        step()
    seconds = devices.seconds(device, step, asked.steps)
    rest, peak = devices.memory(device, step, WARM_UP)
    row: dict[str, Any] = {
        "ms": statistics.median(seconds) * 1000,
        "fastest_ms": min(seconds) * 1000,
        "slowest_ms": max(seconds) * 1000,
        "host_ms": devices.host_seconds(device, step, WARM_UP) * 1000,
        "rest": rest,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "predicted": train.inspect.memory.peak if isinstance(train, zg.ZeroGraph) else None,
        "first_s": first_step,
        "losses": losses,
        "parameters": parameters,
        "model_flops": flops,
    }
    promised = peak_flops(devices.name(device))
    row["mfu"] = flops / statistics.median(seconds) / promised if promised else None
    return row | profiled(device, step, asked.trace)


def profiled(device: str, step: devices.NextStep, kept: Path | None) -> dict[str, Any]:
    """Return the kernels of a step; keep the trace, compressed, if asked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        try:
            devices.trace(device, step, PROFILED, file, whole=kept is not None)
            text = file.read_text(errors="replace")
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(gzip.compress(text.encode()))
            return kernels.summary(json.loads(text), PROFILED)
        except Exception as error:
            # The times above are worth more than what the profiler fails at.
            return {"profiler": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the schedule: size/contender/ranks, or ceilings")
    parser.add_argument("--folder", type=Path, required=True, help="of the turns")
    parser.add_argument("--out", type=Path, required=True, help="the row is added to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    turns = Turns(asked.folder, asked.name)
    turns.say("loaded")
    turns.wait("admitted")
    if asked.name == "ceilings":
        row: dict[str, Any] = {"kind": "ceilings"}
        turns.say("ready")
        turns.wait("go")
        row |= devices.ceilings()
    else:
        asked.size, asked.contender, ranks = asked.name.split("/")
        asked.ranks = int(ranks)
        row = {"kind": "step", "size": asked.size, "contender": asked.contender, "ranks": asked.ranks}
        try:
            row |= run(asked, turns)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {error}"[:1200]
    with asked.out.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    turns.say("done")
    # Not through exit handlers: nothing simulated needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
