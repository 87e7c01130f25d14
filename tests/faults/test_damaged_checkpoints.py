"""Disks that are full and checkpoints that are not what they were: an error on every rank, and nothing overwritten."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.faults.survival_table import Tally
from tests.harness import difference
from tests.models import TrainStep, adam_step, batches, part
from tests.pool import Pool

Tallies = Callable[[str], Tally]
ROOT = Path(__file__).resolve().parent.parent.parent


def new_step(name: str = "mlp") -> TrainStep:
    return adam_step(name, 3, backend="eager")


def trained(step: TrainStep, count: int, name: str = "mlp") -> list[float]:
    data = batches(name, step.steps_done + count)[step.steps_done :]
    return [float(step(part(x), part(y))) for x, y in data]


def saved(path: Path) -> None:
    step = new_step()
    trained(step, 2)
    step.save(path)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have written."""
    path = tmp_path_factory.mktemp("checkpoint") / "whole"
    pool.run(2, saved, path)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def loaded_in_vain(path: Path, compiled: bool, name: str = "mlp") -> tuple[str, str, float]:
    """The error, its kind, and the seconds that it took; nothing is changed by then."""
    step = new_step(name)
    if compiled:
        trained(step, 1, name)
    before = step.state_dict()
    start = time.monotonic()
    with pytest.raises(zg.ZeroGraphError) as caught:
        step.load(path)
    seconds = time.monotonic() - start
    assert not difference(step.state_dict(), before)
    return str(caught.value), type(caught.value).__name__, seconds


def refused(pool: Pool, count: Tally, path: Path, *words: str, name: str = "mlp") -> None:
    for compiled in (False, True):
        answers = pool.run(2, loaded_in_vain, path, compiled, name)
        good = all(word in said for said, _, _ in answers for word in words)
        count.add(good, seconds=max(seconds for *_, seconds in answers))
        assert good, (words, answers)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/*.safetensors"))


def test_a_flipped_byte_is_found_before_anything_is_overwritten(pool: Pool, copy: Path, tally: Tallies) -> None:
    shard = shards(copy)[-1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    refused(pool, tally("a flipped byte in a checkpoint"), copy, str(shard.name), "does not have the SHA-256")


def test_a_missing_shard_is_named(pool: Pool, copy: Path, tally: Tallies) -> None:
    shard = shards(copy)[0]
    shard.unlink()
    refused(pool, tally("a missing shard of a checkpoint"), copy, f"{shard.name} is missing")


def test_a_shard_that_was_cut_short_is_named(pool: Pool, copy: Path, tally: Tallies) -> None:
    shard = shards(copy)[0]
    os.truncate(shard, shard.stat().st_size - 100)
    refused(pool, tally("a shard of a checkpoint cut short"), copy, f"{shard.name} is damaged")


def test_a_checkpoint_of_another_model_is_refused(pool: Pool, whole: Path, tally: Tallies) -> None:
    refused(pool, tally("a checkpoint of another model"), whole, "another model", name="conv")


@pytest.mark.parametrize("damage", ["truncated", "a name outside", "another version", "no JSON", "a number changed"])
def test_a_damaged_index_is_refused(copy: Path, tally: Tallies, damage: str) -> None:
    path = copy / "index.json"
    body = json.loads(path.read_text())
    if damage == "truncated":
        path.write_text(path.read_text()[:-50])
    elif damage == "no JSON":
        path.write_bytes(b"\x80\x04\x95cos\nsystem\n")
    elif damage == "a name outside":
        next(iter(body["tensors"].values()))["chunks"][0]["file"] = "../../etc/passwd"
    elif damage == "another version":
        body["version"] = 99
    else:
        body["document"]["steps_done"] += 1
    if damage not in ("truncated", "no JSON"):
        path.write_text(json.dumps(body))
    count = tally("a damaged index of a checkpoint")
    with pytest.raises(zg.CheckpointError, match=r"index\.json"):
        zg.read_checkpoint(copy)
    count.add(True)


WAYS: list[dict[str, Any]] = [{}, {"asynchronous": True}, {"keep": 2}]


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A tmpfs of 256 KiB.

    Raises:
        PermissionError: this process may not mount one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=256k"):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        # Lazily: somebody may still be looking.
        libc.umount2(os.fsencode(path), 2)


def fill_up(pool: Pool, path: Path) -> list[Any]:
    """Return the output of both ranks for each way to save."""
    with small_disk(path):
        return [pool.run(2, filled_up_while_saving, path / "-".join(["runs", *way]), way) for way in WAYS]


def fill_up_apart(path: Path) -> None:
    """The same as a program of its own, in a mount namespace of its own."""
    pool = Pool(2, hash_apart=False)
    try:
        print(json.dumps(fill_up(pool, path)))
    finally:
        pool.close(patience=60.0)


def save_whole(step: TrainStep, path: Path, way: dict[str, Any]) -> None:
    step.save(path, **way)
    step.wait_for_save()


def filled_up_while_saving(path: Path, way: dict[str, Any]) -> tuple[str, float, bool, bool, bool]:
    """The error, the seconds until it came, and whether the checkpoint before is as it was, nothing else is there, and
    saving works again once there is room."""
    step = new_step()
    trained(step, 1)
    save_whole(step, path, way)
    before, held = zg.read_checkpoint(path), sorted(one.name for one in path.iterdir())
    trained(step, 1)
    filler = path.parent / "filler"
    if zg.rank() == 0:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_bsize
        filler.write_bytes(b"x" * (free - 4096))
    torch.distributed.barrier()
    start = time.monotonic()
    with pytest.raises(zg.CheckpointError) as caught:
        save_whole(step, path, way)
    seconds = time.monotonic() - start
    torch.distributed.barrier()
    after = zg.read_checkpoint(path)
    assert not difference(after, before)
    tidy = sorted(one.name for one in path.iterdir()) == held
    torch.distributed.barrier()
    if zg.rank() == 0:
        filler.unlink()
    torch.distributed.barrier()
    save_whole(step, path, way)
    again = zg.read_checkpoint(path)["steps_done"] == 2
    return str(caught.value), seconds, after["steps_done"] == 1, tidy, again


APART = """
import sys
from pathlib import Path
from tests.faults.test_damaged_checkpoints import fill_up_apart
if __name__ == "__main__":
    fill_up_apart(Path(sys.argv[1]))
"""


def filled_up_apart(folder: Path) -> list[Any]:
    """In a namespace of user and mounts, where an ordinary user may have one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk, nor have a namespace of mounts")
    script = folder / "apart.py"
    script.write_text(APART)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["unshare", "-rm", sys.executable, str(script), str(folder / "apart")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if "PermissionError" in done.stderr:
        pytest.skip("not even in a namespace of its own may this user mount a small disk")
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_full_disk_is_an_error_and_the_checkpoint_before_is_kept(pool: Pool, tmp_path: Path, tally: Tallies) -> None:
    try:
        found = fill_up(pool, tmp_path / "disk")
    except PermissionError:
        found = filled_up_apart(tmp_path)
    count = tally("a full disk while saving")
    assert len(found) == len(WAYS)
    for said, seconds, kept, tidy, again in (one for answers in found for one in answers):
        good = "could not be written" in said and "No space left" in said and kept and tidy and again
        count.add(good, seconds=seconds)
        assert good, (said, kept, tidy, again)
