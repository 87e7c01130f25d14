"""Accumulation as in OneFlow: the mean of the micro-batches' gradients, whatever the loss reduces with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.harness import sliced
from tests.pool import Pool
from zerograph.compat.oneflow import nn

ROWS, STEPS, COUNT = 16, 2, 4
functional: Any = nn.functional


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 5).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (ROWS,), generator=generator)


def twice(model: Any, x: Tensor, y: Tensor) -> Tensor:
    functional.cross_entropy(model(x), y, reduction="sum").backward()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def in_place(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total = model(x)[:, 0].sum()
    total += model(x)[:, 1].square().sum()
    total *= 3.0
    total.backward()
    return total


def each(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def both(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x), y)
        value.backward()
        return value

    return both


# What build() does, in words that hold for a micro-batch as for the whole: OneFlow's builds see micro-batches.
LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sum": each(lambda out, y: out.sum()),
    "sum of squares of every row": each(lambda out, y: out.square().sum(dim=1).sum()),
    "sum over the rows, then the rest": each(lambda out, y: out.square().sum(0).mean()),
    "cross entropy, sum": each(lambda out, y: functional.cross_entropy(out, y, reduction="sum")),
    "squared error, sum, scaled": each(
        lambda out, y: 0.5 * functional.mse_loss(out, out.detach() + 1, reduction="sum")
    ),
    "sum over a number": each(lambda out, y: out.square().sum() / 10.0),
    "two sums": each(lambda out, y: out.sum() - 2 * out.square().sum()),
    "mean": each(lambda out, y: out.square().mean()),
    "cross entropy": each(lambda out, y: functional.cross_entropy(out, y)),
    "sum over the rows' number": each(lambda out, y: out.square().sum() / out.shape[0]),
    "sum times one over the number": each(lambda out, y: out.square().sum() * (1.0 / out.numel())),
    "rows over their number": each(lambda out, y: (out.square() / len(out)).sum()),
    "columns before rows": each(lambda out, y: (out.T.reshape(-1, 1) @ out.new_ones(1, 3) + out.new_ones(3)).mean()),
    "mean of as many features as rows, sum": each(lambda out, y: (out[:, :1].expand(-1, ROWS).square()).mean(1).sum()),
    "sum of products": each(lambda out, y: torch.einsum("bi,bi->", out, out)),
    "sum over the number of some rows": each(lambda out, y: (out[:, 0] * (y > -1)).sum() / (y > -1).sum().clamp(min=1)),
    "sum over a counted sum": each(lambda out, y: out.square().sum() / torch.ones_like(out[:, 0]).sum()),
    "mean and a penalty": each(lambda out, y: out.square().mean() + 0.1 * out.mean()),
    "a sum and a mean, one by one": twice,
    "sums in place": in_place,
}


class Step(nn.Graph):
    def __init__(self, model: Any, loss: Callable[..., Tensor], stage: int = 0, count: int = COUNT) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.add_optimizer(flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        self.config.set_gradient_accumulation_steps(count)
        self.config.backend = "eager"
        if stage:
            self.config.enable_zero(True, stage=stage, shard_min_size=1)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model, x, y)


def trained(name: str, stage: int = 0) -> dict[str, Tensor]:
    model = linear()
    graph = Step(model, LOSSES[name], stage)
    x, y = (one.chunk(flow.env.get_world_size())[flow.env.get_rank()] for one in batch())
    for _ in range(STEPS):
        graph(x, y)
    state: dict[str, Tensor] = model.state_dict()
    return state


def upstreams(name: str) -> dict[str, Tensor]:
    """OneFlow's: the loss of each micro-batch, and the mean of its gradients."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(one.chunk(COUNT) for one in batch()), strict=True):
            LOSSES[name](model, x, y)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= COUNT
        optimizer.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


@sliced("name", list(LOSSES)[::2], LOSSES)
def test_gradients_are_the_mean_of_the_micro_batches(name: str) -> None:
    torch.testing.assert_close(dict(trained(name)), dict(upstreams(name)), rtol=1e-10, atol=1e-12)


def on_two_ranks() -> dict[int, dict[str, Tensor]]:
    return {stage: trained("cross entropy, sum", stage) for stage in (1, 3)}


def test_a_sum_on_two_ranks_is_divided_by_the_micro_batches_alone(pool: Pool) -> None:
    for stage in pool.run(2, on_two_ranks)[1].values():
        torch.testing.assert_close(dict(stage), dict(upstreams("cross entropy, sum")), rtol=1e-10, atol=1e-12)


def test_without_accumulation_a_sum_is_the_sum() -> None:
    model, plain = linear(), linear()
    Step(model, LOSSES["sum"], count=1)(*batch())
    plain(batch()[0]).sum().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.01 * parameter.grad
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-14)


def mixed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = 2 * (model(x).sum() + functional.cross_entropy(model(x), y))
    loss.backward()
    return loss


def measured(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach() + model(x).argmax(dim=1).eq(y).sum()


def test_a_sum_added_to_a_mean_is_refused_before_anything_changes() -> None:
    model = linear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = Step(model, mixed)
    with pytest.raises(zg.CaptureError, match="adds a sum over the batch to a value that is no sum") as problem:
        graph(*batch())
    assert "test_accumulation.py" in str(problem.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # What is no loss may add what it likes.
    Step(linear(), measured)(*batch())
    # Without accumulation there is nothing to tell apart.
    Step(linear(), mixed, count=1)(*batch())


@pytest.mark.parametrize(("name", "factor"), [("sum over the rows' number", 1.0), ("sum", 1 / COUNT)])
def test_unequal_micro_batches_are_those_of_the_whole_and_a_sum_is_divided_by_their_number(
    name: str, factor: float
) -> None:
    model, plain = linear(), linear()
    graph = Step(model, LOSSES[name])
    for rows in (16, 6, 3):
        x, y = (one[:rows] for one in batch())
        graph(x, y)
        plain.zero_grad()
        LOSSES[name](plain, x, y)
        with torch.no_grad():
            for parameter in plain.parameters():
                momentum = 0.9 * getattr(parameter, "momentum", 0.0) + factor * parameter.grad
                parameter.momentum = momentum
                parameter -= 0.01 * momentum
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
