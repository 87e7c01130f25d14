"""Optimizers of torch.optim, traced from their own step(): the numbers of the plain optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import TrainStep, batches, make, part, train_plainly
from tests.pool import Pool

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
}
STEPS = 5


def train(dtype: torch.dtype) -> dict[str, Any]:
    """Losses and final state for every optimizer."""
    found = {}
    for name, (kind, options) in OPTIMIZERS.items():
        model = make("mlp", dtype)
        step = TrainStep(model, kind(model.parameters(), **options), 2)
        losses = [step(part(x), part(y)) for x, y in batches("mlp", STEPS, dtype=dtype)]
        found[name] = torch.stack(losses), step.state_dict()
    return found


@pytest.fixture(scope="module")
def trained(pool: Pool) -> dict[str, Any]:
    found: dict[str, Any] = pool.run(2, train, torch.float64)[0]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_makes_the_updates_of_the_plain_one(trained: dict[str, Any], name: str) -> None:
    losses, state = trained[name]
    kind, options = OPTIMIZERS[name]
    model = make("mlp", torch.float64)
    plain = kind(model.parameters(), **options)
    wanted = train_plainly(model, plain, batches("mlp", STEPS, dtype=torch.float64))
    # The plain ones keep these numbers in fp32, whatever the model's dtype; ours are fp64 and so a little better.
    scale = 1e5 if name in ("nadam", "asgd") else 1.0
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=1e-12 * scale, atol=1e-12 * scale)
    torch.testing.assert_close(
        state["modules"]["model"], dict(model.state_dict()), rtol=1e-11 * scale, atol=1e-12 * scale
    )
    held, wanted_held = state["optimizers"][0]["state"], plain.state_dict()["state"]
    assert held.keys() == wanted_held.keys()
    for number, one in wanted_held.items():
        torch.testing.assert_close(held[number], one, rtol=1e-10 * scale, atol=1e-12 * scale)
