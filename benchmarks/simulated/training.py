"""The contenders at work: forward and backward in bf16, fp32 parameters, fused AdamW."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerograph as zg
from benchmarks.contenders import zerograph
from benchmarks.contenders.tasks import Task, blocks
from benchmarks.contenders.training import Step, adamw, loop
from benchmarks.simulated.contenders import Contender

LR = 1e-4


class TrainStep(zerograph.TrainStep):
    def __init__(self, task: Task, model: nn.Module, device: str) -> None:
        super().__init__(replace(task, lr=LR), model)
        self.device = device

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.task.loss(self.model, x, y)
        loss.backward()
        return loss


def build(contender: Contender, task: Task, model: nn.Module, device: str) -> Step:
    """A step of the contender's on a model that lies on the device.

    Args:
        device: a type: ``"cuda"`` or ``"cpu"``.
    """
    if contender.ours:
        return _ours(contender, task, model, device)
    return _fsdp2(contender, task, model, device) if contender.stage else _plain(contender, task, model, device)


def _ours(contender: Contender, task: Task, model: nn.Module, device: str) -> Step:
    step = TrainStep(task, model, device)
    step.config.zero.stage = contender.stage
    step.config.backend = contender.backend
    if contender.offload:
        step.config.memory.offload = zg.Offload(optimizer="cpu")
    return step


def _plain(contender: Contender, task: Task, model: nn.Module, device: str) -> Step:
    if contender.backend == "inductor":
        for block in blocks(model):
            block.compile()
    optimizer = adamw(model.parameters(), LR)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return task.loss(model, x, y)

    return loop(loss_of, optimizer.step, optimizer.zero_grad)


def _fsdp2(contender: Contender, task: Task, model: nn.Module, device: str) -> Step:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = contender.stage == 3
    for block in blocks(model):
        if contender.backend == "inductor":
            # Block by block, inside the wrapper, as torchtitan does: its hooks stay outside what is compiled.
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = adamw(model.parameters(), LR)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        # The loss in fp32, as autocast has it.
        return task.loss(lambda tokens: model(tokens).float(), x, y)

    return loop(loss_of, optimizer.step, optimizer.zero_grad)
