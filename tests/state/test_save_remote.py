"""Checkpoints in object stores, through fsspec: no rename, no append, no locks, and what is there stays whole."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import zerograph as zg
from tests import object_store
from tests.models import TrainStep, batches, part
from tests.pool import Pool
from tests.scripts import run_apart
from tests.state.test_save_folders import new_step, saved
from zerograph.__main__ import app
from zerograph.runtime.checkpoint import index, lock as locks, storage
from zerograph.runtime.checkpoint.remote import RemotePath, folder_of
from zerograph.state.checkpoint.load import open_checkpoint

URL = "objects://bucket/run"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    object_store.use(tmp_path)
    return tmp_path


def keys(store: Path) -> list[str]:
    """Return the names below ``URL``: files, and folders of the checkpoints' data as ``data``."""
    names = (key.removeprefix("bucket/run/") for key in object_store.ObjectStore()._keys("bucket/run/"))
    return sorted({re.sub("data-.*", "data", name) for name in names})


def state_of(step: TrainStep) -> dict[str, Tensor]:
    state: dict[str, Tensor] = step.state_dict()["modules"]["model"]
    return state


def test_a_checkpoint_in_memory_is_the_state_that_was_saved(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    step, other = new_step(), new_step()
    step(*batches("mlp", 1)[0])
    step.save(url)
    other.load(url)
    torch.testing.assert_close(state_of(other), state_of(step), rtol=0, atol=0)
    result = CliRunner().invoke(app, ["export", url, str(tmp_path / "model.safetensors")])
    assert result.exit_code == 0, result.output


def test_a_load_takes_few_requests_for_each_file(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = new_step()
    step(*batches("mlp", 1)[0])
    step.save(URL)
    requests: dict[str, int] = {}
    read_bytes = RemotePath.read_bytes

    def counted(path: RemotePath, *span: int) -> bytes:
        requests[path.name] = requests.get(path.name, 0) + 1
        return read_bytes(path, *span)

    monkeypatch.setattr(RemotePath, "read_bytes", counted)
    boxes = [(name, chunk) for name, entry in open_checkpoint(URL).index.tensors.items() for chunk in entry.chunks]
    assert len(boxes) > 10
    for _ in open_checkpoint(URL).read(boxes):
        pass
    # The length of the header, the header, and all tensors.
    assert {count for name, count in requests.items() if name.endswith(".safetensors")} == {3}


def trained_and_saved(store: Path, url: str) -> dict[str, Tensor]:
    object_store.use(store)
    step = new_step(3)
    for x, y in batches("mlp", 3):
        step(part(x), part(y))
        step.save(url, keep=2, asynchronous=True)
    step.wait_for_save()
    return state_of(step)


def loaded(store: Path, url: str) -> tuple[int, dict[str, Tensor]]:
    object_store.use(store)
    step = new_step(1)
    step.compile(*map(part, batches("mlp", 1)[0]))
    step.load(url)
    return step.steps_done, state_of(step)


def test_two_ranks_save_into_an_object_store_and_other_ranks_load(pool: Pool, store: Path) -> None:
    expected = pool.run(2, trained_and_saved, store, URL)[0]
    assert keys(store) == [
        *("latest", "step-00000002/data", "step-00000002/index.json", "step-00000003/data", "step-00000003/index.json")
    ]
    for ranks in (1, 2):
        steps, state = pool.run(ranks, loaded, store, URL)[0]
        assert steps == 3
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["storage.write_file", "index.write"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_an_interrupted_upload_leaves_the_checkpoint_before_it(
    store: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    step = new_step()
    saved(step, URL, 1, None)
    before = keys(store)
    with monkeypatch.context() as patched:
        patched.setattr(f"zerograph.runtime.checkpoint.{place}", interrupted)
        with pytest.raises((zg.CheckpointError, KeyboardInterrupt)):
            saved(step, URL, 2, None)
    assert zg.read_checkpoint(URL)["steps_done"] == 1
    assert keys(store) == before == ["data", "index.json"]


def test_a_store_that_stops_answering_before_the_index_is_named_as_the_cause(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    step = new_step()
    saved(step, URL, 1, None)
    with monkeypatch.context() as patched:
        patched.setattr("zerograph.runtime.checkpoint.storage.Reader._size", unreachable)
        with pytest.raises(zg.CheckpointError, match="cannot be read: Connection reset by peer") as raised:
            saved(step, URL, 2, None)
    # Nobody has removed a file.
    assert "another process" not in str(raised.value)
    with monkeypatch.context() as patched:
        patched.setattr(object_store.ObjectStore, "info", unreachable)
        with pytest.raises(zg.CheckpointError, match="cannot be read: ConnectionResetError"):
            step.load(URL)
    assert zg.read_checkpoint(URL)["steps_done"] == 1


def killed_while_it_saves(store: Path) -> None:
    object_store.use(store)
    step = new_step()
    saved(step, URL, 1)
    with patch.object(index, "write", lambda *_: os._exit(9)):
        saved(step, URL, 2)


def test_what_a_killed_job_left_is_taken_over_and_removed(store: Path) -> None:
    assert run_apart(killed_while_it_saves, store) == 9
    assert ".saving.lock" in keys(store)
    assert "step-00000002/data" in keys(store)
    assert zg.read_checkpoint(URL)["steps_done"] == 1
    saved(new_step(), URL, 3)
    assert keys(store) == [
        *("latest", "step-00000001/data", "step-00000001/index.json", "step-00000003/data", "step-00000003/index.json")
    ]


def saved_by_another(store: Path) -> str:
    object_store.use(store)
    try:
        saved(new_step(), URL, 5)
    except zg.CheckpointError as error:
        return str(error)
    return ""


def test_a_second_job_is_refused_while_the_first_saves_and_when_it_has_saved(
    pool: Pool, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), storage.write_file

    def waiting(*arguments: Any) -> None:
        assert gate.wait(60)
        write(*arguments)

    step = new_step()
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_file", waiting)
        step.save(URL, keep=2, asynchronous=True)
        for error in pool.run(2, saved_by_another, store):
            assert f"another job is saving into {URL}: process" in error
            assert f"If that one has ended already, remove {URL}/.saving.lock." in error
        gate.set()
        step.wait_for_save()
    assert pool.run(2, saved_by_another, store) == ["", ""]
    with pytest.raises(zg.CheckpointError, match=r"another job has saved into objects://.* since this job did"):
        saved(step, URL, 6)


def elsewhere(**changes: Any) -> bytes:
    owner = locks.Owner("elsewhere", "boot", "pid:[1]", 7, 8, "", "2020-01-01 00:00:00 +0000")
    return json.dumps(asdict(replace(owner, **changes))).encode() + b" token"


def test_a_job_whose_lock_another_took_over_writes_no_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, write = new_step(), storage.write_file
    saved(step, URL, 1)

    def taken(*arguments: Any) -> None:
        write(*arguments)
        object_store.ObjectStore().pipe_file(f"{URL}/.saving.lock", elsewhere())

    monkeypatch.setattr(storage, "write_file", taken)
    with pytest.raises(zg.CheckpointError, match="took the lock over: process 7 on host elsewhere"):
        saved(step, URL, 2)
    assert zg.read_checkpoint(URL)["steps_done"] == 1
    assert ".saving.lock" in keys(store)


@pytest.mark.parametrize(
    ("owner", "taken"),
    [
        ({}, True),
        ({"since": "2999-01-01 00:00:00 +0000"}, False),
        ({"since": "2999-01-01 00:00:00 +0000", "job": "17"}, True),
    ],
    ids=["an hour old", "of now", "the same job before its restart"],
)
def test_a_lock_of_another_host_is_taken_over_if_its_process_must_have_ended(
    store: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, str], taken: bool
) -> None:
    monkeypatch.setattr(locks, "_REMOTE_TIMEOUT", 0.1)
    own = replace(locks.this_process(), job="17 (restart 1)")
    monkeypatch.setattr(locks, "this_process", lambda: own)
    object_store.ObjectStore().pipe_file(f"{URL}/.saving.lock", elsewhere(**owner))
    if taken:
        saved(new_step(), URL, 1)
    else:
        with pytest.raises(zg.CheckpointError, match="process 7 on host elsewhere"):
            saved(new_step(), URL, 1)


def saved_in_memory() -> str:
    with pytest.raises(zg.CheckpointError) as caught:
        new_step(2).save("memory://not-shared/run")
    return str(caught.value)


def test_ranks_that_do_not_share_the_store_are_told(pool: Pool) -> None:
    for error in pool.run(2, saved_in_memory):
        assert "ranks see different folders" in error


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sftp://host/run", "over sftp others can see files that are half written"),
        ("simplecache::memory://run", "is a chain of URLs"),
        ("zip://run.zip", "zip opens other files"),
        ("s3:/bucket/run", "give the string 's3://bucket/run'"),
        ("nothing://bucket/run", "Protocol not known: nothing"),
        ("memory://", "names no folder"),
        (Path("s3://bucket/run"), "give the string 's3://bucket/run'"),
    ],
)
def test_a_url_that_cannot_hold_a_checkpoint_is_refused(path: Any, message: str) -> None:
    with pytest.raises(zg.CheckpointError, match=message):
        new_step().save(path)


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed", "its header"])
def test_a_damaged_object_is_named_and_nothing_is_loaded(store: Path, damage: str) -> None:
    step = new_step()
    step(*batches("mlp", 1)[0])
    saved(step, URL, 1)
    (file,) = (file for file in store.iterdir() if file.name.endswith("safetensors"))
    content = bytearray(file.read_bytes())
    content[2 if damage == "its header" else -1] ^= 255
    file.write_bytes(content[: -9 if damage == "cut" else None])
    if damage == "removed":
        file.unlink()
    other = new_step()
    before = {name: value.clone() for name, value in state_of(other).items()}
    with pytest.raises(
        zg.CheckpointError, match=r"objects://bucket/run/step-00000001/data-.*/rank00000-000000.safetensors"
    ):
        other.load(URL)
    torch.testing.assert_close(state_of(other), before, rtol=0, atol=0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an object store in this process; return the URL of a folder in it."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    yield "s3://bucket/run"
    server.stop()


def test_checkpoints_in_s3_are_kept_loaded_and_locked(s3: str) -> None:
    step, other = new_step(), new_step()
    step(*batches("mlp", 1)[0])
    for at in (1, 2, 3):
        saved(step, s3, at)
    other.load(s3)
    assert other.steps_done == 3
    torch.testing.assert_close(state_of(other), state_of(step), rtol=0, atol=0)
    import s3fs

    names = s3fs.S3FileSystem(use_listings_cache=False).ls(s3)
    assert sorted(name.rpartition("/")[2] for name in names) == ["latest", "step-00000002", "step-00000003"]
    folder = folder_of(s3)
    held = locks.lock(folder, 0.1)
    with pytest.raises(zg.CheckpointError, match=r"an earlier save of this process into s3://bucket/run does not end"):
        locks.lock(folder, 0.1)
    held.release()
