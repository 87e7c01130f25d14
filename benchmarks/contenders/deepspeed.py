"""Peers of stages 1, 2 and 3: DeepSpeed's ZeRO in fp32, with torch's fused AdamW."""

from __future__ import annotations

import logging
import os

# Read at import: without it DeepSpeed looks for an accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.training import Trainer, adamw


def build(task: Task, stage: int) -> Trainer:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # An all-reduce for inference that no training step calls; to build it takes a minute and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = task.model()
    batch = len(task.batches(0)[0][0])
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": batch * dist.get_world_size(),
        "gradient_clipping": 0.0,  # its default clips
        # The default bucket is 2 GB, allocated but never filled: as large as can be used is the same without that.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": sum(p.numel() for p in model.parameters())},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters(), task.lr), config=config, dist_init_required=False
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = task.loss(engine, x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step)
