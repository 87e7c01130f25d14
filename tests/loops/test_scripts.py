"""A script through ``zg.prepare`` on two ranks prints and saves what it does in one process on the whole batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.harness import sliced
from tests.loops import scripts
from tests.loops.scripts import Seen, unprepared
from tests.pool import Pool


def prepared(name: str, stage: int, options: dict[str, Any]) -> Seen:
    return scripts.run_by_rules(name, functools.partial(zg.prepare, stage=stage), options)


@sliced(
    "name, stage, options",
    [
        ("imagenet", 2, {"accumulation": 2}),
        ("nanogpt", 3, {"accumulation": 1}),
        ("gan", 3, {}),
        ("windows", 3, {}),
        ("scaled", 2, {"fused": True}),
        ("distillation", 3, {}),
        ("averaged", 3, {}),
        ("variational", 2, {}),
        ("two_parts", 1, {}),
    ],
    [
        ("imagenet", 2, {"accumulation": 1}),
        ("imagenet", 3, {"accumulation": 2}),
        *(("nanogpt", stage, {"accumulation": count}) for stage, count in ((2, 2), (3, 2), (3, 4))),
        ("gan", 2, {}),
        ("windows", 1, {"clips": False}),
        ("scaled", 3, {}),
    ],
)
def test_a_script_on_two_ranks_prints_and_saves_what_one_process_does(
    pool: Pool, name: str, stage: int, options: dict[str, Any]
) -> None:
    scripts.check_as_in_one_process(name, options, pool.run(2, prepared, name, stage, options))


def prepared_with(name: str, option: str, folder: str, options: dict[str, Any]) -> Seen:
    config = zg.Config()
    config.zero.stage = 3
    if option == "inductor":
        config.backend = "inductor"
    else:
        files = zg.OffloadTo("nvme", folder)
        config.memory.offload = zg.Offload(optimizer=files, parameters=files)
    seen: Seen = getattr(scripts, name)(functools.partial(zg.prepare, config=config), **options)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("option", ["inductor", "offload"])
@pytest.mark.parametrize(("name", "options"), [("nanogpt", {"accumulation": 2}), ("gan", {}), ("scaled", {})])
def test_options_of_the_graphs_change_no_number(
    pool: Pool, tmp_path: Path, name: str, option: str, options: dict[str, Any]
) -> None:
    printed, states = getattr(scripts, name)(unprepared, **options)
    for rank_printed, rank_states in pool.run(2, prepared_with, name, option, str(tmp_path), options):
        assert rank_printed == pytest.approx(printed, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(rank_states, states, rtol=1e-9, atol=1e-10)
