"""A drawn number that is compared with 0 or 1 decides without being read, in graphs and in loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep


class Drops(nn.Module):
    """Skips its first layer where ``decide`` says so of a drawn number."""

    def __init__(self, decide: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.decide = nn.Linear(4, 4), nn.Linear(4, 4), decide

    def forward(self, x: Tensor) -> Tensor:
        skipped = bool(self.decide(torch.rand([])))
        return self.last(x if skipped else self.first(x)).square().mean()  # type: ignore[no-any-return]


KNOWN = {
    "less than 0": lambda drawn: drawn < 0.0,
    "at most -1": lambda drawn: drawn <= -1,
    "at least 1": lambda drawn: drawn >= 1.0,
    "more than 1": lambda drawn: drawn > 1,
    "less than 1": lambda drawn: drawn < 1.0,
    "at most 1": lambda drawn: drawn <= 1,
    "more than -1": lambda drawn: drawn > -1,
    "at least 0": lambda drawn: (drawn >= 0).item(),
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_a_comparison_that_is_the_same_for_every_draw_decides() -> None:
    for decide in KNOWN.values():
        model = Drops(decide)
        expected = model(X).detach()
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.testing.assert_close(step(X), expected)


def test_it_decides_in_a_loop() -> None:
    model = Drops(lambda drawn: drawn < 0.0)
    expected = model(X).detach()
    prepared, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = prepared(X)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize(
    "decide",
    [
        lambda drawn: drawn < 0.1,
        lambda drawn: drawn <= 0,
        lambda drawn: drawn > 0,
        lambda drawn: drawn.mul_(3) < 1,
        lambda drawn: (drawn < 1).logical_not_(),
        lambda drawn: drawn < float("nan"),
        lambda drawn: torch.randn([]) < 1,
    ],
)
def test_any_other_decision_reads_the_value(decide: Any) -> None:
    model = Drops(decide)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zg.CaptureError, match=r"read a tensor's value.*\n.*test_layer_drop"):
        step(X)
