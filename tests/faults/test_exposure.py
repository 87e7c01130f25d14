"""Sockets and files of a job that others can reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import zerograph as zg
from tests.faults.lost_ranks import run
from tests.models import adam_step, batches, part
from zerograph.state.checkpoint.export import export

LISTEN = "0A"


def trained(folder: str) -> list[str]:
    """Does all that makes groups, and yields what this rank listens on then."""
    step = adam_step("mlp", 2, backend="eager")
    x, y = batches("mlp", 1)[0]
    step.compile(part(x), part(y))
    step(part(x), part(y))
    step.save(folder, asynchronous=True)
    step.wait_for_save()
    # All groups there are listen where gloo was told to, wherever the host's name leads.
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    return listening()


def listening() -> list[str]:
    """Addresses that this process listens on, in the kernel's hexadecimal digits."""
    sockets = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        rows = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for row in map(str.split, rows):
            if row[3] == LISTEN and f"socket:[{row[9]}]" in sockets:
                found.append(row[1].split(":")[0])
    return found


def test_ranks_of_one_machine_listen_on_it_alone(tmp_path: Path) -> None:
    found = run(2, None, trained, str(tmp_path / "checkpoint"), store="launcher")
    for answer in found:
        assert answer.value, answer.raised
        for address in answer.value:
            # 127.x.x.x, little-endian, and ::1.
            assert address.endswith("7F") or address == "0" * 24 + "01000000", address


@pytest.mark.parametrize("mask", [0o077, 0o027])
def test_files_are_for_whom_the_umask_says(tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGRAPH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "state").mkdir()
    before = os.umask(mask)
    try:
        step = adam_step("mlp", 2, backend="eager")
        step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", tmp_path / "state"))
        step(*map(part, batches("mlp", 1)[0]))
        step.save(tmp_path / "runs", keep=1)
        export(tmp_path / "runs", tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    kinds = {".state", ".safetensors", ".json", ""}
    assert {one.suffix for one in files} == kinds
    assert {oct(one.stat().st_mode & 0o777) for one in files} == {oct(0o666 & ~mask)}
    folders = [one for one in tmp_path.rglob("*") if one.is_dir() and one.name != "state"]
    assert {oct(one.stat().st_mode & 0o777) for one in folders} == {oct(0o777 & ~mask)}
