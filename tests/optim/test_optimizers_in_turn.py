"""Optimizers of several graphs over the same parameters: each has a state of its own, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import kept_steps, sliced
from tests.models import Batch, TrainStep, batches, make, part, train_plainly
from tests.pool import Pool

MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
}

# Which of two graphs makes each step: long phases, and steps in turn.
TURNS = (0, 0, 0, 1, 0, 1, 1, 0, 1)


def data() -> list[Batch]:
    return batches("mlp", len(TURNS), 12, torch.float64)


def pair(first: str, second: str, stages: tuple[int, int]) -> list[TrainStep]:
    model = make("mlp", torch.float64)
    kinds = zip((first, second), stages, strict=True)
    return [TrainStep(model, MAKERS[kind](model), stage, backend="eager") for kind, stage in kinds]


def in_turn(first: str, second: str, stages: tuple[int, int]) -> tuple[list[float], dict[str, Any], list[Any], int]:
    """(losses, parameters, states of both optimizers, compiled steps kept)."""
    steps = pair(first, second, stages)
    losses = [float(steps[turn](part(x), part(y))) for turn, (x, y) in zip(TURNS, data(), strict=True)]
    states = [step.state_dict() for step in steps]
    optimizers = [state["optimizers"][0]["state"] for state in states]
    return losses, states[0]["modules"]["model"], optimizers, sum(map(kept_steps, steps))


@sliced(
    "first, second, stages",
    [("adamw", "adamw", (2, 3)), ("sgd", "adamw", (1, 1))],
    [("adamw", "adamw", (1, 1)), ("adafactor", "adamw", (0, 3))],
)
def test_each_optimizer_keeps_its_own_state(pool: Pool, first: str, second: str, stages: tuple[int, int]) -> None:
    plain = make("mlp", torch.float64)
    optimizers = [MAKERS[first](plain), MAKERS[second](plain)]
    wanted = [
        loss.item()
        for turn, batch in zip(TURNS, data(), strict=True)
        for loss in train_plainly(plain, optimizers[turn], [batch])
    ]
    losses, parameters, states, kept = pool.run(2, in_turn, first, second, stages)[0]
    assert losses == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(parameters, dict(plain.state_dict()))
    for found, optimizer in zip(states, optimizers, strict=True):
        torch.testing.assert_close(found, optimizer.state_dict()["state"])
    assert kept == 2, "steps that are bound to buckets which are no more are let go of"


def resumed(folder: Path) -> list[Any]:
    """States of the second optimizer: when it was saved, while the first had the buckets, and when it was loaded."""
    steps = pair("adamw", "adamw", (1, 1))
    (x, y), *_ = data()
    for turn in (0, 0, 0, 1, 0):
        steps[turn](part(x), part(y))
    saved = steps[1].state_dict()
    steps[1].save(folder)
    for turn in (1, 0):
        steps[turn](part(x), part(y))
    steps[1].load(folder)
    return [one["optimizers"][0]["state"] for one in (saved, steps[1].state_dict())]


def test_a_checkpoint_has_the_state_of_its_own_optimizer(pool: Pool, tmp_path: Path) -> None:
    saved, loaded = pool.run(2, resumed, tmp_path / "checkpoint")[0]
    assert {float(one["step"]) for one in saved.values()} == {1.0}
    torch.testing.assert_close(loaded, saved)
