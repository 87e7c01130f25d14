"""References: plain PyTorch on this rank's part of the batch, nothing exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import Trainer, adamw, loop


def build(task: Task, compile_model: bool, compile_optimizer: bool) -> Trainer:
    model = task.model()
    optimizer = adamw(model.parameters(), task.lr)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model, x, y)

    return Trainer(
        loop(
            torch.compile(loss_of) if compile_model else loss_of,
            torch.compile(optimizer.step) if compile_optimizer else optimizer.step,
            optimizer.zero_grad,
        )
    )
