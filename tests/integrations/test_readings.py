"""A recorded function that reads values runs once more with them, without any framework."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from zerograph.integrations.readings import Readings
from zerograph.loops.deferred import values_of


class Trainer:
    """Computes a loss and keeps numbers of it, as trainers do."""

    def __init__(self, decides: bool = False) -> None:
        self.losses: list[float] = []
        self.calls, self.decides = 0, decides

    def compute_loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        self.calls += 1
        self.losses.append(loss.item() + (1.0 if (x > 0).sum() > 0 else 0.0))
        return 2 * loss if self.decides and loss.item() > 0.5 else loss


class Recorded(nn.Module):
    """The method as a module."""

    def __init__(self, model: nn.Module, readings: Readings) -> None:
        super().__init__()
        self.model, self.readings = model, readings

    def forward(self, x: Tensor) -> Any:
        return self.readings.traced(True, (self.model, x), {})


def test_what_a_method_collects_is_there_after_the_step() -> None:
    batches = torch.randn(3, 4, 6).unbind()
    plain = nn.Linear(6, 2)
    model = nn.Linear(6, 2)
    model.load_state_dict(plain.state_dict())
    trainer, expected = Trainer(), Trainer()
    readings = Readings(trainer.compute_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, recorded, optimizer = zg.prepare(model, Recorded(model, readings), optimizer)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, x in enumerate(batches):
        expected.compute_loss(plain, x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        loss, reads = recorded(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.calls == number, "tracing changes no attribute"
        log = readings.log_of(True, (model, x), {}, 1)
        assert log is not None
        readings.repeat(log, (model, x), {}, values_of(reads))
        assert trainer.calls == number + 1
    assert trainer.losses == pytest.approx(expected.losses, abs=1e-6)


def test_a_value_that_decides_what_is_computed_is_an_error() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings = Readings(Trainer(decides=True).compute_loss)
    _, recorded, _ = zg.prepare(model, Recorded(model, readings), optimizer)
    with pytest.raises(zg.CaptureError, match="because of a value that was read"):
        recorded(torch.randn(4, 6))
