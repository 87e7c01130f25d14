"""Folders that are saved into: clocks that go back, a ``latest`` that dangles, and other jobs that save there."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import zerograph as zg
from tests.models import TrainStep, adam_step
from tests.pool import Pool
from zerograph.runtime.checkpoint import lock as locks, storage


def new_step(stage: int = 0) -> TrainStep:
    return adam_step("mlp", stage, backend="eager")


def saved(step: TrainStep, folder: Path | str, at: int, keep: int | None = 2) -> None:
    step.steps_done = at
    step.save(folder, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def set_times(folder: Path, seconds: float) -> None:
    for index in folder.glob("*/index.json"):
        os.utime(index, (seconds, seconds))


@pytest.mark.parametrize("another_job", [False, True], ids=["the clock goes back", "the folder is of another machine"])
def test_what_was_just_written_stays_whatever_the_clock_says(tmp_path: Path, another_job: bool) -> None:
    step = new_step()
    for at in (1, 2):
        saved(step, tmp_path, at)
    set_times(tmp_path, time.time() + 1e6)
    saved(new_step() if another_job else step, tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 3


def test_checkpoints_without_a_number_are_ordered_by_their_steps(tmp_path: Path, monkeypatch: Any) -> None:
    """Return the files of version 0.1."""
    step = new_step()
    with monkeypatch.context() as patched:
        patched.setattr("zerograph.state.checkpoint.save.numbered", lambda document, _: document)
        for at in (3, 1, 2):
            saved(step, tmp_path, at, keep=3)
    saved(step, tmp_path, 1, keep=2)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]


def test_a_latest_that_dangles_leads_to_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    step = new_step()
    for at in (1, 2, 3, 4):
        saved(step, tmp_path, at, keep=4)
    set_times(tmp_path, 0)
    shutil.rmtree(tmp_path / "step-00000004")
    next(tmp_path.glob("step-00000003/data-*/*")).unlink()
    with pytest.warns(UserWarning, match=r"latest names 'step-00000004', which is not there: .* step-00000002 with 2"):
        step.load(tmp_path)
    assert step.steps_done == 2
    (tmp_path / "latest").unlink()
    with pytest.warns(UserWarning, match=r"has no file latest: .* step-00000002"):
        assert zg.read_checkpoint(tmp_path)["steps_done"] == 2


def test_a_latest_that_dangles_beside_nothing_whole_is_an_error(tmp_path: Path) -> None:
    saved(new_step(), tmp_path, 1)
    (tmp_path / "step-00000001" / "index.json").unlink()
    with pytest.raises(zg.CheckpointError, match="latest names 'step-00000001', which is not there, and no other"):
        zg.read_checkpoint(tmp_path)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves of this process wait for it before they write a file."""
    gate, write = threading.Event(), storage.write_file

    def waiting(tensors: dict[str, Tensor], path: Path, *more: Any) -> None:
        assert gate.wait(60)
        write(tensors, path, *more)

    monkeypatch.setattr(storage, "write_file", waiting)
    return gate


def saved_by_another(path: Path, keep: int | None, steps: int) -> str:
    step = new_step()
    step.steps_done = steps
    try:
        step.save(path, keep=keep)
    except zg.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("keep", [None, 2])
def test_a_second_job_that_saves_at_the_same_time_is_refused(
    pool: Pool, tmp_path: Path, blocked: threading.Event, keep: int | None
) -> None:
    step = new_step()
    step.save(tmp_path, keep=keep, asynchronous=True)
    for error in pool.run(2, saved_by_another, tmp_path, keep, 5):
        assert f"another job is saving into {tmp_path}: process {os.getpid()} on host {os.uname().nodename}" in error
    blocked.set()
    step.wait_for_save()
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 0
    assert ".saving.lock" not in names(tmp_path)
    assert pool.run(2, saved_by_another, tmp_path, keep, 5) == ["", ""]


def test_two_graphs_of_a_job_save_one_after_the_other(tmp_path: Path, blocked: threading.Event) -> None:
    first, second = new_step(), new_step()
    first.save(tmp_path, asynchronous=True)
    threading.Timer(0.3, blocked.set).start()
    saved(second, tmp_path, 7, keep=None)
    first.wait_for_save()
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 7
    saved(first, tmp_path, 8, keep=None)


@pytest.mark.parametrize("keep", [None, 2])
def test_a_job_learns_that_another_saves_there_in_turn(pool: Pool, tmp_path: Path, keep: int | None) -> None:
    step = new_step()
    saved(step, tmp_path, 1, keep)
    assert pool.run(2, saved_by_another, tmp_path, keep, 2) == ["", ""]
    with pytest.raises(zg.CheckpointError, match=r"another job has saved into .* since this job did: process \d+ on"):
        saved(step, tmp_path, 3, keep)
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 2
    step.load(tmp_path)
    saved(step, tmp_path, 3, keep)
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 3


def test_an_index_is_not_replaced_if_the_files_have_gone(tmp_path: Path, monkeypatch: Any) -> None:
    step = new_step()
    saved(step, tmp_path, 1, keep=None)
    write = storage.write_file

    def removed(tensors: dict[str, Tensor], path: Path, *more: Any) -> None:
        write(tensors, path, *more)
        path.unlink()

    monkeypatch.setattr(storage, "write_file", removed)
    with pytest.raises(zg.CheckpointError, match="safetensors is missing"):
        saved(step, tmp_path, 2, keep=None)
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 1


def in_child(work: Any) -> int:
    """Return the number of a forked process, once it has done the work; it then waits."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        work()
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.close(read)
    return child


def killed(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_lock_ends_with_its_process_though_a_child_of_it_lives(tmp_path: Path) -> None:
    held: list[Any] = []

    def lock_and_fork() -> None:
        held.append(locks.lock(tmp_path, 1.0))
        (tmp_path / "grandchild").write_text(str(in_child(lambda: None)))

    child = in_child(lock_and_fork)
    with pytest.raises(zg.CheckpointError, match=f"process {child} on host"):
        locks.lock(tmp_path, 1.0)
    killed(child)
    locks.lock(tmp_path, 1.0).release()
    os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)
    assert names(tmp_path) == ["grandchild"]


def test_a_holder_on_another_host_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = locks.Owner("elsewhere", "boot", "pid:[1]", 7, 8, "a job")
    monkeypatch.setattr(locks, "_REMOTE_TIMEOUT", 0.3)
    held = locks.lock(tmp_path, 1.0)
    monkeypatch.setattr(locks, "_owner", lambda path: elsewhere)
    began = time.monotonic()
    with pytest.raises(zg.CheckpointError, match="process 7 on host elsewhere, job a job"):
        locks.lock(tmp_path, 1.0)
    assert time.monotonic() - began >= 0.3
    held.release()
    locks.lock(tmp_path, 1.0).release()


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.warns(UserWarning, match="has no locks .* let no two jobs save into it"):
        saved(new_step(), tmp_path, 1)
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 1
