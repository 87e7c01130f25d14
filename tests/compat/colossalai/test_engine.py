"""The engine's loop trains as plain PyTorch does on whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.compat.colossalai.loops import engine_of, train, train_plainly
from tests.harness import sliced
from tests.models import batches, make, part, update_by
from tests.pool import Pool
from zerograph.compat import colossalai


def trained(name: str, level: int, **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(make(name), zero={"level": level} if level else None, **config)
    losses = train(engine, batches(name, 4))
    return losses, engine.state_dict()["modules"]["model"]


@sliced("name, level", [("mlp", 3)], [("conv", 1)])
def test_the_loop_trains_as_plain_pytorch_on_whole_batches(pool: Pool, name: str, level: int) -> None:
    model = make(name)
    wanted = train_plainly(model, batches(name, 4))
    for losses, state in pool.run(2, trained, name, level):
        assert losses == pytest.approx(wanted, rel=1e-4)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def with_dropout() -> list[list[float]]:
    found = []
    for level in (0, 3):
        torch.manual_seed(zg.rank())
        model = nn.Sequential(make("mlp"), nn.Dropout())
        engine = engine_of(model, zero={"level": level} if level else None, seed=7)
        found.append(train(engine, batches("mlp", 4)))
    return found


def test_the_seed_of_the_configuration_decides_what_dropout_draws(pool: Pool) -> None:
    (first, *rest), others = pool.run(2, with_dropout)
    assert rest == [first]
    assert others == [first, first]


def evaluated() -> tuple[Tensor, float, Any]:
    engine = engine_of(make("conv"), zero={"level": 3})
    data = batches("conv", 2)
    train(engine, data)
    engine.eval()
    (x, y), *_ = data
    for _ in range(2):
        out = engine(part(x))
        loss = engine.criterion(out, part(y))
        assert not out.requires_grad
        assert not loss.requires_grad
    return out.full_tensor(), loss.item(), engine.model.training


def test_in_evaluation_results_are_those_of_the_whole_batch_without_history(pool: Pool) -> None:
    model = make("conv")
    train_plainly(model, batches("conv", 2))
    (x, y), *_ = batches("conv", 2)
    wanted = model.eval()(x).detach()
    for out, loss, training in pool.run(2, evaluated):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(F.cross_entropy(wanted, y).item(), rel=1e-4)
        assert not training


def read_by_one() -> float:
    engine = engine_of(make("mlp"))
    for x, y in batches("mlp", 2):
        loss = engine.criterion(engine(part(x)), part(y))
        engine.backward(loss)
        engine.step()
    if zg.rank() == 0:
        print(engine)
        return loss.item()
    return 0.0


def test_one_rank_may_print_the_loss_and_the_engine_alone(pool: Pool) -> None:
    wanted = train_plainly(make("mlp"), batches("mlp", 2))
    assert pool.run(2, read_by_one)[0] == pytest.approx(wanted[-1], rel=1e-5)


class Scaled(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out * self.scale, y)


def test_a_criterions_parameters_are_trained_with_the_model() -> None:
    model, criterion, twin, other = make("mlp"), Scaled(), make("mlp"), Scaled()
    config = {"optimizer": {"type": "SGD", "lr": 0.1}}
    engine, *_ = colossalai.initialize(model, criterion=criterion, config=config, verbose=False)
    data = batches("mlp", 3)
    losses = train(engine, data)
    optimizer = torch.optim.SGD([*twin.parameters(), *other.parameters()], lr=0.1)
    for (x, y), loss in zip(data, losses, strict=True):
        wanted = update_by(optimizer, other(twin(x), y))
        assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_schedulers_are_stepped_by_the_loop() -> None:
    model, twin = make("mlp"), make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, _, _, scheduler = colossalai.initialize(model, optimizer, lr_scheduler=schedule, config={}, verbose=False)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    for number, (x, y) in enumerate(batches("mlp", 4)):
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        scheduler.step()
        plain.param_groups[0]["lr"] = 0.5 * 0.5**number
        wanted = update_by(plain, F.cross_entropy(twin(x), y))
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert scheduler.get_last_lr() == [0.5**5]


def test_a_skipped_update_says_so() -> None:
    config = {"zero": {"level": 1, "static_loss_scale": 2.0**30}}
    model = make("mlp")
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, verbose=False)
    (x, y), *_ = batches("mlp", 1)
    engine.backward(F.cross_entropy(engine(x), y))
    assert engine.step() is False
    assert engine.graph.steps_done == 0


class Pairs(nn.Module):
    """Compares all samples of the batch with each other, as contrastive losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) @ self.right(x).T


def diagonal(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def contrasted() -> tuple[list[float], Any]:
    torch.manual_seed(0)
    engine = engine_of(Pairs(), diagonal)
    losses = []
    for x, _ in batches("mlp", 3):
        scores = engine(part(x))
        loss = engine.criterion(scores)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, scores.shape


def test_model_and_criterion_see_the_whole_batch(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = [update_by(optimizer, diagonal(model(x))).item() for x, _ in batches("mlp", 3)]
    for losses, shape in pool.run(2, contrasted):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert shape == (8, 8)
