"""A peer of stage 1: DDP with torch's ``ZeroRedundancyOptimizer``, both with bucket views."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import OPTIONS, Trainer, loop


def build(task: Task) -> Trainer:
    model = DistributedDataParallel(
        task.model(), broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=task.lr, **OPTIONS
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model, x, y)

    return Trainer(loop(loss_of, optimizer.step, optimizer.zero_grad))
