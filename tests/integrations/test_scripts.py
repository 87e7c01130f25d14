"""Example scripts on two ranks have the losses of one process on the whole batch."""

from __future__ import annotations

import pytest

from benchmarks.front_doors.door import missing
from benchmarks.front_doors.losses import GOAL, SCRIPTS, Script, differences
from tests.pool import Pool


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_script_has_the_losses_of_one_process(pool: Pool, script: Script) -> None:
    if absent := missing(script.needs):
        pytest.skip(f"needs {', '.join(absent)}")
    accumulation, stage = (2, 3) if script.accumulates else (1, 3)
    _, difference = differences(pool, script, accumulation, stage, 9)
    assert difference < GOAL
