"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of worker processes for the whole run."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The machine's few cores belong to the workers; and sums come out in one order."""
    torch.set_num_threads(1)
