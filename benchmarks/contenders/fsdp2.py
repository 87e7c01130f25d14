"""Peers of stages 2 and 3: ``fully_shard`` around each block, parameters kept or freed after forward."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.contenders.tasks import Task, blocks
from benchmarks.contenders.training import Trainer, adamw, loop


def build(task: Task, reshard: bool, compiled: bool = False) -> Trainer:
    model = task.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        if compiled:
            # Block by block, inside the wrapper, as torchtitan does: its hooks stay outside what is compiled.
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = adamw(model.parameters(), task.lr)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model, x, y)

    return Trainer(loop(loss_of, optimizer.step, optimizer.zero_grad))
