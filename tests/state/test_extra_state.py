"""A checkpoint has everything that ``state_dict()`` has: tied names, and modules' extra state too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares
from tests.models import MODELS, TrainStep, adamw, make
from tests.pool import Pool


class Calibrated(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Step(LossStep):
    def __init__(self, *layers: nn.Module) -> None:
        model = nn.Sequential(*layers)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_of_squares)


STATE: dict[str, Any] = {"calibrated": True, "scale": torch.tensor([0.1, 2.0]), "seen": (3, [None, "a"])}


def calibrated(name: str) -> nn.Module:
    layer = Calibrated(3, 3)
    return nn.Sequential(layer, nn.BatchNorm1d(3), *([layer] if name == "extra state twice" else []))


@pytest.mark.parametrize("name", [*MODELS, "extra state", "extra state twice"])
def test_a_checkpoint_has_all_names_of_the_state_dict(name: str, tmp_path: Path) -> None:
    model = make(name) if name in MODELS else calibrated(name)
    step = TrainStep(model, adamw(model), 0)
    step.save(tmp_path)
    saved = zg.read_checkpoint(tmp_path)["modules"]["model"]
    assert saved.keys() == step.state_dict()["modules"]["model"].keys()


def test_extra_state_comes_back(tmp_path: Path) -> None:
    step, other = Step(Calibrated(3, 3)), Step(Calibrated(3, 3))
    step.model[0].extra = STATE
    step(torch.ones(2, 3))
    step.save(tmp_path)
    other.load(tmp_path)
    for loaded in (other.model[0].extra, zg.read_checkpoint(tmp_path)["modules"]["model"]["0._extra_state"]):
        assert torch.equal(loaded.pop("scale"), STATE["scale"])
        assert loaded == {"calibrated": True, "seen": (3, [None, "a"])}


@pytest.mark.parametrize("extra", [object(), torch.ones(3).to_sparse(), torch.ones(3, device="meta")], ids=range(3))
def test_extra_state_that_no_checkpoint_can_hold_is_an_error_that_names_the_module(tmp_path: Path, extra: Any) -> None:
    step = Step(nn.Linear(3, 3), Calibrated(3, 3))
    step.model[1].extra = extra
    with pytest.raises(zg.ConfigError, match=r"(?s)get_extra_state\(\) of model.1 returns.*cannot hold"):
        step.save(tmp_path)


def test_a_checkpoint_of_other_modules_with_extra_state_is_of_another_model(tmp_path: Path) -> None:
    Step(Calibrated(3, 3)).save(tmp_path)
    other = Step(nn.Linear(3, 3))
    before = other.model[0].weight.clone()
    with pytest.raises(zg.ConfigError, match=r"it has the extra state of model\.0, which the graph has not"):
        other.load(tmp_path)
    assert torch.equal(other.model[0].weight, before)


class Failing(Calibrated):
    """Cannot be read, or not be set, on rank 1."""

    fails: str = ""

    def get_extra_state(self) -> Any:
        if self.fails == "get" and zg.rank() == 1:
            raise ValueError("cannot get")
        return super().get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if self.fails == "set" and zg.rank() == 1:
            raise ValueError("cannot set")


def part() -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    return x.chunk(zg.world_size())[zg.rank()]


def fail_alone(folder: Path) -> None:
    step = Step(Failing(3, 3))
    layer = step.model[0]
    layer.extra = {"version": 1}
    step(part())
    step.save(folder)
    earlier = step.state_dict()
    step(part())
    layer.extra = {"version": 2}
    before = step.state_dict()
    layer.fails = "get"
    if zg.rank() == 1:
        with pytest.raises(ValueError, match="cannot get"):
            step.state_dict()
    else:
        step.state_dict()
    layer.fails = "set"
    error = (zg.RankMismatchError, ValueError)[zg.rank()]
    for load in (lambda: step.load(folder), lambda: step.load_state_dict(earlier)):
        with pytest.raises(error, match="cannot set"):
            load()
    layer.fails = ""
    torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)
    step(part())


def test_extra_state_that_fails_on_one_rank_changes_nothing_on_any(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fail_alone, tmp_path)


def test_a_state_that_does_not_fit_leaves_the_extra_state() -> None:
    step, other = Step(Calibrated(3, 3)), Step(Calibrated(3, 3), nn.Linear(3, 3))
    step.model[0].extra, other.model[0].extra = {"version": 1}, {"version": 2}
    with pytest.raises(zg.ConfigError, match="does not fit"):
        step.load_state_dict({"modules": other.state_dict()["modules"]})
    assert step.model[0].extra == {"version": 1}
