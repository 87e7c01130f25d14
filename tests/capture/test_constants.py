"""Inputs that are no tensors: numbers, strings, dtypes, None. They are constants of the step, equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import inputs, model
from tests.models import part, update_by
from tests.pool import Pool

# Its list of builds shows how often a step was compiled.
pytestmark = pytest.mark.filterwarnings("ignore:build.. adds to self.builds")

SIZES = [8, 8, 8, 8, 8]
Given = Mapping[str, Any]
GIVEN: list[Given] = [
    {"mask": None, "how": {"power": 2, "name": "mean"}},
    {"mask": None, "how": {"power": 2.0, "name": "sum"}},
    {"mask": torch.arange(8) % 3 > 0, "how": {"power": 3, "name": "mean"}, "negated": True},
    {"mask": None, "how": {"power": 2, "name": "mean"}},
    {"mask": None, "how": {"power": 2, "name": "mean"}, "dtype": torch.float32},
]


def loss_of(
    model: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    how: Given,
    negated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    y = model(x) ** how["power"]
    y = y if dtype is None else y.to(dtype)
    y = y if mask is None else y * mask[:, None]
    loss = getattr(torch, how["name"])(y)
    return -loss if negated else loss


class Step(zg.ZeroGraph):
    def __init__(self, made: nn.Module) -> None:
        super().__init__()
        self.model = made
        self.add_optimizer(torch.optim.SGD(made.parameters(), lr=0.01))
        self.set_zero_mode("distributed_split", stage=2)
        self.config.backend = "eager"
        self.builds: list[Any] = []

    def build(self, x: Tensor, **given: Any) -> Tensor:
        self.builds.append(given)
        loss = loss_of(self.model, x, **given)
        loss.backward()
        return loss


def trained() -> tuple[list[Tensor], Any]:
    step = Step(model())
    losses = [
        step(part(x), **{name: part(value) if isinstance(value, Tensor) else value for name, value in given.items()})
        for x, given in zip(inputs(SIZES), GIVEN, strict=True)
    ]
    return losses, step.state_dict()["modules"]["model"]


def test_build_sees_them_as_they_are(pool: Pool) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    losses = [update_by(optimizer, loss_of(plain, x, **given)) for x, given in zip(inputs(SIZES), GIVEN, strict=True)]
    for found, state in pool.run(2, trained):
        torch.testing.assert_close(found, [one.detach() for one in losses], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-6, atol=1e-12)


def test_each_value_is_compiled_for_once_whatever_equals_it() -> None:
    step, (x,) = Step(model()), inputs([8])
    for power, builds in [(2, 1), (2.0, 2), (2, 2), (3, 3), (2.0, 3), (True, 4), (1, 5)]:
        step(x, mask=None, how={"power": power, "name": "mean"})
        assert len(step.builds) == builds


def test_one_that_changes_in_every_step_is_named() -> None:
    step, (x,) = Step(model()), inputs([8])
    for number in range(7):
        step(x, mask=None, how={"power": 1.0 + number / 8, "name": "mean"})
    with pytest.warns(UserWarning, match=r"for the 8th time .* has changed: input how\['power'\]\n.*as a tensor"):
        step(x, mask=None, how={"power": 3.0, "name": "mean"})


def differs() -> str:
    step, (x,) = Step(model()), inputs([8])
    with pytest.raises(zg.RankMismatchError) as raised:
        step(part(x), mask=None, how={"power": 2 + zg.rank(), "name": "mean"})
    assert step.steps_done == 0
    return str(raised.value)


def test_one_that_differs_between_ranks_is_an_error_on_all(pool: Pool) -> None:
    for message in pool.run(2, differs):
        assert "in input how['power']" in message
        assert "rank 0: int 2" in message
        assert "rank 1: int 3" in message


def test_micro_batches_are_cut_from_tensors_alone() -> None:
    plain, made, (x,) = model(), model(), inputs([8])
    loss_of(plain, x, **GIVEN[0]).backward()
    step = Step(made)
    step.config.gradient_accumulation_steps = 2
    step(x, **GIVEN[0])
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - 0.01 * parameter.grad
        torch.testing.assert_close(step.state_dict()["modules"]["model"][name], expected, rtol=1e-12, atol=1e-12)
