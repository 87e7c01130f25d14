"""Ctrl-C and ``sys.exit`` in the middle of a save pass through as they are; the others are told, and go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerograph as zg
from tests.models import batches, part
from tests.pool import Pool
from tests.state.test_save_folders import new_step

INTERRUPTS = {"Ctrl-C": KeyboardInterrupt(), "sys.exit": SystemExit(3)}
# What of a save is interrupted, and whether the new checkpoint is the one that is read then.
PLACES = {
    "its contents": ("zerograph.state.checkpoint.state.encode", False),
    "a file": ("zerograph.runtime.checkpoint.storage.write_file", False),
    "the index": ("zerograph.runtime.checkpoint.index.write", False),
    "behind the index": ("zerograph.state.checkpoint.save.tidy", True),
}


def raising(error: BaseException) -> Any:
    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    return interrupted


@pytest.mark.parametrize("interrupt", INTERRUPTS)
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_is_no_error_and_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, interrupt: str
) -> None:
    step = new_step()
    step.save(tmp_path)
    step.steps_done = 1
    target, new = PLACES[place]
    with monkeypatch.context() as patched:
        patched.setattr(target, raising(INTERRUPTS[interrupt]))
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            step.save(tmp_path)
    assert caught.value is INTERRUPTS[interrupt]
    assert zg.read_checkpoint(tmp_path)["steps_done"] == new
    step.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupted_load_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = new_step()
    step(*map(part, batches("mlp", 1)[0]))
    step.save(tmp_path)
    monkeypatch.setattr("zerograph.runtime.checkpoint.storage.Reader.fill", raising(INTERRUPTS["Ctrl-C"]))
    with pytest.raises(KeyboardInterrupt):
        step.load(tmp_path)


def interrupted_on_one(path: Path, place: str, victim: int) -> tuple[str, str, float, list[int], int]:
    """Return the kind of the error and its message, the seconds until then, and the steps of what is there after it
    and after another save, which works; and the number of entries in the folder."""
    step = new_step(2)
    step.save(path)
    step.steps_done = 1
    dist.barrier()
    target = {"a file": "zerograph.runtime.checkpoint.storage.write_file"}.get(place, "torch.distributed.gather_object")
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        if zg.rank() == victim:
            patched.setattr(target, raising(KeyboardInterrupt()))
        with pytest.raises((KeyboardInterrupt, zg.ZeroGraphError)) as caught:
            step.save(path)
    seconds = time.monotonic() - began
    dist.barrier()
    steps = [zg.read_checkpoint(path)["steps_done"]]
    dist.barrier()
    step.save(path)
    steps.append(zg.read_checkpoint(path)["steps_done"])
    return type(caught.value).__name__, str(caught.value), seconds, steps, len(list(path.iterdir()))


@pytest.mark.parametrize(
    ("place", "victim", "error"),
    [
        ("a file", 1, "CheckpointError"),
        ("an exchange", 0, "CommunicationError"),
        ("an exchange", 1, "CommunicationError"),
    ],
)
def test_the_other_ranks_are_told_of_an_interrupt(
    pool: Pool, tmp_path: Path, place: str, victim: int, error: str
) -> None:
    found = pool.run(2, interrupted_on_one, tmp_path, place, victim)
    assert found[victim][0] == "KeyboardInterrupt"
    kind, said, *_ = found[1 - victim]
    assert (kind, "KeyboardInterrupt" in said) == (error, True), said
    for _, _, seconds, steps, entries in found:
        assert seconds < 30
        assert (steps, entries) == ([0, 1], 2)
