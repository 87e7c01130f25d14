"""Peers of "off": ``DistributedDataParallel``, as it comes, at its leanest, and compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import Trainer, adamw, loop


def build(task: Task, static: bool = False, compiled: bool = False) -> Trainer:
    # broadcast_buffers: running statistics take no part in any loss of training, and the others exchange none.
    model = DistributedDataParallel(
        task.model(), broadcast_buffers=False, gradient_as_bucket_view=static, static_graph=static
    )
    optimizer = adamw(model.parameters(), task.lr)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model, x, y)

    step = loop(torch.compile(loss_of) if compiled else loss_of, optimizer.step, optimizer.zero_grad)
    return Trainer(step, lambda: 0 if static else _bucket_bytes(model))


def _bucket_bytes(model: DistributedDataParallel) -> int:
    """DDP's reducer keeps its buckets as long as the model lives: in C++, unless gradients are views of them."""
    facts = model._get_ddp_logging_data()
    sizes = facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))
