"""The stage where ZeRO is on and none is named: 2, at every door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zerograph as zg
from zerograph.__main__ import app
from zerograph.compat.oneflow import nn as oneflow
from zerograph.integrations.options import config_of
from zerograph.loops.prepare import loop_of

SCRIPT = """
import functools
import torch
import zerograph as zg
from zerograph.planner.front.plan import Training

def example():
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Training(torch.nn.Linear(4, 1), sgd, torch.Tensor.sum), torch.ones(4, 4)
"""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def prepared() -> zg.Config:
    model: Any = nn.Linear(4, 1)
    zg.prepare(model, sgd(model.parameters()))
    return loop_of(model).config  # type: ignore[union-attr]


def with_mode(graph: Any) -> zg.Config:
    graph.set_zero_mode("distributed_split")
    return graph.config  # type: ignore[no-any-return]


def enabled(graph: Any) -> zg.Config:
    graph.config.enable_zero()
    return graph.config  # type: ignore[no-any-return]


def former(use: Callable[[], zg.Config]) -> zg.Config:
    with pytest.warns(zg.ZeroGraphWarning, match="the old name goes in"):
        return use()


def strategy() -> zg.Config:
    lightning = pytest.importorskip("zerograph.integrations.lightning", exc_type=ImportError)
    return lightning.ZeroStrategy().zero_config  # type: ignore[no-any-return]


DOORS: dict[str, Callable[[], zg.Config]] = {
    "prepare": prepared,
    "set_zero_mode": lambda: with_mode(zg.ZeroGraph()),
    "enable_zero": lambda: former(lambda: enabled(zg.ZeroGraph())),
    "a configuration's mode": lambda: former(lambda: zg.Config(mode="distributed_split")),
    "zero=None of Trainer and Accelerator": lambda: config_of(None),
    "zero={} of Trainer and Accelerator": lambda: config_of({"backend": "eager"}),
    "Lightning": strategy,
    "OneFlow's set_zero_mode": lambda: with_mode(oneflow.Graph()),
    "OneFlow's enable_zero": lambda: enabled(oneflow.Graph()),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_stage_is_2_at_every_door(door: str) -> None:
    config = DOORS[door]()
    assert (config.zero.stage, config.zero.shard_by) == (2, "elements")


def test_a_plan_of_a_module_is_of_stage_2() -> None:
    plan = zg.plan(nn.Linear(4, 1), torch.ones(4, 4), sgd, loss=torch.Tensor.sum, world_size=2)
    assert plan.stage == "stage 2"


def test_the_commands_take_the_stage_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shown = CliRunner().invoke(app, ["plan", f"{script}:example", "--world-size", "2", "--json"])
    assert '"stage": "stage 2"' in shown.output, shown.output
