"""``parameter.grad`` between ``engine.backward()`` and ``engine.step()`` is the whole batch's, and torch's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.compat.colossalai.loops import engine_of, gradients_of, train
from tests.harness import sliced
from tests.models import TokenLoss, batches, make, part
from tests.pool import Pool
from zerograph.compat import colossalai

X, Y = batches("mlp", 1)[0]


@pytest.fixture
def engine() -> colossalai.Engine:
    """An engine after ``backward()``."""
    engine = engine_of(make("mlp"))
    engine.backward(engine.criterion(engine(X), Y))
    return engine


def read(level: int, config: dict[str, Any]) -> list[list[Tensor]]:
    """Gradients at each update; the last are of two losses."""
    engine = engine_of(make("mlp"), zero={"level": level, "static_loss_scale": 256}, **config)
    found = []
    for number, (x, y) in enumerate(batches("mlp", 3)):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        if number == 2:
            assert next(engine.model.parameters()).grad is not None
            engine.backward(engine.criterion(engine(part(x)), part(y)).square())
        found.append(gradients_of(engine))
        engine.step()
    return found


@sliced("level, config", [(3, {})], [(1, {"fp16": None})])
def test_gradients_read_are_those_of_the_whole_batch(pool: Pool, level: int, config: dict[str, Any]) -> None:
    half = bool(config)
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = pool.run(2, read, level, config)
    for number, ((x, y), gradients, others) in enumerate(zip(batches("mlp", 3), first, second, strict=True)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss + loss.square() if number == 2 else loss).backward()
        for parameter, gradient, other in zip(model.parameters(), gradients, others, strict=True):
            assert torch.equal(gradient, other)
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(gradient, parameter.grad, **tolerance)
        optimizer.step()


def test_reading_changes_no_number() -> None:
    data = batches("mlp", 3)
    plain, looked = engine_of(make("mlp")), engine_of(make("mlp"))
    wanted = train(plain, data)
    losses = []
    for x, y in data:
        looked.zero_grad()
        loss = looked.criterion(looked(x), y)
        looked.backward(loss)
        assert float(nn.utils.get_total_norm([p.grad for p in looked.model.parameters()])) > 0
        looked.step()
        losses.append(loss.item())
    assert losses == wanted


def edit(model: nn.Module, order: float) -> float:
    """Clip gradients by a norm of this order, and drop one of them; return the norm."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order))
    next(model.parameters()).grad = None
    return norm


def edited(order: float) -> tuple[list[float], dict[str, Tensor]]:
    engine, norms = engine_of(make("mlp"), zero={"level": 3}), []
    for x, y in batches("mlp", 3):
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        norms.append(edit(engine.model, order))
        engine.step()
    return norms, engine.state_dict()["modules"]["model"]


@sliced("order", [3.0, math.inf], [2.0])
def test_the_update_uses_gradients_as_the_loop_has_changed_them(pool: Pool, order: float) -> None:
    """ColossalAI's test_zero_gradient_clippling, by torch's function."""
    model, wanted = make("mlp"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches("mlp", 3):
        optimizer.zero_grad()
        TokenLoss()(model(x), y).backward()
        wanted.append(edit(model, order))
        optimizer.step()
    for norms, state in pool.run(2, edited, order):
        assert norms == pytest.approx(wanted, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_zero_grad_of_the_optimizer_is_the_engines(engine: colossalai.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    assert next(engine.model.parameters()).grad is None
    with pytest.raises(zg.InputError, match=r"engine\.backward\(loss\) before"):
        engine.step()


def test_zero_grad_of_the_model_clears_gradients(engine: colossalai.Engine) -> None:
    engine.model.zero_grad()
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_the_step_clears_gradients(engine: colossalai.Engine) -> None:
    assert next(engine.model.parameters()).grad is not None
    assert engine.step()
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_gradients_of_plain_backward_and_copies_are_torchs_own(engine: colossalai.Engine) -> None:
    """Whole parameters lent to the user, and deep copies, act as plain PyTorch's."""
    engine.step()
    with engine.full_parameters():
        nn.functional.cross_entropy(engine.model(X), Y).backward()
        assert type(next(engine.model.parameters()).grad) is Tensor
        twin = copy.deepcopy(engine.model)
        engine.model.zero_grad()
    nn.functional.cross_entropy(twin(X), Y).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
