"""Training what does not fit: the optimizer's state alone is more than the process may have."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerograph as zg

WIDTH, LAYERS = 1024, 16
PARAMETERS = 4 * WIDTH**2 * LAYERS


class Step(zg.ZeroGraph):
    def __init__(self, model: nn.Module, folder: str) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(adamw(model))
        self.config.enable_zero(True, stage=3)
        self.config.bucket_size = 4 * WIDTH**2
        self.config.offload_optimizer("nvme", nvme_path=folder)

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def plainly(model: nn.Module, x: Tensor, steps: int) -> list[float]:
    update, losses = adamw(model), []
    for _ in range(steps):
        update.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def trained_within_a_limit(folder: str) -> dict[str, Any]:
    x = torch.ones(2, WIDTH)
    # What the first step of a process takes once and for all: imports, threads, tables.
    Step(layers(2), folder)(x)
    ours, theirs = layers(LAYERS), layers(LAYERS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + 2 * PARAMETERS - 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        found: dict[str, Any] = {"plain": plainly(theirs, x, 1)}
    except (RuntimeError, MemoryError) as error:
        found = {"plain": str(error)}
    found |= {"state": 2 * PARAMETERS, "left": limit - used}
    theirs.zero_grad()
    step = Step(ours, folder)
    found["ours"] = [step(x).item() for _ in range(3)]
    # As it would be without a limit.
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["wanted"] = plainly(layers(LAYERS), x, 3)
    return found


def trained_apart(folder: Path) -> dict[str, Any]:
    """The same in a process of its own."""
    script = f"import json; from {__name__} import *; print(json.dumps(trained_within_a_limit({str(folder)!r})))"
    # The limit counts address space: what is freed is to be given back, and no more set aside than is used.
    settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **settings})
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_state_that_does_not_fit_rests_in_files(tmp_path: Path) -> None:
    found = trained_apart(tmp_path)
    assert "can't allocate memory" in found["plain"]
    torch.testing.assert_close(found["ours"], found["wanted"])
