"""A script through ``zg.prepare`` on two ranks prints and saves what it does in one process on the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.loops import scripts
from tests.loops.scripts import Seen, unprepared
from tests.pool import Pool


def prepared(name: str, stage: int, options: dict[str, Any]) -> Seen:
    seen: Seen = getattr(scripts, name)(functools.partial(zg.prepare, stage=stage), **options)
    return seen


@pytest.mark.parametrize(
    ("name", "stage", "options"),
    [
        ("imagenet", 2, {"accumulation": 1}),
        ("imagenet", 3, {"accumulation": 2}),
        ("nanogpt", 3, {"accumulation": 1}),
        ("nanogpt", 2, {"accumulation": 2}),
        pytest.param("nanogpt", 3, {"accumulation": 4}, marks=pytest.mark.long),
        ("gan", 2, {}),
        pytest.param("gan", 3, {}, marks=pytest.mark.long),
        ("windows", 3, {}),
        ("windows", 1, {"clips": False}),
        ("scaled", 3, {}),
        pytest.param("scaled", 2, {"fused": True}, marks=pytest.mark.long),
        ("distillation", 3, {}),
        ("two_parts", 2, {}),
        pytest.param("dpo", 3, {}, marks=pytest.mark.long),
        pytest.param("adding_up", 1, {}, marks=pytest.mark.long),
        pytest.param("adding_up", 3, {}, marks=pytest.mark.long),
    ],
)
def test_a_script_on_two_ranks_prints_and_saves_what_one_process_does(
    pool: Pool, name: str, stage: int, options: dict[str, Any]
) -> None:
    printed, states = getattr(scripts, name)(unprepared, **options)
    for rank_printed, rank_states in pool.run(2, prepared, name, stage, options):
        assert rank_printed == pytest.approx(printed, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(rank_states, states, rtol=1e-9, atol=1e-12)
