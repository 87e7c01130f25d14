"""Checks of values in installed libraries are left out of a step; any other read stays an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep

LIBRARY = """
import torch

def raises(x):
    if x.max() >= 5:
        raise ValueError("too large")

def raises_after_a_text(x):
    if x.dim() and not torch.isfinite(x).all():
        message = f"{x} is not finite"
        raise ValueError(message)

def raises_in_one_of_two(x):
    if (x < 0).any() or x.max() > 9:
        raise ValueError("out of range")
    elif x.min() < 0:
        raise ValueError("negative")

def asserts(x):
    assert (x >= 0).all(), "negative"

def reads_a_number(x):
    if x.max().item() > 7:
        raise ValueError("too large")

def reads_a_truth(x):
    if bool((x < 0).any()) or (x > 9).any().item():
        raise ValueError("out of range")

def torchs(x):
    torch._assert((x >= 0).all(), "negative")
    torch._check_tensor_all(x >= 0, lambda: "negative")

def branches(x):
    if x.max() > 5:
        x.relu()

def catches(x):
    try:
        if x.max() > 5:
            raise ValueError
    except ValueError:
        x.relu()

def keeps(x):
    number = x.max().item()
    if number > 5:
        raise ValueError
"""
CHECKS = (
    "raises",
    "raises_after_a_text",
    "raises_in_one_of_two",
    "asserts",
    "reads_a_number",
    "reads_a_truth",
    "torchs",
)


class Checking(nn.Linear):
    check: Any

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return super().forward(x).mean()


def step_of(check: Any) -> LossStep:
    model = Checking(3, 1)
    model.check = check
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1))


def module(folder: Path) -> ModuleType:
    folder.mkdir(parents=True)
    (folder / "checking.py").write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("checking", folder / "checking.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_a_library_is_left_out(tmp_path: Path, name: str) -> None:
    check, x = getattr(module(tmp_path / "site-packages"), name), torch.rand(4, 3)
    step = step_of(check)
    expected = step.model(x).item()
    assert step(x).item() == pytest.approx(expected)
    model = Checking(3, 1)
    model.check = check
    expected = model(x).item()
    with torch.no_grad():
        assert zg.prepare(model)(x).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["branches", "catches", "keeps"])
def test_a_value_that_decides_something_else_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(zg.CaptureError, match=r"read a tensor's value.*\n.*checking.py"):
        step_of(getattr(module(tmp_path / "site-packages"), name))(torch.rand(4, 3))


@pytest.mark.parametrize("name", ["raises", "asserts", "reads_a_number"])
def test_a_check_in_the_users_own_code_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(zg.CaptureError, match=r"read a tensor's value.*\n.*checking.py"):
        step_of(getattr(module(tmp_path / "own"), name))(torch.rand(4, 3))
