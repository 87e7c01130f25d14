"""Train a family on a device with zerograph and with plain PyTorch, and compare."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerograph as zg
from tests.gpu.families import FAMILIES, Batch
from tests.models import LossStep, update_by

# Kernels of one formula that add up in another order, over a few steps of AdamW; bf16 rounds at 2**-8.
LIMITS = {"fp32": 2e-6, "bf16": 5e-4}
ROWS = 4


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, fused=True)


class FamilyStep(zg.ZeroGraph):
    """A step on ``model(**batch).loss``, under autocast in bf16 if so asked."""

    def __init__(self, model: nn.Module, stage: int, device: str, precision: str, **options: object) -> None:
        super().__init__()
        self.model, self.device, self.low = model, device, precision == "bf16"
        self.add_optimizer(fused(model))
        if stage:
            self.set_zero_mode("distributed_split", stage=stage)
        self.config.backend = "eager"
        self.config.set(**options)

    def build(self, **batch: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.low):
            loss: Tensor = self.model(**batch).loss
        loss.backward()
        return loss


@dataclass
class Family:
    """A family's model on the device, and its first whole batches."""

    model: nn.Module
    batches: Sequence[Batch]


def family(name: str, device: str, steps: int, rows: int = ROWS, dropout: float = 0.0) -> Family:
    make, draw = FAMILIES[name]
    torch.manual_seed(0)
    model = make(dropout).train().to(device)
    batches = [{key: value.to(device) for key, value in draw(rows, 100 + seed).items()} for seed in range(steps)]
    return Family(model, batches)


def plain_losses(model: nn.Module, batches: Sequence[Batch], device: str, precision: str) -> list[float]:
    """Train a copy with plain PyTorch, and return its losses."""
    model = copy.deepcopy(model)
    optimizer = fused(model)
    losses = []
    for batch in batches:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
        losses.append(update_by(optimizer, loss).item())
    return losses


def part(batch: Batch) -> Batch:
    """Return this rank's rows of a whole batch."""
    return {key: value.chunk(zg.world_size())[zg.rank()] for key, value in batch.items()}


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference, relative to what is expected."""
    assert len(losses) == len(expected)
    return max(abs(loss - other) / max(abs(other), 1e-12) for loss, other in zip(losses, expected, strict=True))


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a new process, which keeps to itself what a failure leaves behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result(timeout=300)


# What the tests of single options train: a perceptron and five batches.


def perceptron(device: str, width: int = 256, layers: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU()))).to(device)


def inputs(device: str, count: int = 5, width: int = 256) -> list[Tensor]:
    return [torch.randn(64, width, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(count)]


def reproduction(model: nn.Module, x: Tensor) -> Tensor:
    """Return the squared error of a module that should return its input."""
    return (model(x) - x).square().mean()


class BodyStep(LossStep):
    """A step on ``body(model, x)``, at stage 3 unless asked otherwise."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int = 3,
        body: Callable[[nn.Module, Tensor], Tensor] = reproduction,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, stage, body, **{"backend": "eager", **options})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Tensor],
    body: Callable[[nn.Module, Tensor], Tensor] = reproduction,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Train with plain PyTorch, and return the losses."""
    losses = []
    for x in batches:
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            loss = body(model, x)
        losses.append(update_by(optimizer, loss).item())
    return losses
