"""DeepSpeed's schedules give the learning rates that its documentation says, update by update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zerograph.compat.schedules import SCHEDULES
from zerograph.errors import ConfigError


def optimizer(lr: float = 0.01) -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=lr)


def rates(kind: str, params: dict[str, Any], updates: int) -> list[float]:
    """The learning rate that each update sees."""
    chosen = optimizer()
    schedule = SCHEDULES[kind](chosen, params)
    seen = []
    for _ in range(updates):
        seen.append(chosen.param_groups[0]["lr"])
        chosen.step()
        schedule.step()
    return seen


def test_warmup_rises_linearly_behind_the_first_update_and_stays() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", params, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def test_warmup_is_logarithmic_and_ends_at_the_optimizers_rate_by_default() -> None:
    expected = [0, *(0.01 * math.log(1 + step) / math.log(4) for step in range(4)), 0.01]
    assert rates("WarmupLR", {"warmup_num_steps": 4}, 6) == pytest.approx(expected)


def test_warmup_decay_falls_to_the_smallest_rate_at_the_last_step() -> None:
    params = {"total_num_steps": 6, "warmup_max_lr": 0.4, "warmup_num_steps": 2, "warmup_type": "linear"}
    assert rates("WarmupDecayLR", params, 8) == pytest.approx([0, 0, 0.2, 0.4, 0.3, 0.2, 0.1, 0])


def test_warmup_cosine_is_a_half_cosine_of_the_optimizers_rate() -> None:
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.1}
    cosine = [0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2) for step in (1, 2, 3, 4, 4)]
    assert rates("WarmupCosineLR", params, 8) == pytest.approx([0, 0, 0.005, *cosine])


def test_range_test_multiplies_the_rate_every_interval() -> None:
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}
    assert rates("LRRangeTest", params, 5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_moves_the_rate_up_and_down_and_the_momentum_against_it() -> None:
    chosen = optimizer()
    schedule = SCHEDULES["OneCycle"](chosen, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2})
    seen = []
    for _ in range(5):
        seen.append((chosen.param_groups[0]["lr"], *chosen.param_groups[0]["betas"]))
        chosen.step()
        schedule.step()
    expected = [(0.1, 0.8), (0.3, 0.85), (0.5, 0.8), (0.3, 0.85), (0.1, 0.9)]
    assert [row[0] for row in seen] == pytest.approx([lr for lr, _ in expected])
    assert [row[1] for row in seen] == pytest.approx([beta for _, beta in expected])
    assert {row[2] for row in seen} == {0.99}


def test_a_schedule_goes_on_from_its_state() -> None:
    params = {"warmup_max_lr": 0.5, "warmup_num_steps": 5}
    whole = rates("WarmupLR", params, 6)
    first, second = optimizer(), optimizer()
    schedule = SCHEDULES["WarmupLR"](first, params)
    for _ in range(3):
        first.step()
        schedule.step()
    resumed = SCHEDULES["WarmupLR"](second, params)
    resumed.load_state_dict(schedule.state_dict())
    second.step()
    resumed.step()
    assert second.param_groups[0]["lr"] == pytest.approx(whole[4])


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("WarmupDecayLR", {}, "lacks 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_step": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "'auto', which transformers' Trainer fills in"),
        ("WarmupLR", {"warmup_type": "cubic"}, "choose 'log' or 'linear'"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, "2 entries for 1 parameter groups"),
    ],
)
def test_what_a_schedule_cannot_have_is_named(kind: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SCHEDULES[kind](optimizer(), params)
