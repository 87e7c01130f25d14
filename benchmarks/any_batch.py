"""Batches of any size on two ranks: numbers, compilations and speed beside static steps and peers that pad.

python benchmarks/any_batch.py               # everything, some ten minutes on two quiet cores; results/any_batch.md
python benchmarks/any_batch.py --steps 300   # fewer random batches
python benchmarks/any_batch.py --quick       # small models, some seconds: only to see that everything runs

A GPT of 6 layers and a BERT classifier (transformers' BertForSequenceClassification, 4 layers, each row padded to the
longest and masked), both of width 64, without dropout, stage 2, fused AdamW, gloo, one thread per rank. Random sizes:
0 to 8 rows on each rank and a length of 32 to 512, drawn for each step. Losses are compared, step by step, with plain
PyTorch in fp32 that trains from the same beginning on the concatenation of all rows; told is the largest difference
relative to the loss. "Same size" interleaves a step with static and one with symbolic sizes on 8 rows of length 256 on
each rank; medians. "First compile" is capture and all passes, once each in a process of its own. Peers get the same
samples padded to 8 rows and length 512. Tokens are those of samples, without padding; the rates are of the same batches
for all three, without steps that compile. Stages are compared on the first 16 of the random batches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders import ddp, fsdp2  # noqa: E402
from benchmarks.contenders.tasks import Gpt, Task  # noqa: E402
from benchmarks.contenders.training import adamw  # noqa: E402
from benchmarks.contenders.zerograph import TrainStep  # noqa: E402
from benchmarks.measure.job import seconds  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from benchmarks.task_steps import eager_step  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph.ir.mesh import line  # noqa: E402

RANKS, ROWS, SHORTEST, LONGEST, VOCABULARY, CLASSES, LR = 2, 8, 32, 512, 512, 4, 1e-3
COMPARED_STAGES = (0, 1, 2, 3)
# Batches on which stages are compared, and those of a peer that are not counted.
STAGE_STEPS, WARM = 16, 3
PATIENCE = 3600.0


@dataclass(frozen=True)
class Sizes:
    """The size of a run."""

    width: int
    layers: int
    longest: int
    steps: int
    peer_steps: int
    rounds: int


QUICK = Sizes(width=32, layers=2, longest=64, steps=24, peer_steps=6, rounds=3)


class Bert(nn.Module):
    """Transformers' classifier of rows of tokens, of which 0 is padding."""

    def __init__(self, layers: int, width: int, longest: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=longest,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
        self.bert = BertForSequenceClassification(config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated layers, which FSDP2 shards one by one."""
        layers: nn.ModuleList = self.bert.bert.encoder.layer
        return layers

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=ids, attention_mask=(ids != 0).long()).logits
        return logits


class PaddedTask(Task):
    """A task whose batch may have no valid target on a rank: a sum keeps the loss finite."""

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum over valid targets, divided by a constant."""
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") / y.numel()


@dataclass(frozen=True)
class Batch:
    """The whole batch of a step.

    Attributes:
        rows: rows of each rank.
        x: tokens [rows, length]; 0 is padding.
        y: targets: [rows, length] of tokens or [rows] of classes.
    """

    rows: list[int]
    x: Tensor
    y: Tensor

    @property
    def tokens(self) -> int:
        """Tokens of samples, without padding."""
        return int((self.x != 0).sum())

    def own(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's part."""
        return self.x.split(self.rows)[rank], self.y.split(self.rows)[rank]

    def padded(self, rank: int, longest: int) -> tuple[Tensor, Tensor]:
        """Return a rank's part padded to the maximum. Rows without a sample have one token, and no target."""
        x, y = self.own(rank)
        missing = ROWS - len(x)
        x = F.pad(x, (0, longest - x.shape[1], 0, missing))
        x[ROWS - missing :, 0] = 1
        after = (0, longest - y.shape[1], 0, missing) if y.dim() == 2 else (0, missing)
        return x, F.pad(y, after, value=-100)


def model_of(name: str, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    if name == "GPT":
        return Gpt(sizes.layers, sizes.width, 4, VOCABULARY, sizes.longest)
    return Bert(sizes.layers * 2 // 3, sizes.width, sizes.longest)


def batch_of(name: str, rows: list[int], length: int, generator: torch.Generator) -> Batch:
    x = torch.randint(1, VOCABULARY, (sum(rows), length), generator=generator)
    if name == "GPT":
        return Batch(rows, x, x.roll(-1, 1))
    lengths = torch.randint(length // 2, length + 1, (sum(rows), 1), generator=generator)
    lengths[0] = length
    x = x.masked_fill(torch.arange(length) >= lengths, 0)
    return Batch(rows, x, torch.randint(0, CLASSES, (sum(rows),), generator=generator))


def batches(name: str, sizes: Sizes) -> list[Batch]:
    draw, generator, drawn = random.Random(0), torch.Generator().manual_seed(0), []
    while len(drawn) < sizes.steps:
        rows, length = [draw.randint(0, ROWS) for _ in range(RANKS)], draw.randint(SHORTEST, sizes.longest)
        if sum(rows):
            drawn.append(batch_of(name, rows, length, generator))
    return drawn


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def step_of(name: str, sizes: Sizes, dynamic: bool | str, stage: int = 2) -> TrainStep:
    return eager_step(task_of(Task, name, sizes), stage, dynamic_shapes=dynamic)


def task_of(kind: type[Task], name: str, sizes: Sizes) -> Task:
    """Return a task whose batches are those of :func:`batches`."""
    return kind(lambda: model_of(name, sizes), lambda generator: None, LR)  # type: ignore[arg-type, return-value]


@dataclass
class Trained:
    """Training on random batches: loss and seconds of each step, and the steps that compiled."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)


def random_sizes(name: str, sizes: Sizes, rank: int) -> Trained:
    step, result = step_of(name, sizes, "auto"), Trained()
    for number, batch in enumerate(batches(name, sizes), 1):
        x, y = batch.own(rank)
        before = step._steps.compilations
        result.seconds.append(seconds(lambda x=x, y=y: result.losses.append(float(step(x, y)))))
        if step._steps.compilations > before:
            result.compiled += [number] * (step._steps.compilations - before)
    return result


def stages_equal(name: str, sizes: Sizes, rank: int) -> bool:
    """Return whether losses and final parameters of all stages are equal bit by bit."""
    results = []
    for stage in COMPARED_STAGES:
        step = step_of(name, sizes, "auto", stage)
        losses = [step(*batch.own(rank)) for batch in batches(name, sizes)[:STAGE_STEPS]]
        results.append([*losses, *step.state_dict()["modules"]["model"].values()])
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def same_size(name: str, sizes: Sizes, rank: int) -> tuple[float, float]:
    """Return the median seconds of a static and of a symbolic step."""
    batch = batch_of(name, [ROWS] * RANKS, sizes.longest // 2, torch.Generator().manual_seed(0))
    steps, times = (step_of(name, sizes, False), step_of(name, sizes, True)), ([], [])
    x, y = batch.own(rank)
    for number in range(sizes.rounds + WARM):
        for step, taken in zip(steps, times, strict=True):
            passed = seconds(lambda step=step: step(x, y))
            if number >= WARM:
                taken.append(passed)
    return statistics.median(times[0]), statistics.median(times[1])


def padded_peer(peer: str, name: str, sizes: Sizes, rank: int) -> list[float]:
    """Return the seconds of each of the first steps of a peer that pads every batch to the maximum."""
    task = task_of(PaddedTask, name, sizes)
    trainer = ddp.build(task) if peer == "DDP" else fsdp2.build(task, reshard=False)
    taken = []
    for batch in batches(name, sizes)[: sizes.peer_steps]:
        x, y = batch.padded(rank, sizes.longest)
        taken.append(seconds(lambda x=x, y=y: trainer.step(x, y)))
    return taken


PEERS = ("DDP", "FSDP2")


Measured = tuple[tuple[float, float], Trained, bool, dict[str, list[float]]]


def on_rank(name: str, sizes: Sizes) -> Measured:
    """Return what this rank has measured."""
    torch.set_num_threads(1)
    rank = zg.rank()
    same, trained = same_size(name, sizes, rank), random_sizes(name, sizes, rank)
    equal = stages_equal(name, sizes, rank)
    return same, trained, equal, {peer: padded_peer(peer, name, sizes, rank) for peer in PEERS}


def plain_losses(name: str, sizes: Sizes) -> list[float]:
    """Return the losses of one device on the concatenations."""
    model = model_of(name, sizes)
    optimizer, losses = adamw(model.parameters(), LR), []
    for batch in batches(name, sizes):
        optimizer.zero_grad()
        loss = loss_of(model, batch.x, batch.y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compile_seconds(name: str, sizes: Sizes, dynamic: bool) -> float:
    torch.set_num_threads(1)
    batch = batch_of(name, [ROWS] * RANKS, sizes.longest // 2, torch.Generator().manual_seed(0))
    step = step_of(name, sizes, dynamic)
    began = time.perf_counter()
    step.prepare(line(RANKS, 0, "ranks"), *batch.own(0))
    return time.perf_counter() - began


def first_compile(name: str, sizes: Sizes) -> list[float]:
    """Return the seconds of a static and of a symbolic compilation, each in a process of its own."""
    taken = []
    for dynamic in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            taken.append(pool.apply(compile_seconds, (name, sizes, dynamic)))
    return taken


def rows_of(name: str, sizes: Sizes) -> list[list[str]]:
    """Return the cells of a model's column, with the goal of each: label, measured, goal."""
    static_compile, symbolic_compile = first_compile(name, sizes)
    pool = Pool(RANKS, patience=PATIENCE)
    (static, symbolic), trained, equal, peers = pool.run(RANKS, on_rank, name, sizes)[0]
    pool.close()
    losses = plain_losses(name, sizes)
    difference = max(abs(a - b) / abs(b) for a, b in zip(trained.losses, losses, strict=True))
    tokens = [batch.tokens for batch in batches(name, sizes)]
    counted = [n for n in range(sizes.peer_steps) if n >= WARM and n + 1 not in trained.compiled]

    def rate(taken: list[float]) -> float:
        return sum(tokens[n] for n in counted) / sum(taken[n] for n in counted)

    ours = rate(trained.seconds)
    return [
        [f"compilations in {sizes.steps} steps of random sizes", str(len(trained.compiled)), "at most 3"],
        ["compilations after the first 20 steps", str(sum(n > 20 for n in trained.compiled)), "0"],
        ["steps that hang", "0", "0"],
        ["largest relative difference of a loss", f"{difference:.1e}", "1e-6"],
        ["stages off, 1, 2, 3 bitwise equal", "yes" if equal else "NO", "yes"],
        ["same size: static step, ms", f"{static * 1e3:.1f}", ""],
        ["same size: symbolic step, ms", f"{symbolic * 1e3:.1f} ({symbolic / static:.3f} x)", "1.05 x"],
        ["first compile: static, s", f"{static_compile:.2f}", ""],
        ["first compile: symbolic, s", f"{symbolic_compile:.2f} ({symbolic_compile / static_compile:.2f} x)", "3 x"],
        ["random sizes: real tokens/s", f"{ours:,.0f}", ""],
        *(
            [f"{peer}, padded: real tokens/s", f"{rate(taken):,.0f} (we: {ours / rate(taken):.2f} x)", "1.5 x"]
            for peer, taken in peers.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="random batches of each model")
    parser.add_argument("--peer-steps", type=int, default=40, help="of which peers run the first")
    parser.add_argument("--rounds", type=int, default=25, help="steps of the same size that are timed")
    parser.add_argument("--quick", action="store_true", help="small models, few steps; writes no page")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(RANKS)
    sizes = QUICK if options.quick else Sizes(64, 6, LONGEST, options.steps, options.peer_steps, options.rounds)
    columns = []
    for name in ("GPT", "BERT"):
        began = time.perf_counter()
        columns.append(rows_of(name, sizes))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    cells = [[gpt[0], gpt[1], bert[1], gpt[2]] for gpt, bert in zip(*columns, strict=True)]
    table = Table(["", "GPT", "BERT", "goal"], cells)
    if not options.quick:
        machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {date.today()}"
        arguments = "" if options.steps == 1000 else f" --steps {options.steps}"
        command = f"`python benchmarks/any_batch.py{arguments}`, {machine}"
        write("Batches of any size", command, __doc__, *table)


if __name__ == "__main__":
    main()
