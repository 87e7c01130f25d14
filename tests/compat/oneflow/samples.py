"""Samples for the tests of OneFlow's names: the tutorial's calls in our own words, and plain PyTorch beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import zerograph.compat.oneflow as flow
from zerograph.compat.oneflow import nn

SAMPLES, INPUTS, HIDDEN, CLASSES = 16, 12, 10, 4
B, S0 = flow.sbp.broadcast, flow.sbp.split(0)


@contextmanager
def switches(stage: int) -> Iterator[None]:
    """The switches as the tutorial sets them for a stage; off again afterwards: workers of the suite live on."""
    flow.boxing.nccl.enable_use_compute_stream(stage >= 2)
    flow.boxing.nccl.disable_group_boxing_by_dst_parallel(stage >= 3)
    try:
        yield
    finally:
        flow.boxing.nccl.enable_use_compute_stream(False)
        flow.boxing.nccl.disable_group_boxing_by_dst_parallel(False)


def mlp(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)).to(dtype)


class Train(nn.Graph):
    """Cross entropy; any option of the configuration by name, and whatever ``told`` says of the graph."""

    def __init__(self, model: Any, optimizer: Any, told: Any = None, lr_sch: Any = None, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = nn.CrossEntropyLoss()
        self.add_optimizer(optimizer, lr_sch=lr_sch)
        self.config.backend = "eager"
        self.config.set(**options)
        if told is not None:
            told(self)

    def build(self, x: Tensor, y: Tensor) -> Any:
        scores = self.model(x)
        loss = self.loss_fn(scores, y)
        loss.backward()
        return scores, loss


class LossGraph(nn.Graph):
    """Train a model on ``loss(model, x)``, by default its output."""

    def __init__(self, model: Any, optimizer: Any, stage: int = 0, loss: Any = lambda model, x: model(x)) -> None:
        super().__init__()
        self.model, self._loss = model, loss
        self.add_optimizer(optimizer)
        self.config.backend = "eager"
        if stage:
            self.config.enable_zero(True, stage=stage, shard_min_size=1)

    def build(self, x: Tensor) -> Tensor:
        loss = self._loss(self.model, x)
        loss.backward()
        return loss


class Predict(nn.Graph):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config.backend = "eager"

    def build(self, x: Tensor) -> Any:
        return self.model(x)


def batches(count: int = 3, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Whole batches, equal on all ranks; labels in OneFlow's shape."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(SAMPLES, INPUTS, generator=generator).to(dtype)
        found.append((x, torch.randint(0, CLASSES, (SAMPLES, 1), generator=generator)))
    return found


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a whole batch."""
    return tensor.chunk(flow.env.get_world_size())[flow.env.get_rank()]


def everybody() -> Any:
    return flow.placement.all("cpu")


def given(tensor: Tensor) -> Any:
    """The whole batch as a global tensor, from this rank's part of it."""
    return own(tensor).to_global(placement=everybody(), sbp=S0)  # type: ignore[attr-defined]


def trained(graph: Train, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The losses."""
    return [graph(given(x), given(y))[1].to_local() for x, y in data]


def plainly(
    model: Any, optimizer: Any, data: list[tuple[Tensor, Tensor]], scheduler: Any = None, clip: Any = None
) -> list[Tensor]:
    """The losses of plain PyTorch on one device, on whole batches; ``clip(model)`` before each update."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y.squeeze(1))
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses
