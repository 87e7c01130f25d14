"""As OneFlow's own test of ZeRO: one layer broadcast, one split, on a line and on a grid, trained and predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph.compat.oneflow as flow
from tests.pool import Pool
from zerograph.compat.oneflow import nn

B, S0 = flow.sbp.broadcast, flow.sbp.split(0)
LINE, GRID = [0, 1], [[0, 1], [2, 3]]
SAMPLES, INPUTS, HIDDEN, OUTPUTS, STEPS = 8, 8, 4, 4, 2

# Ranks, the SBP of the first layer, of the second, and of the batch.
LAYOUTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "line": (LINE, B, S0, S0),
    "grid": (GRID, [B, B], [B, S0], [S0, B]),
    "grid, both split": (GRID, [B, S0], [S0, B], [S0, B]),
}


def layers() -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False)
    return made[0].double(), made[1].double()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 10, (SAMPLES, INPUTS), generator=generator).double() for _ in range(STEPS)]


def sgd(first: Any, second: Any) -> Any:
    groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
    return flow.optim.SGD(groups, lr=0.001, momentum=0.9)


def global_layers(layout: str) -> tuple[Any, Any, Any, Any]:
    ranks, one, other, batch = LAYOUTS[layout]
    place = flow.placement("cpu", ranks=ranks)
    whole = [B] * place.mesh.ndim
    first, second = layers()
    # Whole first: each rank's local layer would be a part.
    first.to_global(placement=place, sbp=whole).to_global(sbp=one)
    second.to_global(placement=place, sbp=whole).to_global(sbp=other)
    return first, second, place, batch


class Train(nn.Graph):
    def __init__(self, first: Any, second: Any, place: Any, told: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.place = place
        self.add_optimizer(sgd(first, second))
        told(self)

    def build(self, x: Any) -> Any:
        out = self.first(x)
        out = out.to_global(placement=self.place, sbp=[B] * len(self.place.mesh.shape))
        out = self.second(out)
        loss = (out * out).sum()
        loss.backward()
        return out


class Predict(nn.Graph):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def build(self, x: Any) -> Any:
        return self.second(self.first(x))


# That stages agree does not depend on the mesh.
STAGES: dict[str, tuple[int, ...]] = {"line": (3,), "grid": (3,), "grid, both split": (2,)}


def at_stages(layout: str) -> list[dict[str, Any]]:
    found = []
    for stage in STAGES[layout]:
        first, second, place, batch = global_layers(layout)
        whole = [B] * place.mesh.ndim

        def told(graph: Any, stage: int = stage) -> None:
            graph.config.enable_zero(True, stage=stage, shard_min_size=1)

        graph = Train(first, second, place, told)
        outs = []
        for x in inputs():
            given = x.to_global(placement=place, sbp=whole).to_global(sbp=batch)  # type: ignore[attr-defined]
            outs.append(graph(given).full_tensor())
        guess = Predict(first, second)(given)
        found.append(
            {
                "outs": outs,
                "guess": guess.full_tensor(),
                "sbp": (first.weight.sbp, second.weight.sbp, first.weight.placement == place),
                "states": [one.to(flow.Tensor).sbp for one in graph._state()][:2],
                "state": graph.state_dict()["first"] | {"second": second.state_dict()["weight"]},
            }
        )
    return found


def plain() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    first, second = layers()
    optimizer, outs = sgd(first, second), []
    for x in inputs():
        optimizer.zero_grad()
        outs.append(second(first(x)))
        (outs[-1] * outs[-1]).sum().backward()
        optimizer.step()
    return [one.detach() for one in outs], second(first(x)).detach(), first.weight.detach(), second.weight.detach()


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[str, list[Any]]:
    return {layout: pool.run(2 if LAYOUTS[layout][0] is LINE else 4, at_stages, layout) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_predicting_are_those_of_one_device(found: dict[str, Any], layout: str) -> None:
    outs, guess, first, second = plain()
    for rank in found[layout]:
        for stage in rank:
            torch.testing.assert_close(stage["outs"], outs, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(stage["guess"], guess, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(stage["state"], {"weight": first, "second": second}, rtol=1e-10, atol=1e-12)


# After training: ZeRO splits the batch's dimension where the user does not.
RESTING = {"line": (S0,), "grid": (S0, S0), "grid, both split": (S0, S0)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_training_both_layers_are_split_and_the_graphs_states_tell_so(found: dict[str, Any], layout: str) -> None:
    for rank in found[layout]:
        for stage in rank:
            assert stage["sbp"] == (RESTING[layout], RESTING[layout], True)
            assert stage["states"] == [RESTING[layout]] * 2


def scaled(stage: int) -> list[Any]:
    """With what OneFlow's test turns on besides: fp16, a loss scale of 200, debugging."""
    first, second, place, batch = global_layers("line")
    first.float()
    second.float()

    def told(graph: Any) -> None:
        graph.config.enable_amp(True)
        graph.set_grad_scaler(flow.amp.StaticGradScaler(200))
        graph.config.enable_zero(True, stage=stage, min_shard_size=1)
        graph.debug(0)

    graph = Train(first, second, place, told)
    x = flow.randint(1, 10, (SAMPLES, INPUTS), dtype=flow.float32, placement=place, sbp=batch)
    out = graph(x)
    return [out.dtype, first.weight.sbp[0], second.weight.sbp[0], first.weight.dtype, graph.steps_done]


def test_with_amp_and_a_static_scale(pool: Pool) -> None:
    assert pool.run(2, scaled, 1)[0] == [torch.float16, S0, S0, torch.float32, 1]
