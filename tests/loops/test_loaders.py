"""Loaders that ``zg.prepare`` splits, each rank's part read in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import zerograph as zg
from zerograph.ir.mesh import line
from zerograph.loops import loaders


def make() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True, num_workers=1, persistent_workers=True)


def two_epochs(loader: Any) -> list[list[int]]:
    torch.manual_seed(0)
    return [batch[0].tolist() for _ in range(2) for batch in loader]


def test_workers_that_stay_read_the_samples_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "agree_on_batch", lambda *_: None)
    monkeypatch.setattr(loaders, "agree", lambda *_: [[0]])
    parts = []
    for rank in range(2):
        job = SimpleNamespace(size=2, mesh=line(2, rank, "ranks"))
        monkeypatch.setattr(loaders, "join", lambda *_, job=job: job)
        parts.append(two_epochs(loaders.SplitLoader(make(), zg.Config())))
    assert [first + second for first, second in zip(*parts, strict=True)] == two_epochs(make())


@pytest.mark.parametrize("in_batch_sampler", [False, True])
def test_batches_of_a_distributed_sampler_are_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch, in_batch_sampler: bool
) -> None:
    monkeypatch.setattr(loaders.data, "batches", lambda loader, **_: iter(loader))
    dataset, read = TensorDataset(torch.arange(10)), list[int]()
    for rank in range(2):
        job = SimpleNamespace(size=2, mesh=line(2, rank, "ranks"))
        monkeypatch.setattr(loaders, "join", lambda *_, job=job: job)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, rank)
        batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if in_batch_sampler else {"sampler": sampler}
        loader: Any = DataLoader(dataset, **batches)
        read += [int(one) for batch in loaders.SplitLoader(loader, zg.Config()) for one in batch[0]]
    assert sorted(read) == list(range(10))
