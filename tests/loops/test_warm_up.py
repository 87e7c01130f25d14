"""Schedules of the learning rate that begin at 0, as those of transformers do."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import covering, sliced

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def weights(name: str, stage: int | None, *, prepared: bool) -> list[Tensor]:
    """Return an embedding, of which the batch looks up two rows of six, after each of three updates."""
    kind, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Embedding(6, 3)
    optimizer: Any = kind(model.parameters(), lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)
    if prepared:
        model, optimizer, schedule = zg.prepare(model, optimizer, schedule, stage=stage)
    after = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
        schedule.step()
        after.append(model.state_dict()["weight"].clone())
    return after


@sliced("name, stage", *covering(itertools.product(OPTIMIZERS, [None, 2])))
def test_an_update_at_rate_zero_changes_nothing_where_there_was_no_gradient_either(
    name: str, stage: int | None
) -> None:
    plain, split = weights(name, None, prepared=False), weights(name, stage, prepared=True)
    torch.manual_seed(0)
    assert torch.equal(split[0], nn.Embedding(6, 3).weight)
    for expected, weight in zip(plain, split, strict=True):
        torch.testing.assert_close(weight, expected)
