"""Optimizer state in files: resident memory and throughput, written to benchmarks/results/offload.md.

python benchmarks/offload.py [folder]          # a minute; the folder lies on the disk to measure, default /var/tmp

One rank, ZeRO stage 1, AdamW(fused=True), backend eager. Resident memory is RssAnon of a process of its own, which leaves
the page cache and mapped libraries out: right behind a step, and the most that was seen every two milliseconds. The
throughput is that of the state's bytes, read and written once in each step, over the whole time that a step takes longer
than it would in memory, and over the stretch of it in which files are read and written. `dd` reads and writes a file of
the same size with direct I/O (bs=4M), one after the other, in between.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.tables import line, page  # noqa: E402
from zerograph.runtime.offload import transfers  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "offload.md"
WIDTH, LAYERS, ROUNDS = 2048, 16, 5


class Step(zg.ZeroGraph):
    """Layers with many parameters and little to compute: the disk is all that a step waits for."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))
        self.config.enable_zero(True, stage=1)
        self.config.bucket_size = 4 * WIDTH**2
        self.config.offload_optimizer(None if folder is None else "nvme", nvme_path=folder)

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
    """What some steps hold and take, in this process."""
    torch.manual_seed(0)
    step, x = Step(folder), torch.randn(4, WIDTH)
    step(x)
    step(x)
    stretches = noted_stretches()
    seconds = []
    with Watched() as watched:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            step(x)
            seconds.append(time.perf_counter() - began)
    state = 2 * sum(4 * parameter.numel() for parameter in step.model.parameters())
    return {
        "state": state,
        "rests": resident(),
        "most": watched.most,
        "seconds": statistics.median(seconds),
        "stretch": statistics.median(stretches) if stretches else 0.0,
        "direct": all(one.file.direct for store in step._stores() for one in transfers_of(store)),
    }


def transfers_of(store: Any) -> list[Any]:
    return [one for one in store.state.values() if not isinstance(one, Tensor)]


def noted_stretches() -> list[float]:
    """Filled with the seconds of each step from its first request to the end of its last one."""
    move, lock = transfers._move, threading.Lock()
    spans: list[float] = []
    now = {"begin": 0.0, "running": 0, "end": 0.0}

    def noted(*args: Any) -> None:
        with lock:
            if not now["running"] and time.perf_counter() - now["end"] > 0.01:
                if now["begin"]:
                    spans.append(now["end"] - now["begin"])
                now["begin"] = time.perf_counter()
            now["running"] += 1
        try:
            move(*args)
        finally:
            with lock:
                now["running"] -= 1
                now["end"] = time.perf_counter()

    transfers._move = noted
    return spans


def in_own_process(folder: Path | None) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", *([] if folder is None else [str(folder)])]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def dd(folder: Path, size: int) -> tuple[float, float]:
    """Seconds that reading and writing a file of that size take with direct I/O."""
    file = folder / "zerograph-dd"
    seconds = []
    try:
        for options in ([f"of={file}", "if=/dev/zero", "oflag=direct", "conv=notrunc"], [f"if={file}", "of=/dev/null", "iflag=direct"]):
            began = time.perf_counter()
            subprocess.run(["dd", *options, "bs=4M", f"count={size // 2**22}"], check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)
    return seconds[1], seconds[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        print(json.dumps(trained(asked.folder)))
        return
    folder = asked.folder or Path("/var/tmp")
    rows = []
    for _ in range(3):
        memory, files = in_own_process(None), in_own_process(folder)
        reading, writing = dd(folder, int(files["state"]))
        state = files["state"]
        slowest = 2 * state / (reading + writing)
        rows.append(
            [
                f"{state / 2**20:.0f}",
                f"{(memory['rests'] - files['rests']) / state:.3f}",
                f"{(memory['most'] - files['most']) / state:.3f}",
                f"{memory['seconds']:.2f}",
                f"{files['seconds']:.2f}",
                f"{slowest / 2**20:.0f}",
                f"{2 * state / files['stretch'] / 2**20:.0f}",
                f"{2 * state / files['stretch'] / slowest:.2f}",
                f"{2 * state / (files['seconds'] - memory['seconds']) / slowest:.2f}",
                "yes" if files["direct"] else "no",
            ]
        )
        print(rows[-1], flush=True)
    header = ["state MiB", "saved at rest", "saved at most", "step s", "with files s", "dd MiB/s", "files MiB/s", "of dd", "of dd, by step times", "direct"]
    table = [line(header), line(["---"] * len(header)), *map(line, rows)]
    print("\n".join(table))
    RESULTS.write_text(page("Optimizer state in files", __doc__ or "", table))


if __name__ == "__main__":
    main()
