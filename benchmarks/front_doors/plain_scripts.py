"""Plain loops: the ImageNet example of PyTorch and nanoGPT's ``train.py``, on generated data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders.tasks import Gpt, ResNet
from benchmarks.front_doors.door import BATCH, Door

BLOCK, VOCABULARY = 16, 32


def imagenet(door: Door) -> list[float]:
    """Train a ResNet with batch norm, SGD with momentum and a schedule, and evaluate it.

    In fp64: batch norm of a few samples magnifies the rounding of fp32 from step to step.
    """
    pictures = TensorDataset(torch.randn(61, 3, 8, 8, dtype=torch.float64), torch.randint(0, 4, (61,)))
    train_loader = DataLoader(pictures, batch_size=BATCH, shuffle=True)
    val_loader = DataLoader(TensorDataset(*pictures[:13]), batch_size=BATCH)
    model = ResNet(4, 4).double()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, scheduler, train_loader, val_loader = door.prepare(
        model, optimizer, scheduler, train_loader, val_loader
    )
    printed: list[float] = []
    while len(printed) < door.steps:
        model.train()
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
        scheduler.step()
    return [*printed[: door.steps], *validate(val_loader, model, criterion)]


def validate(loader: Iterable[tuple[Tensor, Tensor]], model: nn.Module, criterion: nn.Module) -> list[float]:
    """Return the losses and the right answers of each batch."""
    model.eval()
    printed = []
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            printed += [criterion(output, target).item(), (output.argmax(1) == target).sum().item()]
    return printed


class NanoGpt(nn.Module):
    """A GPT that returns its logits and its loss; the head shares the weight of the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(2, 32, 2, VOCABULARY, BLOCK)
        self.gpt.head.weight = self.gpt.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and loss."""
        logits = self.gpt(idx)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt(door: Door) -> list[float]:
    """Train a GPT with groups for weight decay, a schedule, accumulation and clipping."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    data = torch.randint(0, VOCABULARY, (1000,))
    generator = torch.Generator().manual_seed(1337)

    def get_batch() -> tuple[Tensor, Tensor]:
        # Each process takes its rows of what all draw.
        ix = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator).chunk(world)[rank].tolist()
        return torch.stack([data[i : i + BLOCK] for i in ix]), torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])

    def get_lr(it: int) -> float:
        warmup = 5
        return 2e-3 * (it / warmup if it < warmup else 0.5 * (1 + math.cos(math.pi * (it - warmup) / door.steps)))

    model = NanoGpt()
    decay, no_decay = ([p for p in model.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    model, optimizer = door.prepare(model, optimizer)
    x, y = get_batch()
    printed = []
    for iter_num in range(door.steps):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        for _ in range(door.accumulation):
            _, loss = model(x, y)
            loss = loss / door.accumulation
            x, y = get_batch()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        printed.append(loss.item() * door.accumulation)
    return printed
