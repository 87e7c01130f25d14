"""Seconds per training step beside torch's own ways to shard, in one run, interleaved.

torchrun --nproc-per-node 2 benchmarks/step_time.py                    # a GPT of some 10 million parameters
torchrun --nproc-per-node 2 benchmarks/step_time.py --rounds 5 --layers 4

Every candidate trains its own copy of the same model on the same batches. Rounds go through all candidates in turn, so
that what else the machine does falls on all of them alike. Told: the median over rounds, its ratio to the step without
any communication (each rank alone on its part of the batch), and the final loss, which must agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerograph as zg

VOCABULARY = 1024
Step = Callable[[Tensor, Tensor], Tensor]


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, x.shape[-1] // 64, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class TrainStep(zg.ZeroGraph):
    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.config.enable_zero(stage > 0, stage=stage or 1)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.model, x, y)
        loss.backward()
        return loss


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def candidates(make: Callable[[], Gpt]) -> dict[str, Step]:
    alone = make()
    ddp = DistributedDataParallel(make())
    zero1 = DistributedDataParallel(make())
    fsdp = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in fsdp.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    found: dict[str, Step] = {
        "no communication": eager(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3)),
        "DDP": eager(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3)),
        "DDP + ZeroRedundancyOptimizer": eager(
            zero1, ZeroRedundancyOptimizer(zero1.parameters(), torch.optim.AdamW, lr=1e-3)
        ),
        "FSDP2": eager(fsdp, torch.optim.AdamW(fsdp.parameters(), lr=1e-3)),
    }
    for stage in range(4):
        found[f"zerograph {f'stage {stage}' if stage else 'off'}"] = TrainStep(make(), stage)
    return found


def measure(steps: dict[str, Step], batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, tuple[list[float], float]]:
    """Seconds of every round but the first, and the last loss over all ranks, by candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for x, y in batches:
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            loss = step(x, y)
            seconds[name].append(time.perf_counter() - began)
            mean = loss.clone()
            dist.all_reduce(mean)
            losses[name] = float(mean) / dist.get_world_size()
    return {name: (seconds[name][1:], losses[name]) for name in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start with: torchrun --nproc-per-node 2 benchmarks/step_time.py")
    torch.set_num_threads(1)
    rank = zg.rank()

    def make() -> Gpt:
        torch.manual_seed(0)
        return Gpt(options.width, options.layers, options.context)

    generator = torch.Generator().manual_seed(rank)
    shape = (options.batch, options.context + 1)
    tokens = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(options.rounds + 1)]
    results = measure(candidates(make), [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens])
    if rank == 0:
        count = sum(p.numel() for p in make().parameters())
        table = Table("step", "median ms", "ratio", "last loss", title=f"{count:,} parameters, {options.rounds} rounds")
        base = statistics.median(results["no communication"][0])
        for name, (seconds, loss) in results.items():
            median = statistics.median(seconds)
            table.add_row(name, f"{median * 1000:.1f}", f"{median / base:.3f}", f"{loss:.5f}")
        Console().print(table)


if __name__ == "__main__":
    main()
