"""Ours, at every stage, with each backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import zerograph as zg
from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import Trainer, adamw
from zerograph.runtime.peer_memory.cross_memory import bytes_read


class TrainStep(zg.ZeroGraph):
    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.add_optimizer(adamw(model.parameters(), task.lr))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.task.loss(self.model, x, y)
        loss.backward()
        return loss


def columns(ranks: int) -> list[list[int]]:
    """Return a grid of the ranks of two hosts, numbered host by host: a column for each host."""
    return [[rank, rank + ranks // 2] for rank in range(ranks // 2)]


def step_of(task: Task, stage: str, backend: str, wire: str = "exact", grid: bool = False) -> TrainStep:
    step = TrainStep(task, task.model())
    step.config.precision.wire = wire
    step.config.zero.shard_dims = (0, 1) if grid else None
    step.config.set(stage=0 if stage == "off" else int(stage))
    step.config.backend = backend
    # As all the others do: each rank normalises its part of the batch.
    step.config.batch_norm = "local"
    return step


def build(task: Task, grid: bool = False, **options: Any) -> Trainer:
    step = step_of(task, grid=grid, **options)
    if grid:
        step.config.mesh.placement = zg.placement("cpu", ranks=columns(zg.world_size()))
    listed = lambda: sum(one.between for one in step.inspect.collectives())  # noqa: E731
    return Trainer(step, read_bytes=bytes_read, listed_bytes=listed)
