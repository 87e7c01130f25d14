"""A step whose body a test gives, beside the same body under plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerograph as zg

Body = Callable[[nn.Module, Tensor], Tensor]


class Step(zg.ZeroGraph):
    def __init__(self, model: nn.Module, body: Body) -> None:
        super().__init__()
        self.model, self.body = model, body
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, x: Tensor) -> Tensor:
        loss = self.body(self.model, x)
        loss.backward()
        return loss


def model(**buffers: Tensor) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(4, 4).double()
    for name, value in buffers.items():
        made.register_buffer(name, value)
    return made


def inputs(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in sizes]


def as_plain_pytorch(
    made: nn.Module, body: Body, sizes: list[int], change: Callable[[Any], None] | None = None
) -> Step:
    """Trains on batches of these sizes; ``change`` is called on the module in front of each step."""
    plain = copy.deepcopy(made)
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1), Step(made, body)
    for x in inputs(sizes):
        for one in (plain, made) if change else ():
            assert change is not None
            change(one)
        optimizer.zero_grad()
        loss = body(plain, x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), loss.detach(), rtol=1e-12, atol=1e-12)
    found = step.state_dict()["modules"]["model"]
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    return step
