"""A recorded function that reads values runs once more with them, without any framework."""

from __future__ import annotations

from collections.abc import Sequence
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


class Scheduled:
    """Computes a loss that depends on a counter, and reads it in some steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step = 0

    def compute_loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * (1 + 0.1 * self.step)
        if self.step >= 4:
            loss = loss + model(-x).mean()
        if self.step % 3 == 2:
            self.losses.append(loss.item())
        return loss


class Recorded(nn.Module):
    """The method as a module."""

    def __init__(self, model: nn.Module, readings: Readings) -> None:
        super().__init__()
        self.model, self.readings = model, readings

    def forward(self, x: Tensor, variant: int = 0, inputs: Sequence[Tensor] = ()) -> Any:
        return self.readings.traced(True, (self.model, x), {}, variant, inputs)


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
        variant = readings.variant(True, (model, x), {})
        loss, reads = recorded(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.calls == number, "tracing changes no attribute"
        log = readings.log_of(variant.number)
        assert log is not None
        readings.repeat(log, (model, x), {}, values_of(reads))
        assert trainer.calls == number + 1
    assert trainer.losses == pytest.approx(expected.losses, abs=1e-6)


def test_a_value_that_decides_what_is_computed_is_an_error() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings = Readings(Trainer(decides=True).compute_loss)
    _, recorded, _ = zg.prepare(model, Recorded(model, readings), optimizer)
    readings.variant(True, (model, torch.randn(4, 6)), {})
    with pytest.raises(zg.CaptureError, match="because of a value that was read"):
        recorded(torch.randn(4, 6))


def test_a_method_may_depend_on_what_changes_outside_of_it() -> None:
    plain, model = (nn.Linear(6, 2, dtype=torch.float64) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    trainer, expected = Scheduled(), Scheduled()
    readings = Readings(trainer.compute_loss)
    optimizer, plain_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    model, recorded, optimizer = zg.prepare(model, Recorded(model, readings), optimizer)
    numbers = []
    for step, x in enumerate(torch.randn(9, 4, 6, dtype=torch.float64).unbind()):
        trainer.step = expected.step = step
        expected.compute_loss(plain, x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        variant = readings.variant(True, (model, x), {})
        loss, reads = recorded(x, variant.number, variant.tensors(x.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log = readings.log_of(variant.number)
        if log is not None and not variant.is_done:
            readings.repeat(log, (model, x), {}, values_of(reads), variant.inputs)
        numbers.append(variant.number)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
    assert trainer.losses == pytest.approx(expected.losses, rel=1e-12)
    assert numbers == [0, 1, 2, 2, 3, 4, 4, 4, 4], "each is compiled once"


def test_to_move_a_tensor_to_the_device_of_another_is_no_other_computation() -> None:
    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square()
        return loss.sum() / torch.tensor(8.0).to(loss.device)

    model = nn.Linear(6, 2)
    readings = Readings(compute_loss)
    _, recorded, optimizer = zg.prepare(model, Recorded(model, readings), torch.optim.SGD(model.parameters(), lr=0.1))
    numbers = []
    for x in torch.randn(2, 4, 6).unbind():
        numbers.append(readings.variant(True, (model, x), {}).number)
        recorded(x, numbers[-1])[0].backward()
        optimizer.step()
    assert numbers == [0, 0]
