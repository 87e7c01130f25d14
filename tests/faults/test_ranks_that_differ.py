"""Ranks that run different software, or stand at different places, find out before anything is exchanged."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zerograph as zg
from tests.harness import told
from tests.models import TrainStep, adam_step, adamw, batches, make, part
from tests.pool import Pool


def with_other(what: str) -> tuple[str, str]:
    """(type of error, message) of a first step for which rank 1 has another version of something."""
    step = adam_step("mlp", 2)
    (x, y), *_ = batches("mlp", 1)
    other = {
        "torch": patch.object(torch, "__version__", "2.11.0"),
        "zerograph": patch.object(zg, "__version__", "0.0.9"),
        "Python": patch.object(platform, "python_version", lambda: "3.99.1"),
    }[what]
    if dist.get_rank():
        other.start()
    try:
        return told(lambda: step(part(x), part(y)))
    finally:
        patch.stopall()


@pytest.mark.parametrize(("what", "version"), [("torch", "2.11.0"), ("zerograph", "0.0.9"), ("Python", "3.99")])
def test_another_version_on_one_rank_is_an_error_on_all_that_says_whose(pool: Pool, what: str, version: str) -> None:
    for kind, message in pool.run(2, with_other, what):
        assert kind == "RankMismatchError"
        assert f"first in the version of {what}" in message
        assert f"rank 1: {version}" in message
        assert "rank 0: " in message


def astray() -> str:
    """The message when rank 1 believes to be a step ahead."""
    step = adam_step("mlp", 0)
    (x, y), *_ = batches("mlp", 1)
    x, y = part(x), part(y)
    step(x, y)
    step.steps_done += dist.get_rank()
    with pytest.raises(zg.RankMismatchError) as error:
        step(x, y)
    return str(error.value)


def test_ranks_at_different_steps_do_not_go_on_together(pool: Pool) -> None:
    for message in pool.run(2, astray):
        assert "what they are about to do" in message
        assert "rank 0: step 2" in message
        assert "rank 1: step 3" in message


def at_another_rate(in_loop: bool) -> str:
    """The message when rank 1 alone has lowered its learning rate; the state is then as before."""
    model = make("mlp")
    optimizer = adamw(model)
    (x, y), *_ = batches("mlp", 1)
    x, y = part(x), part(y)
    if in_loop:
        model, optimizer = zg.prepare(model, optimizer, stage=3)
    step = None if in_loop else TrainStep(model, optimizer, 2)

    def update() -> None:
        if step is not None:
            step(x, y)
            return
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def weights() -> list[torch.Tensor]:
        return list((model.state_dict() if step is None else step.state_dict()["modules"]["model"]).values())

    update()
    before = weights()
    optimizer.param_groups[0]["lr"] *= 1 - 0.5 * dist.get_rank()
    with pytest.raises(zg.RankMismatchError) as error:
        update()
    torch.testing.assert_close(weights(), before, rtol=0, atol=0)
    return str(error.value)


@pytest.mark.parametrize("in_loop", [False, True])
def test_ranks_with_other_learning_rates_do_not_update(pool: Pool, in_loop: bool) -> None:
    for message in pool.run(2, at_another_rate, in_loop):
        assert "first in hyperparameters: lr of group 0 of optimizer 0" in message
        assert "step schedulers, alike on all ranks" in message


def saved_and_loaded_apart(folder: Path) -> list[str]:
    """The messages when each rank saves into a folder of its own, and loads a checkpoint of its own."""
    step = adam_step("mlp", 0)
    apart = folder / str(dist.get_rank())
    with pytest.raises(zg.RankMismatchError) as saving:
        step.save(apart)
    for name in ("0", "1"):
        step.save(folder / name)
    with pytest.raises(zg.RankMismatchError) as loading:
        step.load(apart)
    return [str(saving.value), str(loading.value)]


def test_ranks_that_save_or_load_apart_are_told_the_folders(pool: Pool, tmp_path: Path) -> None:
    for saving, loading in pool.run(2, saved_and_loaded_apart, tmp_path):
        for message in (saving, loading):
            assert re.search(r"rank 0: .*/0\n +rank 1: .*/1\n", message)
        assert saving.endswith("All ranks must save into the same folder, with the same arguments.")
        assert loading.endswith("All ranks must load the same checkpoint, from a folder that they share.")
