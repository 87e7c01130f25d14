"""With gradient accumulation k calls of the engine make one update, by the mean of their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zerograph as zg
from tests.compat.colossalai.loops import PLAIN, engine_of, gradients_of, train, train_plainly
from tests.models import TokenLoss, batches, make, part
from tests.pool import Pool
from zerograph.compat import colossalai

ACCUMULATED = {"zero": {"level": 2, "gradient_accumulation_steps": 3}}


def accumulated() -> tuple[list[float], dict[str, Tensor], list[bool]]:
    engine = engine_of(make("mlp"), **ACCUMULATED)
    data = batches("mlp", 6)
    losses = train(engine, data)
    updated = []
    for x, y in data[:3]:
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        updated.append(engine.step())
    return losses, engine.state_dict()["modules"]["model"], updated


def test_each_call_has_its_own_loss_and_every_kth_updates(pool: Pool) -> None:
    model = make("mlp")
    data = batches("mlp", 6)
    optimizer_losses = train_plainly(model, [*data, *data[:3]], calls=3)
    for losses, state, updated in pool.run(2, accumulated):
        assert losses == pytest.approx(optimizer_losses[:6], rel=1e-5)
        assert updated == [False, False, True]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def summed() -> list[list[Tensor]]:
    """Gradients after each call of an update, with a call of zero_grad() before each."""
    engine = engine_of(make("mlp"), zero={"level": 3, "gradient_accumulation_steps": 3})
    gradients = []
    for _ in range(2):
        for number, (x, y) in enumerate(batches("mlp", 3)):
            (engine.zero_grad if number % 2 else engine.optimizer.zero_grad)()
            engine.backward(engine.criterion(engine(part(x)), part(y)))
            gradients.append(gradients_of(engine))
            engine.step()
        assert all(parameter.grad is None for parameter in engine.model.parameters())
    return gradients


def test_gradients_are_the_sum_of_the_calls_since_the_update(pool: Pool) -> None:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = pool.run(2, summed)
    for number, (x, y) in enumerate([*batches("mlp", 3), *batches("mlp", 3)]):
        (TokenLoss()(model(x), y) / 3).backward()
        for mine, others, parameter in zip(first[number], second[number], model.parameters(), strict=True):
            assert torch.equal(mine, others)
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def test_the_calls_of_an_update_may_differ() -> None:
    engine, model = engine_of(make("mlp"), **ACCUMULATED), make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (x, y), rows in zip(batches("mlp", 3), (8, 3, 5), strict=True):
        engine.backward(engine.criterion(engine(x[:rows]), y[:rows]))
        updated = engine.step()
        (TokenLoss()(model(x[:rows]), y[:rows]) / 3).backward()
    assert updated
    optimizer.step()
    for name, value in engine.state_dict()["modules"]["model"].items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_a_state_is_loaded_between_updates_only() -> None:
    engine = engine_of(make("mlp"), gradient_accumulation=2)
    (x, y), *_ = batches("mlp", 1)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    with pytest.raises(zg.InputError, match=r"load_state_dict\(\) after 1 of the 2 calls"):
        engine.load_state_dict({})


def test_the_loader_ends_with_whole_updates_and_the_schedule_counts_them() -> None:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    loader = DataLoader(TensorDataset(*batches("mlp", 1, size=28)[0]), batch_size=4)
    engine, batched, test, schedule = colossalai.initialize(
        model,
        optimizer,
        TokenLoss(),
        loader,
        loader,
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        config=PLAIN | ACCUMULATED,
        verbose=False,
    )
    assert test is loader
    assert batched is not None
    assert len(batched) == 6  # type: ignore[arg-type]
    updates = 0
    for x, y in batched:
        engine.backward(engine.criterion(engine(x), y))
        updates += engine.step()
        schedule.step()
    assert updates == 2
    assert schedule.get_last_lr() == [0.2]
