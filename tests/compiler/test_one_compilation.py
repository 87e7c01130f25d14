"""A step is compiled once, not again when the optimizer has state; the first update stays plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from tests.harness import LossStep, MakeOptimizer, compilations_of, inputs, sum_of_squares, two_layers
from tests.models import update_by


def step_of(model: nn.Module, make: MakeOptimizer, schedule: Callable[[Any], LRScheduler] | None = None) -> LossStep:
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    return LossStep(model, optimizer, 1, sum_of_squares, scheduler, backend="eager")


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD with Nesterov momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD with momentum, upwards": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, maximize=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_update_is_plain_pytorchs_bit_by_bit_and_needs_no_compilation_of_its_own(name: str) -> None:
    plain = two_layers()
    optimizer = OPTIMIZERS[name](plain.parameters())
    step = step_of(copy.deepcopy(plain), OPTIMIZERS[name])
    for x in inputs([4, 4, 4]):
        update_by(optimizer, sum_of_squares(plain, x))
        step(x)
        state = step.state_dict()
        for key, value in state["modules"]["model"].items():
            assert torch.equal(value, plain.state_dict()[key]) or "momentum" not in name
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-12, atol=1e-12)
        for number, entries in optimizer.state_dict()["state"].items():
            if "momentum_buffer" in entries:
                buffer = state["optimizers"][0]["state"][number]["momentum_buffer"]
                assert torch.equal(buffer, entries["momentum_buffer"])
                assert torch.equal(buffer.signbit(), entries["momentum_buffer"].signbit())
    assert compilations_of(step) == 1


def test_a_gradient_of_minus_zero_is_the_first_momentum() -> None:
    """Zero times the momentum plus the gradient would be 0.0."""
    layer = nn.Linear(1, 1, bias=False).double()
    step = step_of(layer, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with torch.no_grad():
        layer.weight.fill_(1.0)
    plain = copy.deepcopy(layer)
    x = torch.tensor([[-0.0]], dtype=torch.float64)
    plain(x).square().sum().backward()
    assert plain.weight.grad is not None
    step(x)
    (entries,) = step.state_dict()["optimizers"][0]["state"].values()
    assert torch.equal(entries["momentum_buffer"].signbit(), plain.weight.grad.signbit())


@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW"])
def test_a_schedule_that_cycles_momentum_needs_no_second_compilation(name: str) -> None:
    step = step_of(two_layers(), OPTIMIZERS[name], lambda optimizer: OneCycleLR(optimizer, 0.1, 10))
    plain = two_layers()
    optimizer = OPTIMIZERS[name](plain.parameters())
    schedule = OneCycleLR(optimizer, 0.1, 10)
    for x in inputs([4, 4, 4]):
        update_by(optimizer, sum_of_squares(plain, x))
        schedule.step()
        step(x)
    torch.testing.assert_close(step.state_dict()["modules"]["model"], dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    assert compilations_of(step) == 1


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), torch.optim.Rprop])
def test_an_update_whose_beginning_is_no_constant_is_compiled_by_itself(make: MakeOptimizer) -> None:
    step = step_of(two_layers(), make)
    plain = two_layers()
    optimizer = make(plain.parameters())
    for x in inputs([4, 4, 4]):
        update_by(optimizer, sum_of_squares(plain, x))
        step(x)
    torch.testing.assert_close(step.state_dict()["modules"]["model"], dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
