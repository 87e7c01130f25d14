"""Host work of small steps beside plain PyTorch, and of ranks that agree before each; written to results/overhead.md.

python benchmarks/overhead.py        # two minutes

A step: forward, backward and a fused AdamW at stage 1 on small tensors, one thread a rank, in turn with plain PyTorch
in the same processes (which exchange nothing); medians of 400 steps of the time that goes by (wall), and of the CPU
time of the process with all its threads. The agreement: processes that do nothing else compare one number, through
the memory of their host, over sockets, and by an all-gather; of n ranks in log2(n) rounds. More processes than cores
wait for each other's turn, so 1,024 ranks, each with a core, are taken for ten rounds as between two ranks: over
sockets if each is a host of its own, three of them through memory on hosts of eight ranks.

On a machine that does other work at the same time, the wall time of several ranks is mostly waiting for a core.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph import _torch  # noqa: E402
from zerograph.runtime.job.channel import Channel  # noqa: E402
from zerograph.runtime.job.process_group import join  # noqa: E402
from zerograph.runtime.wire import direct  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "overhead.md"
STEPS, WARM_UP = 400, 30
RANKS, MANY, HOST = (2, 4, 8, 16, 32), 1024, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.middle = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attend(self.before(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.middle(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, words: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x)))).flatten(0, 1)


def task(kind: str) -> tuple[Callable[[], nn.Module], Tensor, Tensor]:
    """Return what makes the model, and a batch."""
    if kind == "MLP":
        layers = lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))  # noqa: E731
        return layers, torch.randn(32, 64), torch.randint(0, 10, (32,))
    return Transformer, torch.randint(0, 100, (4, 32)), torch.randint(0, 100, (128,))


class Step(zg.ZeroGraph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        self.config.zero.stage = 1

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def steps(kind: str) -> list[tuple[float, float]]:
    """(wall, CPU) milliseconds of a plain step and of ours on this rank."""
    make, x, y = task(kind)
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(0)
    step = Step(make())

    def plain() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return measured([plain, lambda: step(x, y)], STEPS)


def exchanges(times: int) -> list[tuple[float, float]]:
    """(wall, CPU) milliseconds of an agreement through memory, over sockets, and of an all-gather, on this rank."""
    job = join(600.0)
    direct.hosts(job)
    ranks = dist.get_world_size()
    sockets = Channel(job.channel.group)
    mine, everybodys = torch.zeros(2, dtype=torch.int64), torch.empty(2 * ranks, dtype=torch.int64)
    return measured(
        [
            lambda: job.channel.compare(7, False),
            lambda: sockets.compare(7, False),
            lambda: _torch.all_gather(everybodys, mine, job.channel.group),
        ],
        times,
    )


def measured(runs: list[Callable[[], object]], times: int) -> list[tuple[float, float]]:
    """(median wall, median CPU) milliseconds of each, in turn.

    No means: the CPU time of some exchanges over sockets is twenty times that of most, in all-gathers too.
    """
    wall: list[list[float]] = [[] for _ in runs]
    cpu: list[list[float]] = [[] for _ in runs]
    for number in range(-WARM_UP, times):
        for which, run in enumerate(runs):
            began, used = time.perf_counter(), time.process_time()
            run()
            if number >= 0:
                wall[which].append(time.perf_counter() - began)
                cpu[which].append(time.process_time() - used)
    return [(statistics.median(one) * 1e3, statistics.median(used) * 1e3) for one, used in zip(wall, cpu, strict=True)]


def step_lines(pool: Pool) -> list[str]:
    header = [
        "",
        "ranks",
        "plain, ms",
        "zerograph, ms",
        "ratio",
        "more, ms",
        "CPU plain, ms",
        "CPU zerograph, ms",
        "ratio",
    ]
    lines = [line(header), line(["---"] * len(header))]
    for kind in ("MLP", "two-layer transformer"):
        for ranks in (1, 2):
            (plain, plain_cpu), (ours, ours_cpu) = pool.run(ranks, steps, kind)[0]
            cells = [f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}", f"{ours - plain:.2f}"]
            cells += [f"{plain_cpu:.2f}", f"{ours_cpu:.2f}", f"{ours_cpu / plain_cpu:.2f}"]
            lines.append(line([kind, str(ranks), *cells]))
            print(lines[-1], flush=True)
    return lines


def exchange_lines(pool: Pool) -> list[str]:
    kinds = ("through memory", "over sockets", "all-gather")
    header = ["ranks", "rounds", *(title for kind in kinds for title in (f"{kind}, ms", "its CPU, ms"))]
    lines = [line(header), line(["---"] * len(header))]
    between_two: list[tuple[float, float]] = []
    for ranks in RANKS:
        answers = pool.run(ranks, exchanges, 100)
        medians = [
            (statistics.median(one[which][0] for one in answers), statistics.median(one[which][1] for one in answers))
            for which in range(len(kinds))
        ]
        between_two = between_two or medians
        cells = [f"{number:.3f}" for pair in medians for number in pair]
        lines.append(line([str(ranks), str((ranks - 1).bit_length()), *cells]))
        print(lines[-1], flush=True)
    many, here = (MANY - 1).bit_length(), (HOST - 1).bit_length()
    memory, sockets = between_two[:2]
    for name, near in ((f"{MANY:,} on hosts of {HOST}", here), (f"{MANY:,} on as many hosts", 0)):
        cells = [f"{near * memory[part] + (many - near) * sockets[part]:.3f}" for part in (0, 1)]
        lines.append(line([f"{name}, extrapolated", str(many), "", "", *cells, "", ""]))
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = Pool(size=max(RANKS))
    try:
        lines = [*step_lines(pool), "", *exchange_lines(pool)]
    finally:
        pool.close()
    command = f"`python benchmarks/overhead.py`, torch {torch.__version__}, {os.cpu_count()} cores"
    RESULTS.write_text(page("Host work of a step", command, __doc__, *lines))


if __name__ == "__main__":
    main()
