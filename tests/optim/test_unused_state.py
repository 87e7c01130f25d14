"""State that an update does not use stays for the one of the same optimizer that does, as in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.harness import LossStep, MakeOptimizer, inputs, optimizer_of, sliced, sum_of_squares, two_layers
from tests.models import part, update_by
from tests.pool import Pool


def step_of(make: MakeOptimizer, stage: int = 1) -> LossStep:
    model = two_layers()
    return LossStep(model, make(model.parameters()), stage, sum_of_squares, backend="eager")


def sgd(**options: Any) -> MakeOptimizer:
    return lambda p: torch.optim.SGD(p, lr=0.05, **options)


# The optimizer, and the hyperparameters of the steps, one after another.
CASES: dict[str, tuple[MakeOptimizer, list[dict[str, Any]]]] = {
    "momentum": (sgd(momentum=0.9), [{}, {"momentum": 0.0}, {}, {"momentum": 0.9}, {}]),
    "momentum, twice": (sgd(momentum=0.9), [{}, *({"momentum": m} for m in (0.0, 0.8, 0.0, 0.7))]),
    "momentum later": (sgd(), [{}, {"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.9}]),
    "dampening": (
        sgd(momentum=0.9, dampening=0.5),
        [{}, {"momentum": 0.0}, {"momentum": 0.9}, {"dampening": 0.0}, {"nesterov": True}],
    ),
    "rmsprop, momentum": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
        [{}, {}, {"momentum": 0.0}, {"momentum": 0.9}],
    ),
    "rmsprop, centered": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
        [{}, {}, {"centered": False}, {"centered": True}],
    ),
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True), [{}, {}, {"amsgrad": False}, {"amsgrad": True}]),
}


def change(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        group.update(options)


def trained(name: str, stage: int) -> tuple[list[dict[str, Any]], list[int]]:
    """(state after each step, number of the store of the first parameter)."""
    make, changes = CASES[name]
    step = step_of(make, stage)
    states, serials = [], []
    for x, options in zip(inputs([8] * len(changes)), changes, strict=True):
        change(optimizer_of(step), options)
        step(part(x))
        states.append(step.state_dict())
        serials.append(next(step.model.parameters())._zerograph_store.serial)
    return states, serials


def check(name: str, states: list[dict[str, Any]]) -> None:
    make, changes = CASES[name]
    plain = two_layers()
    optimizer = make(plain.parameters())
    for x, options, state in zip(inputs([8] * len(changes)), changes, states, strict=True):
        change(optimizer, options)
        update_by(optimizer, sum_of_squares(plain, x))
        torch.testing.assert_close(state["modules"]["model"], dict(plain.state_dict()), rtol=1e-11, atol=1e-13)
        wanted = optimizer.state_dict()["state"]
        found = state["optimizers"][0]["state"]
        assert found.keys() == wanted.keys()
        for number, entries in wanted.items():
            assert found[number].keys() == entries.keys()
            torch.testing.assert_close(dict(found[number]), dict(entries), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_state_that_an_update_does_not_use_is_there_again_later(name: str) -> None:
    states, serials = trained(name, 1)
    check(name, states)
    # The switch moves no state.
    assert name != "amsgrad" or len(set(serials)) == 1


@sliced("stage", [3], [1])
def test_split_state_that_an_update_does_not_use_is_there_again_later(pool: Pool, stage: int) -> None:
    states, _ = pool.run(2, trained, "momentum", stage)[0]
    check("momentum", states)


def predicted_state(stage: int, micro_batches: int) -> list[int]:
    """Return the predicted bytes of optimizer state at the peak of a step with momentum, and of one without."""
    step = step_of(sgd(momentum=0.9), stage)
    step.config.gradient_accumulation_steps = micro_batches
    step.config.zero.shard_min_size = 1
    predicted = []
    for x, momentum in zip(inputs([8] * 2), (0.9, 0.0), strict=True):
        change(optimizer_of(step), {"momentum": momentum})
        step(part(x))
        predicted.append(step.inspect.memory.kinds["optimizer state"])
    return predicted


@sliced("stage, micro_batches", [(1, 2), (3, 1)], [(1, 1)])
def test_state_that_an_update_does_not_use_counts_in_the_predicted_peak(
    pool: Pool, stage: int, micro_batches: int
) -> None:
    # Half of 44 parameters in fp64, and the learning rate.
    assert pool.run(2, predicted_state, stage, micro_batches) == [[44 * 8 // 2 + 8] * 2] * 2


def test_a_step_count_that_an_update_does_not_use_counts_in_the_predicted_peak() -> None:
    step = step_of(sgd(momentum=0.9))
    x, *_ = inputs([8])
    step(x)
    before, state = step.inspect.memory.kinds["optimizer state"], step.state_dict()
    for entries in state["optimizers"][0]["state"].values():
        entries["count"] = torch.tensor(3.0)
    step.load_state_dict(state)
    step(x)
    # One fp32 number.
    assert step.inspect.memory.kinds["optimizer state"] == before + 4


def test_state_that_is_loaded_for_another_update_is_kept(tmp_path: Path) -> None:
    step = step_of(sgd(momentum=0.9))
    batches = inputs([8] * 4)
    step(batches[0])
    state = step.state_dict()
    step.save(tmp_path / "checkpoint")
    for load in (lambda other: other.load_state_dict(state), lambda other: other.load(tmp_path / "checkpoint")):
        other = step_of(sgd(momentum=0.9))
        load(other)
        change(optimizer_of(other), {"momentum": 0.0})
        other(batches[1])
        for number, entries in state["optimizers"][0]["state"].items():
            found = other.state_dict()["optimizers"][0]["state"][number]
            assert torch.equal(found["momentum_buffer"], entries["momentum_buffer"])


@pytest.mark.parametrize("run", ["call", "compile"])
def test_a_step_after_a_load_that_needs_other_stores_trains(run: str) -> None:
    make = sgd(momentum=0.9)
    step, plain = step_of(make), two_layers()
    optimizer = make(plain.parameters())
    x, *_ = inputs([8])
    if run == "call":
        step(x)
        update_by(optimizer, sum_of_squares(plain, x))
    else:
        step.compile(x)
    state = step.state_dict()
    state["optimizers"][0]["state"] = {
        number: {"momentum_buffer": torch.zeros_like(parameter), "count": torch.tensor(3.0)}
        for number, parameter in enumerate(plain.parameters())
    }
    step.load_state_dict(state)
    optimizer = make(plain.parameters())
    for _ in range(2):
        step(x)
        update_by(optimizer, sum_of_squares(plain, x))
    torch.testing.assert_close(step.state_dict()["modules"]["model"], dict(plain.state_dict()), rtol=1e-11, atol=1e-13)


def test_after_an_empty_state_is_loaded_the_first_update_is_a_first_one() -> None:
    make = sgd(momentum=0.9, dampening=0.5)
    step = step_of(make)
    empty = copy.deepcopy(step.state_dict())
    plain = two_layers()
    optimizer = make(plain.parameters())
    x, *_ = inputs([8])
    for momentum in (0.9, 0.0, 0.9):
        change(optimizer_of(step), {"momentum": momentum})
        step(x)
    step.load_state_dict(empty)
    for momentum in (0.0, 0.9, 0.9):
        change(optimizer_of(step), {"momentum": momentum})
        change(optimizer, {"momentum": momentum})
        step(x)
        update_by(optimizer, sum_of_squares(plain, x))
        found = step.state_dict()
        torch.testing.assert_close(found["modules"]["model"], dict(plain.state_dict()), rtol=1e-11, atol=1e-13)
        assert [set(one) for one in found["optimizers"][0]["state"].values()] == [
            set(one) for one in optimizer.state_dict()["state"].values()
        ]


def test_state_that_an_update_needs_and_no_step_made_is_an_error_before_anything_changes() -> None:
    step = step_of(lambda p: torch.optim.AdamW(p, lr=0.01))
    x, *_ = inputs([8])
    step(x)
    before = step.state_dict()
    change(optimizer_of(step), {"amsgrad": True})
    with pytest.raises(zg.CaptureError, match="needs step, exp_avg, exp_avg_sq, max_exp_avg_sq"):
        step(x)
    change(optimizer_of(step), {"amsgrad": False})
    after = step.state_dict()
    assert after["steps_done"] == 1
    torch.testing.assert_close(after["modules"], before["modules"], rtol=0, atol=0)


def test_unused_state_of_another_shape_is_an_error_before_anything_changes() -> None:
    step = step_of(sgd())
    state = step.state_dict()
    state["optimizers"][0]["state"] = {0: {"rows": torch.ones(6)}}
    step.load_state_dict(state)
    x, *_ = inputs([8])
    with pytest.raises(zg.CaptureError, match=r"has rows of shape \(6,\) for a parameter of shape \(6, 4\)"):
        step(x)
    assert step.steps_done == 0
