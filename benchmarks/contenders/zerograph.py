"""Ours, at every stage, with each backend."""

from __future__ import annotations

from torch import Tensor, nn

import zerograph as zg
from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import Trainer, adamw
from zerograph.runtime.wire.cross_memory import bytes_read


class TrainStep(zg.ZeroGraph):
    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.add_optimizer(adamw(model.parameters(), task.lr))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.task.loss(self.model, x, y)
        loss.backward()
        return loss


def step_of(task: Task, stage: str, backend: str) -> TrainStep:
    step = TrainStep(task, task.model())
    step.config.enable_zero(stage != "off", stage=1 if stage == "off" else int(stage))
    step.config.backend = backend
    # As all the others do: each rank normalises its part of the batch.
    step.config.batch_norm = "local"
    return step


def build(task: Task, stage: str, backend: str) -> Trainer:
    step = step_of(task, stage, backend)
    listed = lambda: sum(one.between for one in step.collectives())  # noqa: E731
    return Trainer(step, read_bytes=bytes_read, listed_bytes=listed)
