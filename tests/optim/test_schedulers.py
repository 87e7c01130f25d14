"""Schedulers of torch.optim, stepped by the graph: learning rates and parameters are those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerograph as zg
from tests.harness import sliced
from tests.models import LossStep, TokenLoss, part, update_by
from tests.pool import Pool

STEPS = 8


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.ExponentialLR(optimizer, 0.8)], [3])


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "sequential": _sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, base_momentum=0.5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.05),
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(STEPS)
    ]


class Step(LossStep):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        super().__init__(model, optimizer, 2, scheduler=scheduler)

    def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = self.model(x)
        loss = TokenLoss()(out, y)
        loss.backward()
        # The metric is the first 0-d tensor, wherever it stands.
        return out, loss


def trained(name: str, steps: int = STEPS) -> tuple[list[float], Tensor]:
    model, optimizer = make()
    step = Step(model, optimizer, SCHEDULERS[name](optimizer))
    rates = []
    for x, y in data()[:steps]:
        rates.append(optimizer.param_groups[0]["lr"])
        step(part(x), part(y))
    return rates, step.state_dict()["modules"]["model"]["weight"]


def plainly(name: str) -> tuple[list[float], Tensor]:
    model, optimizer = make()
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for x, y in data():
        rates.append(optimizer.param_groups[0]["lr"])
        loss = update_by(optimizer, TokenLoss()(model(x), y))
        scheduler.step(*([loss.item()] if name == "plateau" else []))
    return rates, model.weight.detach()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_stepped_as_in_plain_pytorch(name: str) -> None:
    rates, weight = trained(name)
    wanted, wanted_weight = plainly(name)
    assert len(set(wanted)) > 1
    assert rates == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(weight, wanted_weight, rtol=1e-11, atol=1e-12)


def test_a_plateau_is_the_same_on_all_ranks(pool: Pool) -> None:
    wanted, wanted_weight = plainly("plateau")
    for rates, weight in pool.run(2, trained, "plateau"):
        assert rates == pytest.approx(wanted, rel=1e-12)
        torch.testing.assert_close(weight, wanted_weight, rtol=1e-11, atol=1e-12)


class Silent(Step):
    def build(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().build(x, y)[0]


def test_a_plateau_needs_a_metric() -> None:
    model, optimizer = make()
    step = Silent(model, optimizer, SCHEDULERS["plateau"](optimizer))
    with pytest.raises(zg.CaptureError, match="first 0-d tensor that build"):
        step(*data()[0])
    assert step.steps_done == 0
    assert type(model.weight) is nn.Parameter


def compiled(name: str, kind: Any, **options: Any) -> tuple[int, Tensor, Tensor]:
    """How many steps were compiled while a scheduler or the user changes numbers, and the weights, ours and plain."""
    counts, weights = 0, []
    for plain in (False, True):
        model, _ = make()
        optimizer = kind(model.parameters(), lr=0.05, **options)
        scheduler = SCHEDULERS[name](optimizer) if name in SCHEDULERS else None
        step = None if plain else Step(model, optimizer, scheduler)
        for index, (x, y) in enumerate(data()):
            if name not in SCHEDULERS:
                optimizer.param_groups[0][name] = 0.1 + index / 10
            if step is not None:
                before = step._latest
                step(x, y)
                counts += step._latest is not before
                continue
            update_by(optimizer, TokenLoss()(model(x), y))
            if scheduler is not None:
                scheduler.step()
        weights.append(model.weight.detach() if step is None else step.state_dict()["modules"]["model"]["weight"])
    return counts, weights[0], weights[1]


@pytest.mark.filterwarnings("ignore:step 8 is compiled for the 8th time")
@sliced(
    "name, kind, options, compiles",
    [
        ("onecycle", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 1),
        ("onecycle", torch.optim.AdamW, {"amsgrad": True}, 1),
        ("onecycle", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, 1),
        ("weight_decay", torch.optim.AdamW, {}, 2),
        ("momentum", torch.optim.Muon, {}, 2),
    ],
    [
        ("weight_decay", torch.optim.Muon, {}, 2),
        ("weight_decay", torch.optim.Adafactor, {}, 2),
        # Multiplied with another number before it meets a tensor: stays a constant, compiled each time.
        ("d", torch.optim.Adafactor, {}, STEPS),
    ],
)
def test_a_hyperparameter_that_changes_becomes_an_input(name: str, kind: Any, options: Any, compiles: int) -> None:
    count, weight, wanted = compiled(name, kind, **options)
    torch.testing.assert_close(weight, wanted, rtol=1e-10, atol=1e-12)
    assert count == compiles


def test_a_hyperparameter_that_crosses_a_threshold_compiles_anew() -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    plain_model, _ = make()
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1, weight_decay=0.1)
    step = Step(model, optimizer, None)
    seen = set()
    for (x, y), decay in zip(data(), [0.1, 0.2, 0.3, 0.0, 0.4, 0.0, 0.5], strict=False):
        optimizer.param_groups[0]["weight_decay"] = plain.param_groups[0]["weight_decay"] = decay
        step(x, y)
        seen.add(step._latest)
        update_by(plain, TokenLoss()(plain_model(x), y))
    torch.testing.assert_close(step.state_dict()["modules"]["model"]["weight"], plain_model.weight.detach())
    # A constant first, then an input, and without the decay's own operators where it is 0.
    assert len(seen) == 3
