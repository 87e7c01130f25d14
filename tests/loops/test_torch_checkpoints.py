"""``torch.distributed.checkpoint.state_dict`` with a prepared model and optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import zerograph as zg
from tests.models import part
from tests.optim.test_update import unprepared
from tests.pool import Pool

FULL = StateDictOptions(full_state_dict=True)


def pair(prepare: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    prepared: tuple[Any, Any] = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return prepared


def train(model: Any, optimizer: Any, steps: int, rows: Any = part) -> list[float]:
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model(rows(torch.randn(8, 8, generator=generator).double())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumed(prepare: Any) -> tuple[dict[str, Any], list[list[float]]]:
    """Train, save, and go on: in the same pair, set back, and in a new one."""
    model, optimizer = pair(prepare)
    train(model, optimizer, 2)
    # Those of a plain pair are its own tensors.
    saved, state = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    entries: dict[str, Tensor] = {
        f"{name}.{key}": value for name, entry in state["state"].items() for key, value in entry.items()
    }
    losses = [train(model, optimizer, 2)]
    new = pair(prepare)
    for one, other in ((model, optimizer), new):
        states = copy.deepcopy((saved, state))
        set_state_dict(one, other, model_state_dict=states[0], optim_state_dict=states[1], options=FULL)
        losses.append(train(one, other, 2))
    return {**saved, **entries}, losses


def test_state_is_read_and_set_by_torchs_functions_before_and_after_the_first_step(pool: Pool) -> None:
    ((expected, losses),) = pool.run(1, resumed, unprepared)
    for state, own in pool.run(2, resumed_by_zerograph):
        torch.testing.assert_close(own, losses)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, check_dtype=False)


def resumed_by_zerograph() -> tuple[dict[str, Any], list[list[float]]]:
    return resumed(lambda *objects: zg.prepare(*objects, stage=3))
