"""A step of a plain loop through ``zg.prepare`` beside the step of a ``ZeroGraph`` that does the same, on two ranks.

python benchmarks/scripts.py              # saved to results/scripts.md
python benchmarks/scripts.py --rounds 50

A GPT of 6 layers and width 128 (8 rows of 96 tokens per rank) and a perceptron whose step is almost only host work.
AdamW, gloo, one thread per rank, eager backend. Each round runs one step of either; medians over rounds, and the median
of the ratios of the rounds. "plain" is forward, backward, step, zero_grad; "clip" adds clip_grad_norm_; "early" reads
the loss before backward, where the step pauses; build() cannot do it and is measured as for "plain".
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import Gpt  # noqa: E402
from benchmarks.measure.job import seconds  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scripts.md"
RANKS, ROWS, LENGTH, VOCABULARY = 2, 8, 96, 1024
CASES = [(model, stage, loop) for model in ("GPT", "perceptron") for stage in (2, 3) for loop in ("plain", "clip")]
CASES += [("GPT", 2, "early"), ("GPT", 3, "early")]


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(6, 128, 4, VOCABULARY, LENGTH) if name == "GPT" else nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))


def batch(name: str) -> tuple[Tensor, Tensor]:
    if name == "GPT":
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        return tokens, tokens
    return torch.randn(ROWS, 16), torch.randint(0, 4, (ROWS,))


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten())


class Native(zg.ZeroGraph):
    def __init__(self, name: str, stage: int, clips: bool) -> None:
        super().__init__()
        self.model, self.clips = model(name), clips
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.config.enable_zero(True, stage=stage)
        self.config.backend = "eager"

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.model, x, y)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


def prepared(name: str, stage: int, loop: str) -> Callable[[Tensor, Tensor], Tensor]:
    config = zg.Config()
    config.backend = "eager"
    module = model(name)
    module, optimizer = zg.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3), stage=stage, config=config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        if loop == "early":
            loss.item()
        loss.backward()
        if loop == "clip":
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def measured(case: tuple[str, int, str], rounds: int) -> tuple[float, float, float]:
    """Return the median seconds of either step, and the median ratio."""
    name, stage, loop = case
    x, y = batch(name)
    native, script = Native(name, stage, loop == "clip"), prepared(name, stage, loop)
    pairs = []
    for number in range(rounds + 5):
        pair = seconds(lambda: native(x, y)), seconds(lambda: script(x, y))
        if number >= 5:
            pairs.append(pair)
    ratios = [second / first for first, second in pairs]
    return *(statistics.median(times) for times in zip(*pairs, strict=True)), statistics.median(ratios)


def on_rank(rank: int, store: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found = [measured(case, rounds if case[0] == "GPT" else rounds * 5) for case in CASES]
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{folder}/store", options.rounds, results
        ranks = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = results.get()
        for process in ranks:
            process.join()
    lines = [["model", "stage", "loop", "build(), ms", "zg.prepare, ms", "ratio"], ["---", *["---:"] * 5]]
    for (name, stage, loop), (first, second, ratio) in zip(CASES, found, strict=True):
        lines.append([name, str(stage), loop, f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{ratio:.3f}"])
    shown = [line(cells) for cells in lines]
    print("\n".join(shown))
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {date.today()}"
    command = f"`python benchmarks/scripts.py --rounds {options.rounds}`, {machine}"
    RESULTS.write_text(page("Training scripts", command, __doc__, *shown))


if __name__ == "__main__":
    main()
