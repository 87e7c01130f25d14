"""Offloading on a real accelerator: the same training, with state, shards and update on the CPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import deviation

WIDTH, LAYERS = 512, 8


class Step(zg.ZeroGraph):
    def __init__(self, device: str | None, folder: Path | None, stage: int, *, amp: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True))
        self.config.zero.stage = stage
        self.config.zero.bucket_size = 4 * WIDTH * (WIDTH + 1)
        self.config.backend = "eager"
        self.config.enable_amp(amp)
        to = None if device is None else zg.OffloadTo(device, folder)
        self.config.memory.offload = zg.Offload(to, to if stage == 3 and folder is not None else None)

    def build(self, x: Tensor) -> Tensor:
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        return loss


def trained(*args: Any, amp: bool = False) -> tuple[list[float], list[Tensor], int]:
    """Losses, parameters, and bytes of the GPU's memory that the state takes between steps."""
    # What a library allocates at its first product, and what a test before leaves, is no state.
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(WIDTH, WIDTH, device="cuda", dtype=dtype) @ torch.ones(WIDTH, WIDTH, device="cuda", dtype=dtype)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = Step(*args, amp=amp)
    losses = []
    for seed in range(5):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()
        losses.append(step(x).item())
    held = torch.cuda.memory_allocated() - before - x.nbytes
    return losses, list(step.state_dict()["modules"]["model"].values()), held


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.usefixtures("card")
def test_it_trains_as_without(tmp_path: Path, stage: int, files: bool, amp: bool) -> None:
    losses, parameters, held = trained("nvme" if files else "cpu", tmp_path if files else None, stage, amp=amp)
    wanted, there, whole = trained(None, None, stage, amp=amp)
    # Two kernels of one formula, and reductions in another order.
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-5)
    # An entry whose gradient is about 0 moves by the learning rate in a direction that rounding decides.
    for one, other in zip(parameters, there, strict=True):
        assert deviation(one, other) < 1e-3
    state = 3 * 4 * LAYERS * WIDTH * (WIDTH + 1)
    assert whole - held > 0.9 * state
