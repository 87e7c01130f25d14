"""Loops on ranks share jobs: most of their time compiles operators, which are those of other loops."""

from __future__ import annotations

import pytest

from tests.pool import Pool, SharedJobs


@pytest.fixture(scope="session")
def pool(pool: Pool) -> SharedJobs:
    """The pool of the whole run."""
    return SharedJobs(pool)
