"""Jobs are what is tested: each call has one of its own."""

from __future__ import annotations

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool(workers: Pool) -> Pool:
    """The pool of the whole run."""
    return workers
