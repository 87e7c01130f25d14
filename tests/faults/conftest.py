"""Fixtures of the tests of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.survival_table import PROPERTY, Tally
from tests.runtime.conftest import pool as pool


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Tally]]:
    """``tally("fault in a few words").add(survived)``: a row of the table that the run ends with."""
    made: list[Tally] = []

    def start(fault: str) -> Tally:
        made.append(Tally(fault))
        return made[-1]

    yield start
    # Properties of the item travel with its report, from pytest-xdist's workers too.
    request.node.user_properties.extend((PROPERTY, one.text()) for one in made)
