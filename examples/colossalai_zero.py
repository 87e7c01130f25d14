"""A ColossalAI script with only its import changed: classify points by the ring that contains them, with ZeRO level 3.

torchrun --nproc-per-node 2 examples/colossalai_zero.py                    # a few seconds on CPU
torchrun --nproc-per-node 2 examples/colossalai_zero.py --offload cpu      # state and parameters in CPU memory
torchrun --nproc-per-node 2 examples/colossalai_zero.py --offload nvme --nvme-path /local/folder

Each rank reads its own part of the samples. docs/colossalai.md describes how the engine runs the loop.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from zerograph.compat import colossalai

RINGS, SAMPLES, BATCH, MAX_IN_CPU = 4, 1024, 64, 2**20


def configuration(offload: str, nvme_path: str | None) -> dict[str, Any]:
    """Return the configuration: Adam, ZeRO level 3 and fp16."""
    zero: dict[str, Any] = {"type": "ZeroRedundancyOptimizer_Level_3", "dynamic_loss_scale": True, "clip_grad": 1.0}
    if offload != "none":
        where = {"device": offload, "pin_memory": True} | ({"nvme_path": nvme_path} if nvme_path else {})
        zero["offload_optimizer_config"] = {**where, "fast_init": True}
        zero["offload_param_config"] = {**where, "max_in_cpu": MAX_IN_CPU}
    return {"optimizer": {"type": "Adam", "lr": 0.01, "weight_decay": 0}, "zero": zero}


def rings(seed: int) -> TensorDataset:
    """Return points of the plane, and for each the number of the ring around the origin that contains it."""
    points = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points.norm(dim=1).mul(1.5).long().clamp(max=RINGS - 1))


def loader(data: TensorDataset, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of this rank's samples, without the last, smaller batch."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=shuffle)
    return DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--offload", choices=("none", "cpu", "nvme"), default="none", help="where to store state and parameters"
    )
    parser.add_argument("--nvme-path", help="an existing folder on a local disk, for --offload nvme")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    colossalai.launch_from_torch(configuration(options.offload, options.nvme_path))
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, RINGS))
    engine, train_loader, test_loader, _ = colossalai.initialize(
        model,
        criterion=nn.CrossEntropyLoss(),
        train_dataloader=loader(rings(seed=0), shuffle=True),
        test_dataloader=loader(rings(seed=1), shuffle=False),
    )

    for epoch in range(options.epochs):
        engine.train()
        train_loader.sampler.set_epoch(epoch)
        updates = 0
        for points, ring in train_loader:
            engine.zero_grad()
            output = engine(points)
            loss = engine.criterion(output, ring)
            engine.backward(loss)
            updates += engine.step()
        engine.eval()
        right = seen = 0
        for points, ring in test_loader:
            # Results are those of the whole batch: all ranks count together.
            output = engine(points)
            right += int((output.argmax(-1) == ring).sum())
            seen += len(output)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, {updates} updates, {right / seen:.1%} right")
    if dist.get_rank() == 0:
        print(engine)


if __name__ == "__main__":
    main()
