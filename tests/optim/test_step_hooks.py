"""Hooks that users register on an optimizer's ``step()``, which a graph does not call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zerograph as zg
from tests.harness import LossStep, inputs, mean_of_squares, model
from tests.models import part, update_by
from tests.pool import Pool

SIZES = [8, 8, 8]
LIMIT = 0.3


class Clamped:
    """A model whose weights a hook keeps small, and what its hooks have seen."""

    def __init__(self, made: nn.Module) -> None:
        self.model = made
        self.optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        self.seen: list[Any] = []
        self.opened: Callable[[], AbstractContextManager[object]] = nullcontext
        self.optimizer.register_step_post_hook(self.clamp)

    def clamp(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args == (optimizer,)
        self.seen.append((optimizer is self.optimizer, kwargs, optimizer.param_groups[0]["lr"]))
        with torch.no_grad(), self.opened():
            for parameter in self.model.parameters():
                parameter.clamp_(-LIMIT, LIMIT)


class Step(LossStep):
    def __init__(self, made: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None) -> None:
        super().__init__(made, optimizer, loss=mean_of_squares, scheduler=scheduler, backend="eager")


def clamped(stage: int) -> tuple[list[Any], Any]:
    trained = Clamped(model())
    step = Step(trained.model, trained.optimizer, trained.scheduler)
    if stage:
        step.set_zero_mode("distributed_split", stage=stage)
        trained.opened = step.full_parameters
    for x in inputs(SIZES):
        step(part(x))
    return trained.seen, step.state_dict()["modules"]["model"]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_hook_behind_the_update_runs_where_torch_runs_it(pool: Pool, stage: int) -> None:
    plain = Clamped(model())
    for x in inputs(SIZES):
        update_by(plain.optimizer, plain.model(x).square().mean())
        plain.scheduler.step()
    assert len(plain.seen) == len(SIZES)
    for seen, state in pool.run(2, clamped, stage):
        assert seen == plain.seen
        torch.testing.assert_close(state, dict(plain.model.state_dict()), rtol=1e-12, atol=1e-12)


def test_a_hook_on_all_optimizers_runs_for_each() -> None:
    made, seen = model(), []
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in made.parameters()]
    step = Step(made, optimizers[0])
    step.add_optimizer(optimizers[1])
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        step(inputs([8])[0])
    finally:
        handle.remove()
    assert seen == optimizers


def test_a_step_that_is_skipped_runs_no_hook() -> None:
    trained = Clamped(model())
    step = Step(trained.model, trained.optimizer)
    step.config.checks.on_nonfinite = "skip"
    with pytest.warns(UserWarning, match="was skipped"):
        step(torch.full((8, 4), torch.nan, dtype=torch.float64))
    assert not trained.seen
    step(inputs([8])[0])
    assert len(trained.seen) == 1


@pytest.mark.parametrize("everybodys", [False, True])
def test_a_hook_before_the_update_is_refused_until_it_is_removed(everybodys: bool) -> None:
    def see_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        raise AssertionError("it ran")

    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    register = register_optimizer_step_pre_hook if everybodys else optimizer.register_step_pre_hook
    handle = register(see_gradients)
    try:
        step, before = Step(made, optimizer), copy.deepcopy(made.state_dict())
        with pytest.raises(zg.ConfigError, match=r"see_gradients is to run before SGD\.step\(\)"):
            step(inputs([8])[0])
    finally:
        handle.remove()
    assert step.steps_done == 0
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    step(inputs([8])[0])
    assert step.steps_done == 1
