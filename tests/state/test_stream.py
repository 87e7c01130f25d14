"""``step.stream()`` yields what ``save_pretrained`` would write, bucket by bucket."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zerograph as zg
from tests import pretrained
from tests.harness import LossStep, stores_of
from tests.peak_memory import Live
from tests.pool import Pool
from tests.state.test_generate import loss_of

BUCKET = 20_000


def step_of(model: Any, stage: int) -> LossStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return LossStep(model, optimizer, stage, loss_of, backend="eager", bucket_size=BUCKET)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return sorted(set(found) ^ set(wanted)) + [
        name for name in found if name in wanted and not torch.equal(found[name], wanted[name])
    ]


class Normed(nn.Module):
    """A model with buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale).square().mean()


def streamed() -> tuple[list[str], int]:
    """Return what differs, and the bytes that are alive at once besides the state."""
    found: list[str] = []
    ids = torch.arange(16).view(2, 8)
    for name in ("mixtral", "gpt2"):
        plain = pretrained.make(name)
        with zg.sharded_init() if name == "mixtral" else contextlib.nullcontext():
            model = pretrained.make(name)
        step = step_of(model, 3)
        if name == "gpt2":
            step.compile(ids)
        wanted = transformers.core_model_loading.revert_weight_conversion(plain, plain.state_dict())
        found += differences(dict(step.stream()), wanted)
        found += differences(dict(step.stream("model", original_names=False)), plain.state_dict())
        halves = {key: value.to(torch.bfloat16) for key, value in wanted.items()}
        found += differences(dict(step.stream(step.model, dtype=torch.bfloat16)), halves)
    state = [store.flat for store in stores_of(step)]
    with Live(state) as live:
        for _ in step.stream():
            pass
    model = Normed()
    normed = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found += differences(dict(normed.stream()), model.state_dict())
    return found, live.most - sum(part.nbytes for part in state)


def test_names_and_values_are_those_of_the_checkpoint(pool: Pool) -> None:
    for found, alive in pool.run(2, streamed):
        assert found == []
        # Two buckets; all parameters have 67 kB.
        assert alive <= 2.1 * BUCKET


def refused() -> dict[str, str]:
    ids = torch.arange(16).view(2, 8)
    step = step_of(pretrained.make("gpt2"), 3)
    step(ids)
    begun = step.stream()
    next(begun)
    step(ids)
    begun_before_a_load = step.stream()
    next(begun_before_a_load)
    step.load_state_dict({"modules": step.state_dict()["modules"]})
    calls: dict[str, Any] = {
        "other module": lambda: step.stream(nn.Linear(1, 1)),
        "no such name": lambda: step.stream("teacher"),
        "a step in between": lambda: list(begun),
        "a load in between": lambda: list(begun_before_a_load),
        "other arguments": lambda: step.stream(original_names=zg.rank() == 0),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(zg.ZeroGraphError) as error:
            call()
        found[name] = str(error.value)
    unequal = step.stream()
    next(unequal)
    with pytest.raises(zg.RankMismatchError) as error:
        list(unequal) if zg.rank() else step(ids)
    return {**found, "only one goes on": str(error.value)}


def test_wrong_calls_are_errors_on_all_ranks(pool: Pool) -> None:
    for found in pool.run(2, refused):
        assert "is not a module of the graph; those with parameters are model" in found["other module"]
        assert "'teacher' is not a module" in found["no such name"]
        for name in ("a step in between", "a load in between"):
            assert "a step, a load or full_parameters() ran before the end" in found[name]
        assert "original_names" in found["other arguments"]
        assert "step 3" in found["only one goes on"]
        assert "streaming bucket" in found["only one goes on"]
