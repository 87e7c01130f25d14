"""``parameter.grad`` between ``engine.backward()`` and ``engine.step()`` is that of the whole batch, read-only."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.compat.colossalai.loops import engine_of, train
from tests.models import batches, make, part
from tests.pool import Pool
from zerograph.compat import colossalai

X, Y = batches("mlp", 1)[0]


@pytest.fixture
def engine() -> Iterator[colossalai.Engine]:
    """An engine after ``backward()``."""
    engine = engine_of(make("mlp"))
    engine.backward(engine.criterion(engine(X), Y))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a gradient was read before")
        yield engine


def read(level: int, config: dict[str, Any]) -> tuple[list[list[Tensor]], list[float]]:
    """Gradients at each update, and losses; the last gradients are of two losses."""
    model = make("mlp")
    engine = engine_of(model, zero={"level": level, "static_loss_scale": 256}, **config)
    found, losses = [], []
    for number, (x, y) in enumerate(batches("mlp", 3)):
        engine.zero_grad()
        loss = engine.criterion(engine(part(x)), part(y))
        engine.backward(loss)
        if number == 2:
            assert next(model.parameters()).grad is not None
            engine.backward(loss.square())
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        engine.step()
        losses.append(loss.item())
    return found, losses


@pytest.mark.parametrize(("level", "config"), [(3, {}), (1, {"fp16": None})])
def test_gradients_read_are_those_of_the_whole_batch(pool: Pool, level: int, config: dict[str, Any]) -> None:
    half = bool(config)
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = pool.run(2, read, level, config)
    for number, ((x, y), gradients, others) in enumerate(zip(batches("mlp", 3), first[0], second[0], strict=True)):
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


@functools.cache
def unread() -> dict[str, Tensor]:
    """The model after one update whose gradients nobody read."""
    plain = engine_of(make("mlp"))
    train(plain, [(X, Y)])
    found: dict[str, Tensor] = plain.state_dict()["modules"]["model"]
    return found


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "grad.data.clamp_": lambda model: [p.grad.data.clamp_(-1, 1) for p in model.parameters()],
    "a view of grad": lambda model: next(model.parameters()).grad.view(-1)[:2].zero_(),
    "grad[...] = 0": lambda model: next(model.parameters()).grad.__setitem__(0, 0),
    "grad *= 2": lambda model: next(model.parameters()).grad.__imul__(2),
    "out=": lambda model: torch.mul(next(model.parameters()), 2, out=next(model.parameters()).grad),
    "grad = value": lambda model: setattr(next(model.parameters()), "grad", torch.zeros(16, 7)),
    "grad = None": lambda model: setattr(next(model.parameters()), "grad", None),
    "del grad": lambda model: delattr(next(model.parameters()), "grad"),
    "a part's zero_grad": lambda model: next(model.children()).zero_grad(),
}


@pytest.mark.parametrize("name", WRITES)
def test_changing_a_gradient_is_refused_on_its_line_and_changes_nothing(engine: colossalai.Engine, name: str) -> None:
    with pytest.raises(zg.CaptureError, match=r"engine\.(step|zero_grad)\(\)") as caught:
        WRITES[name](engine.model)
    assert "test_gradients.py:" in str(caught.value)
    engine.step()
    found = engine.state_dict()["modules"]["model"]
    assert all(torch.equal(found[name], value) for name, value in unread().items())


def test_an_array_of_a_gradient_cannot_be_written(engine: colossalai.Engine) -> None:
    with pytest.raises(ValueError, match="read-only"):
        next(engine.model.parameters()).grad.numpy().fill(0)


@pytest.mark.parametrize("owner", ["model", "optimizer"])
def test_zero_grad_of_model_or_optimizer_is_the_engines(engine: colossalai.Engine, owner: str) -> None:
    getattr(engine, owner).zero_grad()
    assert next(engine.model.parameters()).grad is None
    with pytest.raises(zg.InputError, match=r"engine\.backward\(loss\) before"):
        engine.step()


def test_a_gradient_read_after_the_step_is_warned_of() -> None:
    engine = engine_of(make("mlp"))
    train(engine, [(X, Y)])
    with pytest.warns(UserWarning, match=r"None after engine\.step\(\)") as seen:
        assert next(engine.model.parameters()).grad is None
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.optimizer.zero_grad()
        engine.zero_grad()
        assert next(engine.model.parameters()).grad is None


def accumulated() -> tuple[list[Tensor], str]:
    """Gradients before an update's last call makes it, and the error of reading them after its first."""
    engine = engine_of(make("mlp"), zero={"level": 3, "gradient_accumulation_steps": 2})
    error = ""
    for x, y in batches("mlp", 2):
        engine.optimizer.zero_grad()
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        if not error:
            with pytest.raises(zg.InputError) as caught:
                next(engine.model.parameters()).grad  # noqa: B018
            error = str(caught.value)
            engine.step()
    gradients = [parameter.grad.clone() for parameter in engine.model.parameters()]
    assert engine.step()
    return gradients, error


def test_with_accumulation_the_gradient_is_the_updates_and_read_at_its_last_call(pool: Pool) -> None:
    model = make("mlp")
    for x, y in batches("mlp", 2):
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
    for gradients, error in pool.run(2, accumulated):
        assert "after 1 of the 2 calls" in error
        assert "test_gradients.py:" in error
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


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
