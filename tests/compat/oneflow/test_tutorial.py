"""OneFlow's ZeRO tutorial: its calls, in its order, over two ranks, at its three stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import switches
from tests.pool import Pool
from zerograph.compat.oneflow import nn

STEPS = 4


def tutorial(stage: int) -> dict[str, Any]:
    """The page's program, with what it computes noted."""
    place = flow.placement("cpu", ranks=[0, 1])
    whole, rows = flow.sbp.broadcast, flow.sbp.split(0)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    model = model.to("cpu")
    model.train()
    model = model.to_global(placement=place, sbp=whole)
    before = model[0].weight.sbp
    loss_fn = nn.CrossEntropyLoss().to("cpu")
    optimizer = flow.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[Any] = []

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.loss_fn = loss_fn
            self.add_optimizer(optimizer)
            self.config.set_zero_redundancy_optimizer_mode("distributed_split")
            if stage >= 2:
                flow.boxing.nccl.enable_use_compute_stream(True)
            if stage >= 3:
                flow.boxing.nccl.disable_group_boxing_by_dst_parallel(True)

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append(self.model[0].weight.sbp)
            scores = self.model(x)
            loss = self.loss_fn(scores, y)
            loss.backward()
            return scores

    class Guess(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, x: Tensor) -> Tensor:
            seen.append(self.model[0].weight.sbp)
            return self.model(x)

    with switches(1):
        step = Step()
        scores = []
        for _ in range(STEPS):
            x = flow.randn(128, 256).to("cpu")
            y = flow.ones(128, 1, dtype=flow.int64).to("cpu")
            scores.append(
                step(x.to_global(placement=place, sbp=rows), y.to_global(placement=place, sbp=rows)).full_tensor()
            )
        model.eval()
        guess = Guess()(x.to_global(placement=place, sbp=rows))
    return {
        "scores": scores,
        "guess": guess.full_tensor(),
        "guess is": (guess.is_global, guess.sbp, tuple(guess.shape)),
        "sbp": (before, seen[0], model[0].weight.sbp, seen[-1]),
        "text": repr(step),
        "state": model.state_dict(),
    }


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[int, list[dict[str, Any]]]:
    return {stage: pool.run(2, tutorial, stage) for stage in (1, 2, 3)}


def plain() -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """One device on the whole batch: each rank draws from the same seed, so its halves are equal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scores = []
    for _ in range(STEPS):
        half = torch.randn(128, 256)
        x = torch.cat([half, half])
        optimizer.zero_grad()
        scores.append(model(x))
        torch.nn.functional.cross_entropy(scores[-1], torch.ones(256, dtype=torch.int64)).backward()
        optimizer.step()
    return [one.detach() for one in scores], model(x).detach(), model.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_tutorial_trains_and_predicts_as_one_device_does(found: dict[int, Any], stage: int) -> None:
    scores, guess, state = plain()
    for rank in found[stage]:
        torch.testing.assert_close(rank["scores"], scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank["guess"], guess, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(rank["state"]), dict(state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_graph_shows_the_stage_that_the_switches_gave_it(found: dict[int, Any], stage: int) -> None:
    assert f"ZeRO stage {stage}" in found[stage][0]["text"].splitlines()[0]


def test_weights_are_whole_before_the_first_step_and_split_after_it_also_for_code_in_build(
    found: dict[int, Any],
) -> None:
    whole, rows = flow.sbp.broadcast, flow.sbp.split(0)
    assert found[2][0]["sbp"] == ((whole,), (whole,), (rows,), (rows,))
