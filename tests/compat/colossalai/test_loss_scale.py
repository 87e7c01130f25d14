"""The engine scales losses, skips updates and changes its scale as a graph with the same scaler does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zerograph as zg
from tests.compat.colossalai.loops import engine_of
from tests.harness import sliced
from tests.models import TrainStep, batches, make, part
from tests.pool import Pool

OPTIONS = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "hysteresis": 2}
CONFIG: dict[str, Any] = {"zero": None, "fp16": {"mode": "torch", "min_scale": 2.0, **OPTIONS}, "clip_grad_norm": 0.5}
# Whether a loss of each update overflows: to the minimum, past the interval, and in the middle of it.
OVERFLOWS = [*map(bool, (0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1))]


def data() -> list[tuple[Tensor, Tensor]]:
    return [
        (x * torch.inf if overflows else x, y)
        for (x, y), overflows in zip(batches("mlp", len(OVERFLOWS)), OVERFLOWS, strict=True)
    ]


def by_engine(config: dict[str, Any]) -> tuple[list[tuple[bool, Any]], dict[str, Any]]:
    """Return if each update was made, with the scale's state after it, and the state at the end."""
    engine, seen = engine_of(make("mlp"), **config), []
    for x, y in data():
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        seen.append((engine.step(), engine.state_dict()["grad_scaler"]))
    return seen, engine.state_dict()


def by_graph(scaler: zg.GradScaler) -> tuple[list[tuple[bool, Any]], dict[str, Any]]:
    model = make("mlp")
    graph = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    graph.config.precision.amp_dtype, graph.config.precision.grad_scaler, graph.config.clip_grad_norm = (
        torch.float16,
        scaler,
        0.5,
    )
    seen = []
    for x, y in data():
        before = graph.steps_done
        graph(x, y)
        seen.append((graph.steps_done > before, graph.state_dict()["grad_scaler"]))
    return seen, graph.state_dict()


@sliced("ranks", [2], [1])
def test_the_scale_is_that_of_a_graph_and_so_are_the_updates(pool: Pool, ranks: int) -> None:
    wanted, state = by_graph(zg.GradScaler(**OPTIONS, min_scale=2.0))
    assert len({tuple(one.values()) for _, one in wanted}) > 6
    for seen, found in pool.run(ranks, by_engine, CONFIG):
        assert seen == wanted
        assert found.keys() == state.keys()
        assert found["steps_done"] == state["steps_done"]
        for name, value in state["modules"]["model"].items():
            torch.testing.assert_close(found["modules"]["model"][name], value, rtol=2e-2, atol=2e-3)


@sliced("level", [3], [1])
def test_the_scale_of_zero_follows_its_arguments_at_every_level(pool: Pool, level: int) -> None:
    arguments = {"init_scale": 64, "scale_factor": 4, "scale_window": 3, "min_scale": 2, "delayed_shift": 2}
    zero = {"dynamic_loss_scale": True, "dynamic_loss_args": arguments, "clip_grad": 0.5}
    wanted, _ = by_graph(zg.GradScaler(**OPTIONS, min_scale=2.0))
    config = {"zero": {"level": level, **zero}, "fp16": None}
    assert [seen for seen, _ in pool.run(2, by_engine, config)] == [wanted, wanted]


def overflowing_on_one() -> list[bool]:
    engine, updated = engine_of(make("mlp"), **CONFIG), []
    for x, y in batches("mlp", 3):
        x = part(x) * (torch.inf if zg.rank() == 1 and not updated else 1)
        engine.backward(engine.criterion(engine(x), part(y)))
        updated.append(engine.step())
    return [*updated, *(bool(one.isfinite().all()) for one in engine.state_dict()["modules"]["model"].values())]


def test_an_overflow_on_one_rank_skips_the_update_on_all(pool: Pool) -> None:
    for updated in pool.run(2, overflowing_on_one):
        assert not updated[0]
        assert all(updated[1:])


def test_a_state_goes_on_with_its_scale() -> None:
    first, again = engine_of(make("mlp"), **CONFIG), engine_of(make("mlp"), **CONFIG)
    for x, y in data()[:6]:
        first.backward(first.criterion(first(x), y))
        first.step()
    state = first.state_dict()
    assert state["grad_scaler"]["scale"] != 64
    again.load_state_dict(state)
    assert again.state_dict()["grad_scaler"] == state["grad_scaler"]
