"""Threads of updates on the CPU: a rank's share of the cores, for the time of a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import fx

from zerograph.ops.offload import TRANSFER, WAIT_TRANSFER
from zerograph.runtime.backends import inductor
from zerograph.runtime.executor import Executor
from zerograph.runtime.offload import threads


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)), raising=False)
    monkeypatch.setattr(threads, "_CGROUP", Path("nowhere"))
    return 24


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 24),
        ({"cpu.max": "max 100000\n"}, 24),
        ({"cpu.max": "1650000 100000\n"}, 16),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 24),
    ],
)
@pytest.mark.usefixtures("cores")
def test_cores_are_those_of_the_affinity_and_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], usable: int
) -> None:
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.usable_cores() == usable


def step(*, offloads: bool) -> tuple[Executor, list[int]]:
    """A step that notes the threads with which it runs."""
    seen: list[int] = []
    graph = fx.Graph()
    if offloads:
        carried = graph.call_function(TRANSFER, (torch.zeros(2), torch.float32, torch.device("cpu")))
        graph.call_function(WAIT_TRANSFER, (carried,))
    graph.output(())
    module = fx.GraphModule(torch.nn.Module(), graph)

    def run(*_: Any) -> list[torch.Tensor]:
        seen.append(torch.get_num_threads())
        return []

    return Executor(MagicMock(), module, run, (), (), {}, torch.zeros((), dtype=torch.int64)), seen


@pytest.mark.parametrize(("ranks", "wanted"), [(None, 6), ("2", 12), ("24", 2)])
@pytest.mark.usefixtures("cores")
def test_a_step_with_offloaded_shards_uses_the_cores_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, wanted: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with threads.threads(2):
        for offloads in (True, False):
            executor, seen = step(offloads=offloads)
            executor([], {}, 0, "step 1", {})
            assert seen == [wanted if offloads else 2]
            assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("cores")
def test_pieces_of_its_updates_are_compiled_for_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes the number of threads into loops for the CPU."""
    seen: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(inductor, "share", lambda tasks: seen.append(torch.get_num_threads()) or {})
    for offloads in (True, False):
        executor, _ = step(offloads=offloads)
        with threads.threads(2):
            inductor.compile_pieces(executor.graph, lambda graph: list(graph.nodes)[:-1])
    assert seen == [24, 2]
