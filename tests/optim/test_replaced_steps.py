"""An optimizer whose ``step()`` was replaced or wrapped is refused, or that step runs: never the class's instead."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.models import update_by

X = torch.ones(3, 4)


def halving(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that halves gradients first."""

    @functools.wraps(step)
    def halved(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
        return step(self, *args, **kwargs)

    return halved


class Halving(torch.optim.SGD):
    step = halving(torch.optim.SGD.step)  # type: ignore[assignment]


class Net(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().forward(x) - y).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net(4, 4)


def by_graph(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step = LossStep(net, optimizer, 0)
    for _ in range(3):
        step(X, X)


def by_loop(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net, optimizer = zg.prepare(net, optimizer)
    plainly(net, optimizer)


def plainly(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        update_by(optimizer, net(X, X))


def assigned(patch: pytest.MonkeyPatch, net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = lambda: None  # type: ignore[assignment]
    return optimizer


def wrapped_before_a_scheduler(patch: pytest.MonkeyPatch, net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = halving(type(optimizer).step).__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def wrapped_in_the_class(patch: pytest.MonkeyPatch, net: nn.Module) -> torch.optim.Optimizer:
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    patch.setattr(torch.optim.SGD, "step", halving(torch.optim.SGD.step))
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("run", [by_graph, by_loop])
@pytest.mark.parametrize("change", [assigned, wrapped_before_a_scheduler, wrapped_in_the_class])
def test_a_step_that_another_has_replaced_is_refused(
    run: Callable[..., None], change: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    with pytest.raises(zg.ConfigError, match=r"SGD.step\(\) was replaced or wrapped, in .*test_replaced_steps"):
        run(net, change(monkeypatch, net))


def test_a_step_that_was_replaced_after_the_optimizer_was_registered_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = LossStep(net, optimizer, 0)
    optimizer.step = lambda: None  # type: ignore[assignment]
    with pytest.raises(zg.ConfigError, match="was replaced or wrapped"):
        step(X, X)


def scheduled(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


@pytest.mark.parametrize("run", [by_graph, by_loop])
@pytest.mark.parametrize("make", [scheduled, lambda net: Halving(net.parameters(), lr=0.1)])
def test_a_decorated_step_of_a_class_and_a_schedulers_count_run(run: Any, make: Any) -> None:
    plain, own = model(), model()
    plainly(plain, make(plain))
    run(own, make(own))
    with zg.full_parameters(own) if run is by_loop else torch.no_grad():
        torch.testing.assert_close(dict(own.named_parameters()), dict(plain.named_parameters()))


def reversed_sgd(params: list[Tensor], d_p_list: list[Tensor], *_: Any, lr: float, **__: Any) -> None:
    for parameter, gradient in zip(params, d_p_list, strict=True):
        parameter.add_(gradient, alpha=lr)


@pytest.mark.parametrize("run", [by_graph, by_loop])
def test_a_function_of_torch_optim_that_was_replaced_meanwhile_is_the_one_that_runs(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_replaced in (False, True):
        if is_replaced:
            monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", reversed_sgd)
        results = []
        for one in (plainly, run):
            net = model()
            one(net, torch.optim.SGD(net.parameters(), lr=0.1))
            results.append(net.state_dict()["weight"])
        torch.testing.assert_close(results[1], results[0])
