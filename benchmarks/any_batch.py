"""Batches of any size on two ranks: symbolic against static steps, DDP with padding, and training on random sizes.

python benchmarks/any_batch.py               # saved to results/any_batch.md
python benchmarks/any_batch.py --steps 1000  # more random batches

A GPT of 6 layers, stage 2, AdamW, gloo, one thread per rank. "Same size" interleaves a step with static and one with
symbolic sizes on equal batches, and takes medians over rounds. "Compile" is capture and all passes, once each in a
process of its own. "Random sizes" draws 0 to 8 rows for each rank and a length for all; losses are compared with plain
PyTorch in fp32 on the concatenation. DDP gets the same samples padded to 8 rows and the largest length.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
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
from benchmarks.tables import line, page  # noqa: E402
from zerograph.ir.mesh import line as mesh_line  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "any_batch.md"
RANKS, ROWS, SHORTEST, LONGEST, VOCABULARY = 2, 8, 32, 128, 1024


class GptStep(zg.ZeroGraph):
    def __init__(self, dynamic: Any) -> None:
        super().__init__()
        self.model = model()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.set_zero_mode("distributed_split", stage=2)
        self.config.dynamic_shapes = dynamic
        self.config.backend = "eager"

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = token_loss(self.model(x), y)
        loss.backward()
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(6, 128, 4, VOCABULARY, LONGEST)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(steps: int) -> list[tuple[list[int], Tensor]]:
    """Return the rows of each rank and the tokens of all of them, for each step."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    drawn = []
    while len(drawn) < steps:
        rows, length = [draw.randint(0, ROWS) for _ in range(RANKS)], draw.randint(SHORTEST, LONGEST)
        if sum(rows) > 1:
            drawn.append((rows, torch.randint(0, VOCABULARY, (sum(rows), length), generator=generator)))
    return drawn


def seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - began


def same_size(rounds: int) -> tuple[float, float]:
    """Return the median seconds of a static and of a symbolic step."""
    x = torch.randint(0, VOCABULARY, (ROWS, 96))
    static, symbolic = GptStep(False), GptStep(True)
    times: list[list[float]] = [[], []]
    for number in range(rounds + 3):
        for which, step in enumerate((static, symbolic)):
            took = seconds(lambda step=step: step(x, x))
            if number >= 3:
                times[which].append(took)
    return statistics.median(times[0]), statistics.median(times[1])


def random_sizes(steps: int, rank: int) -> dict[str, float]:
    """Train on random sizes: compilations, the last step that compiled, the largest difference, tokens per second."""
    step, plain = GptStep("auto"), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    last, difference, took, tokens = 0, 0.0, 0.0, 0
    for number, (rows, whole) in enumerate(batches(steps)):
        own = whole.split(rows)[rank]
        before, losses = step._compilations, []
        passed = seconds(lambda own=own, losses=losses: losses.append(step(own, own)))
        if step._compilations > before:
            last = number + 1
        else:
            took, tokens = took + passed, tokens + whole.numel()
        if rank == 0:
            optimizer.zero_grad()
            loss = token_loss(plain(whole), whole)
            loss.backward()
            optimizer.step()
            difference = max(difference, float((losses[0] - loss.detach()).abs()))
    return {"compilations": step._compilations, "last": last, "difference": difference, "tokens": tokens / took}


def padded_ddp(steps: int, rank: int) -> float:
    """Return real tokens per second of DDP that pads every batch to the maximum."""
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    took, tokens = 0.0, 0
    for number, (rows, whole) in enumerate(batches(steps)):
        own = whole.split(rows)[rank]
        x = F.pad(own, (0, LONGEST - own.shape[1], 0, ROWS - own.shape[0]))
        y = F.pad(own, (0, LONGEST - own.shape[1], 0, ROWS - own.shape[0]), value=-100)

        def step(x: Tensor = x, y: Tensor = y) -> None:
            optimizer.zero_grad()
            # A rank without samples has no valid target: a sum keeps the loss finite.
            (F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten(), reduction="sum") / ROWS / LONGEST).backward()
            optimizer.step()

        passed = seconds(step)
        if number >= 2:
            took, tokens = took + passed, tokens + whole.numel()
    return tokens / took


def on_rank(rank: int, store: str, steps: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found = same_size(rounds), random_sizes(steps, rank), padded_ddp(min(steps, 60), rank)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def compile_seconds(dynamic: bool) -> float:
    torch.set_num_threads(1)
    x = torch.zeros(ROWS, 96, dtype=torch.int64)
    began = time.perf_counter()
    GptStep(dynamic).prepare(mesh_line(RANKS, 0, "ranks"), x, x)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    compiled = []
    for dynamic in (False, True):
        with context.Pool(1) as pool:
            compiled.append(pool.apply(compile_seconds, (dynamic,)))
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{folder}/store", options.steps, options.rounds, results
        ranks = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        (static, symbolic), trained, ddp = results.get()
        for process in ranks:
            process.join()
    lines = [
        ["", "measured", "goal"],
        ["---", "---:", "---:"],
        ["same size: static step, ms", f"{static * 1e3:.1f}", ""],
        ["same size: symbolic step, ms", f"{symbolic * 1e3:.1f} ({symbolic / static:.3f} x)", "1.05 x"],
        ["compile: static, s", f"{compiled[0]:.2f}", ""],
        ["compile: symbolic, s", f"{compiled[1]:.2f} ({compiled[1] / compiled[0]:.2f} x)", "3 x"],
        [f"random sizes: compilations in {options.steps} steps", f"{trained['compilations']:.0f}", "3"],
        ["random sizes: last step that compiled", f"{trained['last']:.0f}", "20"],
        ["random sizes: largest difference of a loss", f"{trained['difference']:.1e}", "1e-6"],
        [
            "random sizes: real tokens/s",
            f"{trained['tokens']:,.0f} ({trained['tokens'] / ddp:.2f} x)",
            "1.5 x",
        ],
        ["DDP, padded: real tokens/s", f"{ddp:,.0f}", ""],
    ]
    shown = [line(cells) for cells in lines]
    print("\n".join(shown))
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {date.today()}"
    command = f"`python benchmarks/any_batch.py --steps {options.steps}`, {machine}"
    RESULTS.write_text(page("Batches of any size", command, __doc__, *shown))


if __name__ == "__main__":
    main()
