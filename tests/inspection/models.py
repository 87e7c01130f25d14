"""A small step to look at: no process group, no weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.harness import LossStep, mean_of_squares
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import line


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(layers))
        self.last = nn.Linear(16, 16, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Step(LossStep):
    """Two rows of 16 numbers for each rank; a bucket holds about one block."""

    def __init__(self, layers: int = 2, stage: int = 3, tied: bool = False, device: str = "meta") -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model = Net(layers, tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        super().__init__(model, optimizer, stage, mean_of_squares, shard_min_size=1, bucket_size=4096)


def prepared(rank: int = 0, ranks: int = 2, micro_batches: int = 1, **options: object) -> Prepared:
    step = Step(**options)  # type: ignore[arg-type]
    step.config.gradient_accumulation_steps = micro_batches
    return step.prepare(line(ranks, rank, "ranks"), torch.empty(2 * micro_batches, 16, device="meta"))


def example() -> tuple[Step, tuple[Tensor, ...]]:
    """Return the arguments of the commands."""
    return Step(layers=1), (torch.empty(2, 16, device="meta"),)
