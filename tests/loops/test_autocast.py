"""``torch.autocast`` around calls of prepared models, in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zerograph as zg
from tests.harness import compilations_of
from tests.loops.test_prepare import X, Y, loop_of
from tests.models import update_by


def train(model: nn.Module, optimizer: Any) -> list[Any]:
    seen: list[Any] = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(X.float())
            loss = F.cross_entropy(out, Y)
        outside = model(X.float()).square().mean()
        update_by(optimizer, loss + outside)
        seen += [out.dtype, loss.item(), outside.dtype, outside.item()]
    return seen


def test_calls_under_autocast_compute_in_its_dtype_and_others_do_not() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    model, twin = network(), network()
    plain = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    mine = train(*zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3))
    assert mine[::2] == plain[::2]
    torch.testing.assert_close(mine[1::2], plain[1::2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-6)
    assert compilations_of(loop_of(model).graph()) == 0
