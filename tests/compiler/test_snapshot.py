"""A step that follows an equal one is recognised by comparing objects. Every change that matters is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.compiler.test_tree import CHANGES, Layer
from tests.harness import recognised, snapshot_of


class Train(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Layer(), Layer())
        self.more_numbers = 1
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.add_optimizer(self.adamw)

    def build(self, x: Tensor, weight: float) -> Tensor:
        loss = self.model(x).square().mean() * weight
        loss.backward()
        return loss


def repeated() -> tuple[Train, Tensor]:
    """Return a graph that has made equal steps, so that it keeps a snapshot, and their batch."""
    step, x = Train(), torch.ones(4, 3)
    for _ in range(3):
        step(x, 0.5)
    assert recognised(step, x, 0.5)
    return step, x


STATE: dict[str, Callable[[Train], object]] = {
    **{name: lambda step, change=change: change(step.model[1], step) for name, change in CHANGES.items()},
    "an attribute of the graph": lambda step: setattr(step, "more_numbers", 2),
    "an attribute of the graph more": lambda step: setattr(step, "others", 2),
    "a hyperparameter": lambda step: step.adamw.param_groups[0].update(weight_decay=0.5),
    "a pair of hyperparameters": lambda step: step.adamw.param_groups[0].update(betas=(0.5, 0.9)),
    "a flag": lambda step: step.adamw.param_groups[0].update(maximize=True),
    "a hyperparameter more": lambda step: step.adamw.param_groups[0].update(other=1),
    "a parameter less": lambda step: step.adamw.param_groups[0]["params"].pop(),
    "a group more": lambda step: step.adamw.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "a hook before step()": lambda step: step.adamw.register_step_pre_hook(lambda *_: None),
    "an option": lambda step: setattr(step.config, "clip_grad_norm", 1.0),
    "another configuration": lambda step: setattr(step, "config", zg.Config()),
    "an annotation": lambda step: zg.annotate(step.model[0].linear.weight, sbp=zg.sbp.broadcast),
    "a store": lambda step: delattr(step.model[0].linear.weight, "_zerograph_store"),
    "the first update": lambda step: setattr(snapshot_of(step).stores[0], "fresh", True),
}


@pytest.mark.parametrize("change", STATE)
def test_a_change_of_state_is_seen(change: str) -> None:
    step, x = repeated()
    STATE[change](step)
    assert not recognised(step, x, 0.5)


BATCHES: dict[str, tuple[Any, ...]] = {
    "another dimension": (torch.ones(4, 3, 1), 0.5),
    "another dtype": (torch.ones(4, 3, dtype=torch.float64), 0.5),
    "a gradient": (torch.ones(4, 3, requires_grad=True), 0.5),
    "another layout": (torch.ones(4, 3).to_sparse(), 0.5),
    "a replicated tensor": (zg.replicated(torch.ones(4, 3)), 0.5),
    "another constant": (torch.ones(4, 3), 0.25),
    "a tensor for a constant": (torch.ones(4, 3), torch.tensor(0.5)),
    "a constant for a tensor": (1.0, 0.5),
    "another nesting": ((torch.ones(4, 3),), 0.5),
    "one argument less": (torch.ones(4, 3),),
}


def test_another_batch_is_seen() -> None:
    step, x = repeated()
    assert [name for name, batch in BATCHES.items() if recognised(step, *batch)] == []
    assert recognised(step, x, 0.5)


@pytest.mark.parametrize("surroundings", [torch.autocast("cpu"), torch.device("meta")])
def test_surroundings_are_seen(surroundings: Any) -> None:
    step, x = repeated()
    with surroundings:
        assert not recognised(step, x, 0.5)
        _ = [step(x, 0.5) for _ in range(3)]
    assert not recognised(step, x, 0.5)


def test_other_values_and_another_learning_rate_run_the_same_step() -> None:
    step, _ = repeated()
    step.adamw.param_groups[0]["lr"] = 0.0
    before = step.model[0].linear.weight.clone()
    assert recognised(step, torch.zeros(4, 3), 0.5)
    # Without a learning rate, AdamW changes nothing.
    step(torch.full((4, 3), 2.0), 0.5)
    assert torch.equal(step.model[0].linear.weight, before)


def test_another_default_dtype_traces_again() -> None:
    class Constants(zg.ZeroGraph):
        def build(self, x: Tensor) -> Tensor:
            return x + torch.ones(3)

    step, x, dtypes = Constants(), torch.zeros(3), []
    try:
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            dtypes += [step(x).dtype for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes == [*[torch.float32] * 4, *[torch.float64] * 2, *[torch.float32] * 2]


def test_the_flag_of_deterministic_algorithms_traces_again() -> None:
    class Asks(zg.ZeroGraph):
        def build(self, x: Tensor) -> Tensor:
            return x + int(torch.are_deterministic_algorithms_enabled())

    step, found = Asks(), []
    try:
        for deterministic in (False, False, True, False):
            torch.use_deterministic_algorithms(deterministic)
            found += [step(torch.zeros(1)).item() for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [0, 0, 0, 0, 1, 1, 0, 0]


def test_the_snapshot_keeps_no_batch_alive() -> None:
    assert snapshot_of(repeated()[0])._batch.tensors == ()


def test_replaced_data_are_refused_after_equal_steps() -> None:
    step, x = repeated()
    step.model[0].linear.weight.data = torch.ones(3, 3)
    with pytest.raises(zg.InputError, match="was replaced"):
        step(x, 0.5)
