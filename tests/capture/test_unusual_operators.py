"""Operators that a graph has in a form of its own, or refuses: compared with plain PyTorch, on two ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, Predict, mean_of_squares, sliced
from tests.models import part, update_by
from tests.pool import Pool
from zerograph.ir.mesh import line

aten = torch.ops.aten
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Step(LossStep):
    def build(self, *batch: Tensor) -> Tensor:
        loss = super().build(*batch)
        if isinstance(self.model, Complex):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class Sparse(nn.Module):
    """An embedding and bags whose gradients are sparse tensors in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)
        self.bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(x) + self.bags(x[:, None].expand(-1, 2))), y)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x.to(torch.complex64) @ self.weight).abs() + self.bias, y)


class Averaging(nn.Module):
    """Batch norm whose statistics are the means over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


class Counting(nn.Module):
    """A loss whose classes weigh less the more often they occur in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        counts, sums = torch.bincount(y, minlength=3), y.bincount(x[:, 0].abs(), minlength=3)
        return F.cross_entropy(self.head(x), y, weight=1 / (counts + sums + 1))


class Masked(nn.Module):
    """Rows that a mask selects get a value, as do those that an index names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.head(x).clone()
        hidden[y > 0] = 0.5
        return F.cross_entropy(hidden.index_add(0, y, self.head(x)), y)


class Scattered(nn.Module):
    """Rows under a mask take rows of others in order, as embeddings of images take the places of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.images = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.head(x).masked_scatter((y > 0)[:, None].expand(-1, 3), self.images(x))
        return F.cross_entropy(hidden, y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


CASES: dict[str, tuple[Callable[[], nn.Module], Optimizer]] = {
    "sparse embedding, SGD": (Sparse, sgd),
    "sparse embedding, Adagrad": (Sparse, adagrad),
    "norm of complex gradients": (Complex, sgd),
    "batch norm without momentum": (Averaging, sgd),
    "bincount": (Counting, sgd),
    "masks": (Masked, sgd),
    "masked_scatter": (Scattered, sgd),
}


# Losses, and the state of the model.
Outcome = tuple[list[float], dict[str, Tensor]]


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (8,), generator=generator)
    x = torch.randint(0, 10, (8,), generator=generator)
    return (x if isinstance(model, Sparse) else torch.randn(8, 4, generator=generator)), y


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    clip = 0.1 if isinstance(model, Complex) else None
    losses = [update_by(optimizer, model(*batch(model)), clip).item() for _ in range(3)]
    return losses, dict(model.state_dict())


def both(stage: int) -> dict[str, tuple[Outcome, Outcome]]:
    """For each case what a graph computes, and plain PyTorch."""
    outcomes = {}
    for title, (make, optimizer) in CASES.items():
        torch.manual_seed(0)
        model = make()
        step = Step(own := copy.deepcopy(model), optimizer(own), stage)
        x, y = batch(model)
        losses = [step(part(x), part(y)).item() for _ in range(3)]
        outcomes[title] = (losses, step.state_dict()["modules"]["model"]), plainly(model, optimizer(model))
    return outcomes


@sliced("stage", [3], [1])
def test_a_graph_computes_what_plain_pytorch_does(pool: Pool, stage: int) -> None:
    for outcomes in pool.run(2, both, stage):
        for title, ((losses, state), (expected, wanted)) in outcomes.items():
            assert losses == pytest.approx(expected, rel=1e-5), title
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=f"{title}: {name}")


class Constant(zg.ZeroGraph):
    def __init__(self, constant: object) -> None:
        super().__init__()
        self.constant = constant

    def build(self) -> object:
        return torch.ones(3) if self.constant is None else self.constant


def test_a_graph_without_inputs_and_parameters() -> None:
    assert torch.equal(Constant(None)(), torch.ones(3))
    assert Constant(3)() == 3


def test_a_value_beyond_the_bins_is_an_error() -> None:
    step = Predict(nn.Linear(4, 3), lambda model, x: torch.bincount(x.flatten(), minlength=3))
    assert step(torch.tensor([[0, 2, 2]])).tolist() == [1, 0, 2]
    with pytest.raises(zg.OperatorError, match="look at the values"):
        step(torch.tensor([[0, 2, 3]]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model, x: model(x)[x[:, 0] > 0].mean(), ["torch.where", "mask.sum()"]),
        (lambda model, x: model(x[torch.where(x[:, 0] > 0)[0]]), ["weighted by the router", "batched_mm"]),
        (lambda model, x: torch.bincount(x[:, 0].long()), ["minlength=n"]),
        (lambda model, x: torch.unique(x), ["minlength=n", "outside build()"]),
    ],
)
def test_shapes_that_depend_on_values_are_refused_with_advice_that_fits(
    call: Callable[[nn.Module, Tensor], Tensor], words: list[str]
) -> None:
    with pytest.raises(zg.CaptureError, match="whose shape depends on values") as refused:
        Predict(nn.Linear(4, 3), call)(torch.randn(4, 4))
    for word in words:
        assert word in str(refused.value)


def test_group_norm_behind_a_frozen_layer_has_this_ranks_number_of_samples() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False), nn.GroupNorm(2, 4))
    step = LossStep(model, torch.optim.SGD(model[1].parameters(), lr=0.1), loss=mean_of_squares)
    prepared = step.prepare(line(2, 0, "ranks"), torch.ones(3, 3, 8, 8))
    (node,) = prepared.emitted.find_nodes(op="call_function", target=aten.native_group_norm_backward.default)
    assert node.args[0].meta["val"].shape[0] == node.args[5] == 3


def test_masked_scatter_is_computed_on_shards() -> None:
    step = Step(model := Scattered(), sgd(model), 2)
    with warnings.catch_warnings(action="error"):
        text = step.prepare(line(2, 0, "ranks"), torch.ones(4, 4), torch.ones(4, dtype=torch.int64)).text()
    (where,) = [one for one in text.splitlines() if "where.self(" in one or (" where(" in one and "f32" in one)][:1]
    assert "S(0) (8, 3) -> (4, 3)" in where
