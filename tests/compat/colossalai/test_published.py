"""Every configuration on ColossalAI's page on ZeRO trains for 20 steps on two ranks as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.compat.colossalai.loops import train
from tests.harness import sliced
from tests.models import TokenLoss, batches, make
from tests.pool import Pool
from zerograph.compat import colossalai

STEPS, MAX_IN_CPU = 20, 1000
ADAM = {"type": "Adam", "lr": 0.001, "weight_decay": 0}


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """The page's, by what they add."""
    files = {"device": "nvme", "pin_memory": True, "nvme_path": str(folder)}
    cpu = {"device": "cpu", "pin_memory": True}
    found = {
        "level 3": {},
        "optimizer on the CPU": {"offload_optimizer_config": cpu | {"fast_init": True}},
        "parameters on the CPU": {
            "offload_optimizer_config": cpu | {"fast_init": True},
            "offload_param_config": cpu | {"fast_init": MAX_IN_CPU},
        },
        "files": {
            "offload_optimizer_config": files | {"fast_init": True},
            "offload_param_config": files | {"max_in_cpu": MAX_IN_CPU},
        },
        "level 1": {"type": "ZeroRedundancyOptimizer_Level_1"},
        "level 2": {"type": "ZeroRedundancyOptimizer_Level_2"},
    }
    zero = {"type": "ZeroRedundancyOptimizer_Level_3", "dynamic_loss_scale": True, "clip_grad": 1.0}
    return {name: {"optimizer": ADAM, "zero": zero | more} for name, more in found.items()}


def by_configuration(config: dict[str, Any], slip: bool) -> tuple[list[float], str]:
    if slip and zg.rank() == 0:
        with pytest.warns(UserWarning, match="max_in_cpu") as seen:
            engine, *_ = colossalai.initialize(make("mlp"), criterion=TokenLoss(), config=config, verbose=False)
        assert seen[0].filename == __file__
    else:
        engine, *_ = colossalai.initialize(make("mlp"), criterion=TokenLoss(), config=config, verbose=False)
    engine.train()
    return train(engine, batches("mlp", STEPS)), repr(engine)


def on_one_device() -> list[float]:
    """fp16 under autocast, a dynamic scale and clipping, as plain PyTorch has them."""
    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    losses = []
    for x, y in batches("mlp", STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = TokenLoss()(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@sliced("name", ["parameters on the CPU", "files"], configurations(Path()))
def test_every_published_configuration_trains_as_one_device_does(pool: Pool, tmp_path: Path, name: str) -> None:
    wanted, config = on_one_device(), configurations(tmp_path)[name]
    assert wanted[-1] != wanted[0]
    for losses, shown in pool.run(2, by_configuration, config, name == "parameters on the CPU"):
        assert losses == pytest.approx(wanted, abs=2e-3)
        assert f"stage {config['zero']['type'][-1]}" in shown
