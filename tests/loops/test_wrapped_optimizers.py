"""Optimizers around others run as they are written: the update of the inner one is the graph."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import sliced
from tests.loops.scripts import Prepare, Seen, assert_like_one_process, samples, seeded
from tests.loops.test_habits import perceptron
from tests.pool import Pool


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization, as its public code has it (davda54/sam)."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([one.grad.norm() for group in self.param_groups for one in group["params"]]).norm()
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["old"] = one.data.clone()
                one.add_(one.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        self.first_step()
        torch.enable_grad()(closure)()
        for group in self.param_groups:
            for one in group["params"]:
                one.data = self.state[one]["old"]
        self.base_optimizer.step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights, by a wrapper that never runs the constructor of its base, as many have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.steps += 1
        for one in self.param_groups[0]["params"]:
            if "slow" not in self.state[one]:
                self.state[one]["slow"] = one.data.clone()
            if self.steps % 2 == 0:
                self.state[one]["slow"] += (one.data - self.state[one]["slow"]) * 0.5
                one.data.copy_(self.state[one]["slow"])
        return loss


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sharpness": lambda model: Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "slow weights": lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.02)),
}


def loop(prepare: Prepare, name: str) -> Seen:
    model = seeded(perceptron)
    optimizer: Any = MAKERS[name](model)
    inner = vars(optimizer).get("base_optimizer", vars(optimizer).get("optimizer"))
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
    model, optimizer, scheduler, loader = prepare(model, optimizer, scheduler, DataLoader(samples(16, 6), batch_size=8))
    printed = []
    for _ in range(2):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            printed.append(optimizer.step(closure).item())
        scheduler.step()
    return printed, [dict(model.state_dict()), inner.state_dict()["state"]]


@sliced("name, stage", [("sharpness", 3), ("slow weights", 2)], itertools.product(MAKERS, (0, 2, 3)))
def test_a_wrapper_around_an_optimizer_runs_as_in_one_process(pool: Pool, name: str, stage: int) -> None:
    assert_like_one_process(pool, loop, name, stages=(stage,), rtol=1e-8)
