"""Metrics of torchmetrics in a loop of zg.prepare are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import zerograph as zg
from tests.loops.scripts import Prepare, prepare_at, samples, seeded, unprepared
from tests.pool import Pool

torchmetrics: Any = pytest.importorskip("torchmetrics", reason="needs torchmetrics")


def measured(prepare: Prepare) -> list[float]:
    """Train, and return metrics of global tensors, of plain ones and of numbers."""
    model = seeded(lambda: nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(11, 6), batch_size=4))
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
    seen, losses = torchmetrics.SumMetric(), torchmetrics.CatMetric()
    matrix = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)
    for x, y in loader:
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy.update(output.detach(), y)
        seen.update(len(x))
        losses.update(loss.item())
        matrix.update(torch.tensor(output.argmax(1).tolist()), torch.tensor(y.tolist()))
    return [*map(float, (accuracy.compute(), seen.compute(), *losses.compute(), *matrix.compute().flatten()))]


def measured_rows_of_ranks() -> float:
    """Return how many rows metrics have seen where each rank cuts its own."""
    model = zg.prepare(nn.Linear(6, 4))
    x = torch.ones(2, 6)
    model(x)
    seen = torchmetrics.SumMetric()
    seen.update(len(x))
    return float(seen.compute())


def both() -> tuple[list[float], float]:
    return measured(prepare_at(1)), measured_rows_of_ranks()


def test_metrics_count_each_sample_once(pool: Pool) -> None:
    expected = measured(unprepared)
    for metrics, rows in pool.run(2, both):
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert rows == 2 * 2
