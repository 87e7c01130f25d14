"""A pipe where a file is read is an error or left alone: it never blocks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares
from zerograph.integrations.state import last_complete


class Step(LossStep):
    def __init__(self) -> None:
        model = nn.Linear(4, 2)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_of_squares)


@pytest.fixture(autouse=True)
def no_block() -> Iterator[None]:
    def end(*_: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READS: dict[str, Callable[[Path], Any]] = {
    "a compiled step": lambda pipe: Step().load_compiled(pipe),
    "tensors": zg.open_safetensors,
    "an index of tensors": lambda pipe: zg.open_safetensors(pipe.rename(pipe.with_suffix(".json"))),
    "a state": lambda pipe: Step().load_state_dict({"modules": {"model": pipe}}),
    "DeepSpeed's configuration": zg.from_deepspeed,
    "a machine": lambda pipe: zg.plan(Step(), torch.ones(2, 4), device=pipe),
    "a checkpoint": lambda pipe: Step().load(pipe.parent),
}


@pytest.mark.parametrize("what", READS)
def test_a_pipe_is_an_error(what: str, tmp_path: Path) -> None:
    pipe = tmp_path / ("index.json" if what == "a checkpoint" else "pipe.safetensors")
    os.mkfifo(pipe)
    with pytest.raises(zg.ZeroGraphError):
        READS[what](pipe)


@pytest.mark.parametrize("name", ["index.json", ".saving.lock"])
def test_a_save_replaces_a_pipe_or_refuses_it(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    step = Step()
    step(torch.ones(2, 4))
    with contextlib.suppress(zg.CheckpointError):
        step.save(tmp_path)
        Step().load(tmp_path)


def test_a_trainers_checkpoint_with_a_pipe_is_passed_over(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    os.mkfifo(tmp_path / "checkpoint-2" / "trainer_state.json")
    with pytest.warns(zg.ZeroGraphWarning, match="checkpoint-2 is not complete"):
        assert last_complete(tmp_path) == str(tmp_path / "checkpoint-1")
