"""A peer of stage 1: fairscale's OSS with ShardedDDP, which reduces each gradient to its owner only."""

from __future__ import annotations

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import OPTIONS, Trainer, loop


def build(task: Task) -> Trainer:
    model = task.model()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=task.lr, **OPTIONS)
    sharded = ShardedDataParallel(model, optimizer, sync_models_at_startup=True, broadcast_buffers=False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(sharded, x, y)

    # The model's zero_grad, not the optimizer's: it also resets which gradients have been reduced.
    return Trainer(loop(loss_of, optimizer.step, sharded.zero_grad))
