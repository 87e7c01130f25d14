"""DeepSpeed's learning-rate schedules, as schedulers of torch; each reads its parameters under DeepSpeed's names.

DeepSpeed's schedules start counting after the first update, which uses the rate that the constructor set: update n,
from 0, sees the schedule's step n - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compat.sections import number, section, switch, whole
from zerograph.errors import ConfigError


class Schedule(LRScheduler):
    """A schedule by DeepSpeed's parameters; ``state_dict()`` holds plain numbers only.

    Raises:
        ConfigError: an unknown parameter, or one that the schedule cannot have.
    """

    defaults: Mapping[str, Any] = {}

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        name = f"scheduler.params of {type(self).__name__}"
        given = section(params, name, [*self.defaults, "last_batch_iteration"])
        if given.pop("last_batch_iteration", -1) != -1:
            raise ConfigError(f"{name}: last_batch_iteration is not read: load a state_dict() to go on")
        for key, value in given.items():
            if value == "auto":
                raise ConfigError(f"{name}.{key} is 'auto', which transformers' Trainer fills in: give a value")
        self.params = {**self.defaults, **given}
        for key, value in self.params.items():
            if value is REQUIRED:
                raise ConfigError(f"{name} lacks {key!r}: give it")
            if key.endswith(("steps", "step_size")) and value is not None:
                whole(value, f"{name}.{key}", low=0 if key == "decay_step_size" else 1)
        super().__init__(optimizer)

    def each(self, key: str) -> list[float]:
        """Return a parameter for every group, given as one number for all or a list of one for each."""
        value, groups = self.params[key], len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [number(value, f"scheduler.params.{key}")] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler.params.{key} has {len(value)} entries for {groups} parameter groups")
        return [number(one, f"scheduler.params.{key}") for one in value]

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group for the next update."""
        return [*self.rates(self.last_epoch - 1)]

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group at DeepSpeed's step ``step``; -1 for the first update."""
        raise NotImplementedError


class _Required:
    def __repr__(self) -> str:
        return "(must be given)"


REQUIRED = _Required()


def _warmup(params: Mapping[str, Any], step: int) -> float | None:
    """Return the progress of the warm-up, from 0 to 1; None after its end."""
    steps = max(2, int(params["warmup_num_steps"]))
    if step >= steps:
        return None
    if params["warmup_type"] == "linear":
        return step / steps
    return math.log(step + 1) / math.log(steps)


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, which stays; None (the default): the optimizer's own rate."""

    defaults = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    }

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        if params.get("warmup_type", "log") not in ("log", "linear"):
            raise ConfigError(f"warmup_type = {params['warmup_type']!r}: choose 'log' or 'linear'")
        super().__init__(optimizer, params)

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group."""
        low = self.each("warmup_min_lr")
        high = list(map(float, self.base_lrs)) if self.params["warmup_max_lr"] is None else self.each("warmup_max_lr")
        share = 0.0 if step < 0 else self.share(step)
        return [one + (other - one) * share for one, other in zip(low, high, strict=True)]

    def share(self, step: int) -> float:
        """Return the share of the way from the least to the largest rate, from 0 to 1."""
        warm = _warmup(self.params, step)
        return 1.0 if warm is None else warm


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then a line down to ``warmup_min_lr`` at ``total_num_steps``."""

    defaults = {"total_num_steps": REQUIRED, **WarmupLR.defaults, "warmup_max_lr": 0.001}

    def share(self, step: int) -> float:
        """Return the share of the way from the least to the largest rate, from 0 to 1."""
        warm, total = _warmup(self.params, step), int(self.params["total_num_steps"])
        if warm is not None:
            return warm
        return max(0.0, (total - step) / max(1.0, total - max(2, int(self.params["warmup_num_steps"]))))


class WarmupCosineLR(Schedule):
    """Parts of the optimizer's own rate: up from ``warmup_min_ratio``, then a half cosine to ``cos_min_ratio``."""

    defaults = {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    }

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group."""
        return [float(rate) * self._ratio(step) for rate in self.base_lrs]

    def _ratio(self, step: int) -> float:
        if step < 0:
            return 0.0
        warm, least = _warmup(self.params, step), self.params["warmup_min_ratio"]
        if warm is not None:
            return float(least + (1 - least) * warm)
        behind = max(2, int(self.params["warmup_num_steps"]))
        progress = min(1.0, (step - behind + 1) / max(1, int(self.params["total_num_steps"]) - behind))
        least = self.params["cos_min_ratio"]
        return float(max(0.0, least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2))


class LRRangeTest(Schedule):
    """Ever larger rates, to find where training breaks (Smith, arXiv 1803.09820)."""

    defaults = {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    }

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group."""
        interval = (step + 1) / int(self.params["lr_range_test_step_size"])
        if switch(self.params["lr_range_test_staircase"], "scheduler.params.lr_range_test_staircase"):
            interval = math.floor(interval)
        rate = number(self.params["lr_range_test_step_rate"], "scheduler.params.lr_range_test_step_rate")
        return [one * (1 + rate * interval) for one in self.each("lr_range_test_min_lr")]


class OneCycle(Schedule):
    """Up from ``cycle_min_lr`` to ``cycle_max_lr`` and back, then a decay; the first beta goes the other way.

    The second beta is 0.99 then, whatever the optimizer was made with, as in DeepSpeed.
    """

    defaults = {
        "cycle_min_lr": REQUIRED,
        "cycle_max_lr": REQUIRED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    }

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group."""
        low, high = self.each("cycle_min_lr"), self.each("cycle_max_lr")
        self._set_momentum(step)
        if step < self._total:
            height = 0.0 if step < 0 else self._height(step)
            return [one + (other - one) * height for one, other in zip(low, high, strict=True)]
        return [one / self._decay("decay_lr_rate", step) for one in low]

    @property
    def _total(self) -> int:
        first, second = self.params["cycle_first_step_size"], self.params["cycle_second_step_size"]
        return int(first) + int(first if second is None else second)

    def _height(self, step: int) -> float:
        """Return the place in the cycle: 0 at its ends, 1 at its top."""
        first, now = int(self.params["cycle_first_step_size"]), (step + 1) % self._total
        rising = now <= first
        height = now / first if rising else (self._total - now) / (self._total - first)
        stairs, second = self.params["cycle_first_stair_count"], self.params["cycle_second_stair_count"]
        if not rising and second is not None:
            stairs = second
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height

    def _decay(self, rate: str, step: int) -> float:
        size = self.params["decay_step_size"]
        return 1 + self.params[rate] * (step - self._total + 1) / size if size else 1.0

    def _set_momentum(self, step: int) -> None:
        if not self.params["cycle_momentum"] or "betas" not in self.optimizer.defaults:
            return
        low, high = self.each("cycle_min_mom"), self.each("cycle_max_mom")
        for group, one, other in zip(self.optimizer.param_groups, low, high, strict=True):
            if step < 0:
                momentum = one
            elif step < self._total:
                momentum = other - (other - one) * self._height(step)
            else:
                momentum = other * self._decay("decay_mom_rate", step)
            group["betas"] = (momentum, 0.99)


SCHEDULES: Mapping[str, type[Schedule]] = {
    one.__name__: one for one in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
