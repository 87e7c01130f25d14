"""Optimizer state in files: what it saves, and how fast it moves, written to benchmarks/results/offload.md.

python benchmarks/offload.py                   # two minutes, on the disk of /var/tmp
python benchmarks/offload.py folder            # on that of another folder, shown but not written

One rank, ZeRO stage 1, AdamW(fused=True), backend eager, 256 MiB of parameters; each row is one run in memory, one with
files and one of `dd`, one after the other. Saved: how much less resident memory the process has than the one that keeps
its state in memory, as a part of the state's bytes, after a step and at most (seen every two milliseconds). Resident
memory is RssAnon, which leaves out the page cache; glibc gives freed blocks back (`MALLOC_MMAP_THRESHOLD_`), so that it
is what is in use. Files: MiB/s of the state, read and written once in each step, from a step's first request to the end
of its last, the updates in between included; `dd` writes and reads a file of that size with direct I/O, bs=4M. The
median of five steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from zerograph.runtime.offload import transfers  # noqa: E402

WIDTH, LAYERS, STEPS = 2048, 16, 5
HEADER = [
    "state, MiB",
    "saved",
    "saved at most",
    "step, s",
    "with files, s",
    "files, MiB/s",
    "dd, MiB/s",
    "of dd",
]


class Step(zg.ZeroGraph):
    """Layers with many parameters and little to compute: the disk is all that a step waits for."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))
        self.config.zero.stage = 1
        self.config.zero.bucket_size = 4 * WIDTH**2
        if folder is not None:
            self.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def resident() -> int:
    """Bytes of anonymous memory that this process has in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("RssAnon"))


class Watched:
    """``most`` is the most resident memory while this is entered."""

    def __enter__(self) -> Watched:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()


def trained(folder: Path | None) -> dict[str, float]:
    """Measure memory and time of some steps in this process."""
    torch.manual_seed(0)
    step, x = Step(folder), torch.randn(4, WIDTH)
    step(x)
    step(x)
    requests, stretches, seconds = Requests(), [], []
    with Watched() as watched:
        for _ in range(STEPS):
            requests.clear()
            began = time.perf_counter()
            step(x)
            seconds.append(time.perf_counter() - began)
            stretches.append(requests.seconds)
    state = 2 * sum(4 * parameter.numel() for parameter in step.model.parameters())
    return {
        "state": state,
        "rests": resident(),
        "most": watched.most,
        "seconds": statistics.median(seconds),
        "stretch": statistics.median(stretches),
    }


class Requests:
    """When the first request began and the last one ended since ``clear``."""

    def __init__(self) -> None:
        self._move = transfers._move
        transfers._move = self._noted
        self.clear()

    def clear(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    @property
    def seconds(self) -> float:
        return max(self._ends) - min(self._begins) if self._ends else 0.0

    def _noted(self, *args: Any) -> None:
        self._begins.append(time.perf_counter())
        self._move(*args)
        self._ends.append(time.perf_counter())


def in_own_process(folder: Path | None) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", *([] if folder is None else [str(folder)])]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def dd(folder: Path, size: int) -> float:
    """Seconds that writing and reading a file of that size take with direct I/O."""
    file = folder / "zerograph-dd"
    write = ["if=/dev/zero", f"of={file}", "oflag=direct"]
    read = [f"if={file}", "of=/dev/null", "iflag=direct"]
    began = time.perf_counter()
    try:
        for options in (write, read):
            subprocess.run(["dd", *options, "bs=4M", f"count={size // 2**22}"], check=True, capture_output=True)
        return time.perf_counter() - began
    finally:
        file.unlink(missing_ok=True)


def row(folder: Path) -> list[str]:
    memory, files = in_own_process(None), in_own_process(folder)
    state = files["state"]
    moved = 2 * state / 2**20
    reference = dd(folder, int(state))
    return [
        f"{state / 2**20:.0f}",
        *(f"{(memory[when] - files[when]) / state:.1%}" for when in ("rests", "most")),
        *(f"{one['seconds']:.2f}" for one in (memory, files)),
        f"{moved / files['stretch']:.0f}",
        f"{moved / reference:.0f}",
        f"{reference / files['stretch']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        print(json.dumps(trained(asked.folder)))
        return
    table = Table(HEADER)
    for _ in range(3):
        table.add(row(asked.folder or Path("/var/tmp")))
    if asked.folder is None:
        command = f"`python benchmarks/offload.py`, torch {torch.__version__}"
        write("Optimizer state in files", command, __doc__, *table)


if __name__ == "__main__":
    main()
