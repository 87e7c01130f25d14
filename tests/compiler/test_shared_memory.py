"""Members that share memory without being one tensor are refused; those that only lie beside each other are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Predict, Step, sliced
from tests.models import TrainStep, adamw, batches, make, part, update_by
from tests.pool import Pool


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def step_of(model: Pair) -> Step:
    return Step(model, lambda model, x: model(x).square().mean())


def tied_by_data(model: Pair) -> None:
    model.b.weight.data = model.a.weight.data


def turned(model: Pair) -> None:
    model.b.weight.data = model.a.weight.data.t()


def part_of_another(model: Pair) -> None:
    model.b.bias.data = model.a.weight.data[2]


def buffer(model: Pair) -> None:
    model.b.register_buffer("row", model.a.weight.detach()[0])


def column_across(model: Pair) -> None:
    model.b.register_buffer("column", model.a.weight.detach()[:, 1])


def slices(model: Pair) -> None:
    flat = torch.randn(32)
    model.a.weight.data, model.b.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)


def interleaved(model: Pair) -> None:
    both = torch.randn(4, 8)
    model.a.weight.data, model.b.weight.data = both[:, :4], both[:, 4:]


def frozen(model: Pair) -> None:
    model.a.bias.requires_grad_(False)
    model.b.register_buffer("offset", model.a.bias.detach())


@pytest.mark.parametrize("shares", [tied_by_data, turned, part_of_another, buffer, column_across])
def test_memory_shared_with_a_trained_parameter_is_refused(shares: Callable[[Pair], None]) -> None:
    model = Pair()
    shares(model)
    step = step_of(model)
    with pytest.raises(zg.ConfigError, match=r"model\.a\.weight and model\.b\.\w+ share memory"):
        step(torch.ones(2, 4))


class Counted(nn.Module):
    """Two buffers, of which one is a part of the other; a call adds to this one."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("first", self.sums[:2])
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.sums += x.mean(0)
        return x.mean() + self.first.sum()


def test_memory_shared_with_a_written_buffer_is_refused() -> None:
    x = torch.ones(2, 4)
    torch.testing.assert_close(Predict(Counted(False))(x), torch.tensor(1.0))
    with pytest.raises(zg.ConfigError, match=r"model\.sums and model\.first share memory"):
        Predict(Counted(True))(x)


class Reading(nn.Module):
    """Reads a row of its weight through a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows = [self.layer.weight.detach()[1]]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rows[0]


def test_memory_that_a_step_shares_with_a_trained_parameter_is_refused() -> None:
    step = Step(Reading(), lambda model, x: model(x).square().mean())
    with pytest.raises(zg.ConfigError, match=r"model\.layer\.weight and a tensor that .*:\d+ reads share memory"):
        step(torch.ones(2, 4))


def read_in_a_loop() -> None:
    model = Reading()
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    update_by(optimizer, model(torch.ones(2, 4)).square().mean())
    with pytest.raises(zg.ConfigError, match=r"layer\.weight and a tensor that .*:\d+ reads share memory"):
        model(torch.ones(2, 4))


def test_memory_that_a_call_of_a_loop_shares_with_a_trained_parameter_is_refused(pool: Pool) -> None:
    pool.run(2, read_in_a_loop)


def read_frozen() -> list[float]:
    model = nn.Sequential(Reading().requires_grad_(False), nn.Linear(4, 1))
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    losses = [model(torch.ones(2, 4)).square().mean() for _ in range(2)]
    update_by(optimizer, losses[-1])
    return [loss.item() for loss in (*losses, model(torch.ones(2, 4)).square().mean())]


def test_memory_that_a_call_of_a_loop_shares_with_a_frozen_parameter_is_not(pool: Pool) -> None:
    for first, second, after in pool.run(2, read_frozen):
        assert first == second != after


@pytest.mark.parametrize("shares", [slices, interleaved, frozen])
def test_memory_that_nothing_changes_for_two_is_not(shares: Callable[[Pair], None]) -> None:
    model, plain = Pair(), Pair()
    shares(model)
    shares(plain)
    plain.load_state_dict(model.state_dict())
    step = step_of(model)
    trained = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        step(torch.ones(2, 4))
        update_by(trained, plain(torch.ones(2, 4)).square().mean())
    torch.testing.assert_close(dict(step.state_dict()["modules"]["model"]), dict(plain.state_dict()))


def test_a_graph_that_only_predicts_reads_shared_memory() -> None:
    model = Pair()
    tied_by_data(model)
    x = torch.ones(2, 4)
    torch.testing.assert_close(Predict(model)(x), model(x).detach())


def trained_again(stage: int) -> int:
    """Parameters that graphs have laid into buckets are laid anew by others."""
    model = make("mlp")
    ((x, y),) = batches("mlp", 1)
    for again in (stage, 0, stage):
        TrainStep(model, adamw(model), again, backend="eager", bucket_size=256)(part(x), part(y))
    return again


@sliced("stage", [3], [0, 1])
def test_what_graphs_lay_end_to_end_is_no_shared_memory(pool: Pool, stage: int) -> None:
    assert pool.run(2, trained_again, stage) == [stage] * 2


def test_a_model_without_memory_shares_none() -> None:
    with torch.device("meta"):
        model = Pair()
    step = step_of(model)
    assert step.prepare(zg.mesh.line(2, 0, "ranks"), torch.ones(2, 4, device="meta")).graph is not None
