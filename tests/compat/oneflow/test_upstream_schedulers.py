"""The schedulers of OneFlow's own graph tests (test_graph_lr_scheduler.py, _lr_with_warmup.py, _lrs.py, _lr_scale.py).

Each case is an optimizer with its scheduler; all are in one graph. The rate that a step used is read off its parameter,
whose gradient is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.pool import Pool
from zerograph.compat.oneflow import nn

STEPS = 70
schedulers: Any = flow.optim.lr_scheduler
Rate = Callable[[int], float]


def cosine(step: float, steps: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def decay(step: float, steps: int, alpha: float) -> float:
    return (1 - alpha) * cosine(min(step, steps), steps) + alpha


def anneal(step: float, steps: int, end: float, base: float) -> float:
    return end + (base - end) * cosine(step, steps)


def polynomial(step: int, steps: int, end: float, power: float, base: float, cycle: bool) -> float:
    if cycle:
        step = max(step, 1)
        steps *= math.ceil(step / steps)
    return (base - end) * (1 - min(step, steps) / steps) ** power + end


def linear(step: int, steps: int, start: float, end: float) -> float:
    return start + (end - start) * min(step, steps) / steps


def restarts(step: int, first: int, times: int, end: float, base: float, rate: float = 1.0, limit: int = 0) -> float:
    number, begin, length = 0, 0, first
    while step >= begin + length:
        number, begin, length = number + 1, begin + length, length * times
    return end if 0 < limit <= number else anneal(step - begin, length, end, base * rate**number)


def warm(kind: str, inner: Any, factor: float, prefix: bool = False, steps: int = 5) -> Any:
    options = {"warmup_factor": factor, "warmup_iters": steps, "warmup_method": kind, "warmup_prefix": prefix}
    return lambda optimizer: schedulers.WarmupLR(inner(optimizer), **options)


def of(name: str, **options: Any) -> Any:
    return lambda optimizer: getattr(schedulers, name)(optimizer, **options)


COSINE, DECAY = of("CosineAnnealingLR", T_max=20, eta_min=1e-5), of("CosineDecayLR", decay_steps=20, alpha=1e-3)
MULTI, DECAY10 = of("MultiStepLR", milestones=[10, 15], gamma=0.1), of("CosineDecayLR", decay_steps=10, alpha=0.5)

# By the name of OneFlow's check: how the scheduler is made, the initial rate, and the rate of each step by formula.
CHECKS: dict[str, tuple[Any, float, Rate]] = {
    "constant_lr": (of("ConstantLR", factor=0.1, total_iters=10), 0.1, lambda t: 0.01 if t < 10 else 0.1),
    "linear_lr": (
        of("LinearLR", start_factor=0.1, end_factor=1.0, total_iters=10),
        0.1,
        lambda t: 0.1 * linear(t, 10, 0.1, 1.0),
    ),
    "linear_lr_end_factor": (
        of("LinearLR", start_factor=0.1, end_factor=0.9, total_iters=10),
        0.1,
        lambda t: 0.1 * linear(t, 10, 0.1, 0.9),
    ),
    "step_lr": (of("StepLR", step_size=10, gamma=0.1), 0.1, lambda t: 0.1 * 0.1 ** (t // 10)),
    "multi_step_lr": (
        of("MultiStepLR", milestones=[5, 15], gamma=0.2),
        0.1,
        lambda t: 0.1 * 0.2 ** ((t >= 5) + (t >= 15)),
    ),
    "polynomial_lr": (
        of("PolynomialLR", steps=20, end_learning_rate=1e-5, power=2.0),
        0.1,
        lambda t: polynomial(t, 20, 1e-5, 2.0, 0.1, False),
    ),
    "polynomial_lr cycle": (
        of("PolynomialLR", steps=20, end_learning_rate=1e-4, power=1.0, cycle=True),
        0.01,
        lambda t: polynomial(t, 20, 1e-4, 1.0, 0.01, True),
    ),
    "exponential_lr": (of("ExponentialLR", gamma=0.5), 0.1, lambda t: 0.1 * 0.5**t),
    "cosine_decay_lr": (of("CosineDecayLR", decay_steps=10, alpha=1e-3), 0.1, lambda t: 0.1 * decay(t, 10, 1e-3)),
    "cosine_annealing_lr": (of("CosineAnnealingLR", T_max=10, eta_min=1e-4), 0.1, lambda t: anneal(t, 10, 1e-4, 0.1)),
    "linear_warmup_cosine_annealing_lr": (
        warm("linear", COSINE, 0.1),
        0.1,
        lambda t: linear(t, 5, 0.01, anneal(5, 20, 1e-5, 0.1)) if t < 5 else anneal(t, 20, 1e-5, 0.1),
    ),
    "linear_warmup_prefix_cosine_annealing_lr": (
        warm("linear", COSINE, 0.1, True),
        0.1,
        lambda t: linear(t, 5, 0.01, 0.1) if t < 5 else anneal(t - 5, 20, 1e-5, 0.1),
    ),
    "linear_warmup_multistep_lr": (
        warm("linear", MULTI, 0.1),
        0.1,
        lambda t: linear(t, 5, 0.01, 0.1) if t < 5 else 0.1 * 0.1 ** ((t >= 10) + (t >= 15)),
    ),
    "constant_warmup_cosine_decay_lr": (
        warm("constant", DECAY, 0.1),
        0.1,
        lambda t: 0.01 if t < 5 else 0.1 * decay(t, 20, 1e-3),
    ),
    "constant_warmup_prefix_cosine_decay_lr": (
        warm("constant", DECAY, 0.1, True),
        0.1,
        lambda t: 0.01 if t < 5 else 0.1 * decay(t - 5, 20, 1e-3),
    ),
    "only_warmup": (warm("linear", lambda one: one, 0.1), 0.1, lambda t: linear(t, 5, 0.01, 0.1)),
    "warmup_iters_equal_to_zero": (
        warm("linear", of("StepLR", step_size=3, gamma=0.5), 1 / 3, steps=0),
        0.1,
        lambda t: 0.1 * 0.5 ** (t // 3),
    ),
    "cosine_annealing_warm_restarts": (
        of("CosineAnnealingWarmRestarts", T_0=10, T_mult=1, eta_min=0.01),
        0.1,
        lambda t: restarts(t, 10, 1, 0.01, 0.1),
    ),
    "cosine_annealing_warm_restarts_mult_2": (
        of("CosineAnnealingWarmRestarts", T_0=10, T_mult=2, eta_min=0.01),
        0.1,
        lambda t: restarts(t, 10, 2, 0.01, 0.1),
    ),
    "cosine_annealing_warm_restarts_limit": (
        of("CosineAnnealingWarmRestarts", T_0=10, T_mult=2, eta_min=0.01, decay_rate=0.5, restart_limit=2),
        0.1,
        lambda t: restarts(t, 10, 2, 0.01, 0.1, 0.5, 2),
    ),
    "with_warmup: cosine": (DECAY10, 0.001, lambda t: 0.001 * decay(t, 10, 0.5)),
    "with_warmup: cosine_constant": (
        warm("constant", DECAY10, 0.5),
        0.001,
        lambda t: 0.0005 if t < 5 else 0.001 * decay(t, 10, 0.5),
    ),
    "with_warmup: constant": (
        lambda optimizer: schedulers.WarmUpLR(optimizer, 0.5, 5, "constant"),
        0.001,
        lambda t: 0.0005 if t < 5 else 0.001,
    ),
    "with_warmup: cosine_linear": (
        warm("linear", DECAY10, 0.5),
        0.001,
        lambda t: 0.001 * (linear(t, 5, 0.5, decay(5, 10, 0.5)) if t < 5 else decay(t, 10, 0.5)),
    ),
    "with_warmup: linear": (warm("linear", lambda one: one, 0.5), 0.001, lambda t: 0.001 * linear(t, 5, 0.5, 1.0)),
    "lrs: step": (of("StepLR", step_size=7, gamma=0.1), 0.001, lambda t: 0.001 * 0.1 ** (t // 7)),
    "lrs: multistep": (MULTI, 0.001, lambda t: 0.001 * 0.1 ** ((t >= 10) + (t >= 15))),
    "lrs: cosine_annealing": (
        of("CosineAnnealingLR", T_max=5, eta_min=0.0001),
        0.001,
        lambda t: anneal(t, 5, 0.0001, 0.001),
    ),
    "lrs: polynomial": (
        of("PolynomialLR", decay_batch=10, end_learning_rate=0.00001, power=2, cycle=True),
        0.001,
        lambda t: polynomial(t, 10, 0.00001, 2, 0.001, True),
    ),
    # Not in OneFlow's graph tests: what their warm-up is made of, in other orders.
    "sequential, counted from the start": (
        lambda o: schedulers.SequentialLR(o, [of("ConstantLR", factor=0.1, total_iters=2)(o), DECAY(o)], [3]),
        0.1,
        lambda t: (0.01 if t < 2 else 0.1) if t < 3 else 0.1 * decay(t, 20, 1e-3),
    ),
    "sequential, each from its milestone": (
        lambda o: schedulers.SequentialLR(o, [of("ExponentialLR", gamma=0.9)(o), DECAY(o)], [3], [True]),
        0.1,
        lambda t: 0.1 * 0.9**t if t < 3 else 0.1 * decay(t - 3, 20, 1e-3),
    ),
    "chained": (
        lambda o: schedulers.ChainedScheduler([of("ConstantLR", factor=0.1, total_iters=2)(o), DECAY(o)]),
        0.1,
        lambda t: (0.01 if t < 2 else 0.1) * decay(t, 20, 1e-3),
    ),
    "warm-up from 0, then a lambda": (
        warm("linear", lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)), 0.0, True),
        0.1,
        lambda t: 0.1 * (linear(t, 5, 0.0, 1.0) if t < 5 else 1 / (1 + t - 5)),
    ),
}


class Sum(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * x.mean()


class Steps(nn.Graph):
    def __init__(self, model: Any, pairs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.model = model
        for optimizer, scheduler in pairs:
            self.add_optimizer(optimizer, lr_sch=scheduler)
        self.config.backend = "eager"

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x)
        loss.backward()
        return loss


def made(names: list[str]) -> tuple[Steps, list[Any]]:
    model: Any = Sum(len(names))
    pairs = []
    for name, weight in zip(names, model.weights, strict=True):
        make, lr, _ = CHECKS[name]
        optimizer = flow.optim.SGD([weight], lr=lr)
        pairs.append((optimizer, make(optimizer)))
    return Steps(model, pairs), [scheduler for _, scheduler in pairs]


def used(graph: Steps, steps: int) -> Any:
    """The rates [steps, count] that the updates used."""
    values = [np.concatenate([one.numpy() for one in graph.model.state_dict().values()])]
    for _ in range(steps):
        graph(torch.ones(4, dtype=torch.float64))
        values.append(np.concatenate([one.numpy() for one in graph.model.state_dict().values()]))
    return -np.diff(np.stack(values), axis=0)


@pytest.fixture(scope="module")
def rates() -> dict[str, Any]:
    found = used(made(list(CHECKS))[0], STEPS)
    return dict(zip(CHECKS, found.T, strict=True))


@pytest.mark.parametrize("name", CHECKS)
def test_a_graph_uses_the_rates_of_upstreams_formula(rates: dict[str, Any], name: str) -> None:
    np.testing.assert_allclose(rates[name], list(map(CHECKS[name][2], range(STEPS))), rtol=1e-9, atol=1e-12)


def test_schedulers_in_schedulers_go_on_from_a_saved_state() -> None:
    names = ["linear_warmup_cosine_annealing_lr", "chained", "constant_warmup_prefix_cosine_decay_lr"]
    first, _ = made(names)
    used(first, 4)
    second, again = made(names)
    second.load_state_dict(first.state_dict())
    assert [one.last_step for one in again] == [4, 4, 4]
    np.testing.assert_array_equal(used(second, 6), used(first, 6))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda o: schedulers.WarmupLR(o, warmup_method="cosine"), "'linear' or 'constant'"),
        (lambda o: schedulers.WarmupLR(o, warmup_iters=0), "does nothing"),
        (lambda o: schedulers.WarmupLR(None), "a scheduler or an optimizer"),
        (lambda o: schedulers.WarmupLR(schedulers.OneCycleLR(o, 0.1, total_steps=9)), "OneCycleLR cannot be part"),
        (lambda o: schedulers.SequentialLR(o, [DECAY(o)], [3]), "one scheduler more than milestones"),
        (lambda o: schedulers.PolynomialLR(o), "the number of steps"),
        (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 0), "T_0=0"),
        (lambda o: schedulers.LinearLR(o, start_factor=2.0), "from 0 to 1"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused(make: Any, part: str) -> None:
    optimizer = flow.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(zg.ConfigError, match=part):
        make(optimizer)


def test_a_linear_warm_up_of_groups_with_different_rates_is_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = flow.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.2}], lr=0.1)
    with pytest.raises(zg.ConfigError, match="start with the rates"):
        schedulers.WarmupLR(DECAY(optimizer))


def scaled(base: float) -> list[list[float]]:
    """Parameters after a step on two ranks, each group's rate scaled, in a graph and outside."""
    found = []
    for graph in (True, False):
        model: Any = Sum(3)
        groups = [{"params": [one], "lr_scale": base ** (n + 1)} for n, one in enumerate(model.weights)]
        optimizer = flow.optim.SGD(groups, lr=0.1)
        scheduler = schedulers.ConstantLR(optimizer, factor=1.0, total_iters=100)
        if graph:
            Steps(model, [(optimizer, scheduler)])(torch.ones(2, dtype=torch.float64))
        else:
            model(torch.ones(2, dtype=torch.float64)).backward()
            optimizer.step()
        found.append([value.item() for value in model.state_dict().values()])
    return found


def test_a_graph_scales_the_rate_of_a_group_and_a_step_outside_does_not(pool: Pool) -> None:
    for inside, outside in pool.run(2, scaled, 0.2):
        np.testing.assert_allclose(inside, [-0.1 * 0.2 ** (n + 1) for n in range(3)], rtol=1e-12)
        np.testing.assert_allclose(outside, [-0.1] * 3, rtol=1e-12)
