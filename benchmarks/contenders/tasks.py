"""Training tasks: models of plain ``torch.nn`` modules, their batches and their loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 4


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        create: makes the model; draws its parameters from torch's generator.
        draw: a batch of one rank from a generator.
        lr: learning rate.
    """

    create: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    lr: float = 1e-3

    def model(self) -> nn.Module:
        """The same parameters on every rank, for every contender."""
        torch.manual_seed(0)
        return self.create()

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's parts of the first global batches."""
        generator = torch.Generator().manual_seed(1 + rank)
        return [self.draw(generator) for _ in range(BATCHES)]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """ResNet-18's block: two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inside + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for small pictures: a 3x3 stem, no pooling before the blocks."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.ModuleList(
            Residual(before if first else after, after, 2 if first and after > width else 1)
            for before, after in itertools.pairwise(widths)
            for first in (True, False)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated parts of a model: what is wrapped, or compiled, one by one."""
    return list(model.blocks)


def gpt(layers: int, width: int, heads: int, vocabulary: int, context: int, batch: int) -> Task:
    """A GPT that learns random tokens, ``batch`` sequences of the length ``context`` on each rank."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Task(lambda: Gpt(layers, width, heads, vocabulary, context), draw)


def _resnet(width: int, classes: int, batch: int, side: int) -> Task:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pictures = torch.randn((batch, 3, side, side), generator=generator)
        return pictures, torch.randint(classes, (batch,), generator=generator)

    # At 1e-3 plain PyTorch's third loss moves by 2e-2 when the pictures change by 1e-7: no two could be told to agree.
    return Task(lambda: ResNet(width, classes), draw, lr=1e-5)


TASKS = {
    "small": gpt(layers=4, width=256, heads=4, vocabulary=8192, context=128, batch=4),
    "mid": gpt(layers=8, width=512, heads=8, vocabulary=16384, context=256, batch=2),
    "resnet": _resnet(width=64, classes=10, batch=16, side=32),
    "tiny": gpt(layers=2, width=32, heads=2, vocabulary=64, context=16, batch=2),
}
