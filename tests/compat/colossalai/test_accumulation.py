"""With gradient accumulation k calls of the engine make one update, and one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.compat.colossalai.loops import PLAIN, engine_of, train, train_plainly
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
