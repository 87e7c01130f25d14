"""Files that tensors rest in: what is written is read, with and without direct I/O, and what fails names the file."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import batches
from tests.state.test_offload import equal, fused_adamw, run, train_step
from zerograph.errors import OffloadError
from zerograph.runtime.offload import files
from zerograph.runtime.offload.buffers import BLOCK, Buffers
from zerograph.runtime.offload.files import open_file, reserve
from zerograph.runtime.offload.transfers import fill, read, write

# Several requests and a part of a block.
LARGE = 3 * 2**20 + 7


@pytest.fixture(params=["direct", "buffered"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file system takes O_DIRECT, and as where it refuses it."""
    if request.param == "buffered":
        opened = os.open

        def refuse(path: Any, flags: int, *mode: int) -> int:
            if flags & os.O_DIRECT:
                opened(path, flags & ~os.O_DIRECT, *mode)
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, *mode)

        monkeypatch.setattr(os, "open", refuse)
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    file = open_file(str(folder), 0, keep=False)
    values = [torch.randn(LARGE), torch.randn(3, 5, dtype=torch.float64), torch.empty(0)]
    extents = [reserve(file, value.shape, value.dtype) for value in values]
    for extent, value in zip(extents, values, strict=True):
        assert not read(extent).any()
        write(extent, value)
    assert all(torch.equal(read(extent), value) for extent, value in zip(extents, values, strict=True))
    fill(extents[0], 0.25)
    assert torch.equal(read(extents[0]), torch.full((LARGE,), 0.25))
    assert torch.equal(read(extents[1]), values[1])


def test_room_that_comes_back_is_used_again_and_filled_with_zeros(tmp_path: Path) -> None:
    file = open_file(str(tmp_path), 0, keep=False)
    first, second, third = (reserve(file, (BLOCK,), torch.float32) for _ in range(3))
    size = file.path.stat().st_size
    for extent in (first, second, third):
        write(extent, torch.ones(BLOCK))
    del first, second, extent
    again = reserve(file, (2 * BLOCK,), torch.float32)
    assert file.path.stat().st_size == size
    fill(again, 0.0, fast=True)
    assert not read(again).any()
    assert read(third).all()


def test_graphs_of_a_process_share_a_file(tmp_path: Path) -> None:
    assert open_file(str(tmp_path), 0, keep=False) is not open_file(str(tmp_path), 1, keep=False)
    file = open_file(str(tmp_path), 0, keep=False)
    assert open_file(f"{tmp_path}/.", 0, keep=False) is file
    assert os.listdir(tmp_path) == [file.path.name]


def test_a_file_that_an_earlier_process_of_the_number_has_left_stays(tmp_path: Path) -> None:
    name = open_file(str(tmp_path), 0, keep=True).path.name
    again = (
        f"import sys, os; from zerograph.runtime.offload.files import open_file; os.getpid = lambda: {os.getpid()}; "
    )
    again += "print(open_file(sys.argv[1], 0, keep=True).path.name)"
    other = subprocess.run([sys.executable, "-c", again, str(tmp_path)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() != name
    assert len(os.listdir(tmp_path)) == 2


def test_a_forked_child_writes_into_a_file_of_its_own(tmp_path: Path) -> None:
    def stored(value: float) -> Any:
        extent = reserve(open_file(str(tmp_path), 0, keep=False), (3,), torch.float32)
        write(extent, torch.full((3,), value))
        return extent

    first = stored(1.0)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            stored(2.0)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [read(one).tolist() for one in (first, reserve(first.file, (3,), torch.float32))] == [[1.0] * 3, [0.0] * 3]


def test_buffers_are_used_again_and_all_are_given_back() -> None:
    buffers = Buffers()
    one, other = buffers.take(10 * BLOCK), buffers.take(10 * BLOCK)
    place = one.data_ptr()
    # A view keeps them.
    view = one.view(torch.float32)[3:]
    del one
    third = buffers.take(10 * BLOCK)
    assert third.data_ptr() != place
    del view
    again = buffers.take(9 * BLOCK)
    assert again.data_ptr() == place
    assert place % BLOCK == 0
    del again, other, third
    gc.collect()
    assert not buffers._free


def test_training_is_the_same_without_direct_io(folder: Path) -> None:
    with_files, without = (run(train_step(place, fused_adamw, 1)) for place in (folder, None))
    assert equal(with_files, without)


def test_a_disk_that_fails_names_the_file_and_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train_step(tmp_path, fused_adamw, 1)
    first, second, third = batches("mlp", 3)
    step(*first)
    (name,) = os.listdir(tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(OffloadError, match=rf"{name} could not be written at byte .* \(Input/output error\)"):
            step(*second)
    # The disk is well again, what it holds is not.
    with pytest.raises(OffloadError, match=f"{name} could not be written"):
        step(*third)
    with pytest.raises(OffloadError, match=f"{name} could not be written"):
        step.state_dict()


def test_a_file_that_ends_too_early_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = files.open_file(str(tmp_path), 0, keep=False)
    extent = reserve(file, (2 * BLOCK,), torch.float32)
    write(extent, torch.ones(2 * BLOCK))
    os.truncate(file.path, BLOCK)
    with pytest.raises(OffloadError, match=f"{file.path.name} was truncated to 4,096 of 32,768 bytes"):
        read(extent)
