"""Learning-rate schedules in closed form, over torch's, and DeepSpeed's schedules under its names of parameters.

DeepSpeed's schedules start counting after the first update, which uses the rate that the constructor set: update n,
from 0, uses the schedule's step n - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compat.sections import Section, number, switch, whole
from zerograph.errors import ConfigError


class ClosedSchedule(LRScheduler):
    """A schedule whose rates depend only on the initial rates and on the number of the update."""

    def rates(self, base_lrs: Sequence[Any], step: int) -> list[Any]:
        """Return the learning rate of each group for update number ``step``, from 0.

        Args:
            base_lrs: the initial rate of each group.
            step: the number of the update.
        """
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the next update."""
        return self.rates(self.base_lrs, self.last_epoch)


class Schedule(ClosedSchedule):
    """A schedule with DeepSpeed's parameters; ``state_dict()`` holds plain numbers only.

    Attributes:
        defaults: the schedule's parameters, with the value of those that may be left out.

    Raises:
        ConfigError: a parameter does not exist, is missing, or cannot have its value.
    """

    defaults: Mapping[str, Any] = {}

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        name = f"scheduler.params of {type(self).__name__}"
        values = Section(params, name, [*self.defaults, "last_batch_iteration"])
        if values.pop("last_batch_iteration", -1) != -1:
            raise ConfigError(f"{name}: last_batch_iteration is not read: load a state_dict() to resume")
        self.params = {**self.defaults, **{key: values.value(key) for key in values}}
        for key, value in self.params.items():
            if value is REQUIRED:
                raise ConfigError(f"{name} lacks {key!r}: give it")
            if key.endswith(("steps", "step_size")) and value is not None:
                whole(value, f"{name}.{key}", low=0 if key == "decay_step_size" else 1)
        super().__init__(optimizer)

    def each(self, key: str) -> list[float]:
        """Return a parameter of every group: one number is for all groups, a list has one for each."""
        value, groups = self.params[key], len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [number(value, f"scheduler.params.{key}")] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler.params.{key} has {len(value)} entries for {groups} parameter groups")
        return [number(part, f"scheduler.params.{key}") for part in value]

    def rates(self, base_lrs: Sequence[Any], step: int) -> list[Any]:
        """Return the learning rate of each group for update number ``step``, from 0."""
        return self.rates_at([float(lr) for lr in base_lrs], step - 1)

    def rates_at(self, base_lrs: list[float], step: int) -> list[float]:
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
    """A warm-up from ``warmup_min_lr`` to ``warmup_max_lr`` (None: the optimizer's own rate), then a constant rate."""

    defaults = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        if params.get("warmup_type", "log") not in ("log", "linear"):
            raise ConfigError(f"warmup_type = {params['warmup_type']!r}: choose 'log' or 'linear'")
        super().__init__(optimizer, params)

    def rates_at(self, base_lrs: list[float], step: int) -> list[float]:
        """Return the learning rate of each group."""
        lows = self.each("warmup_min_lr")
        highs = base_lrs if self.params["warmup_max_lr"] is None else self.each("warmup_max_lr")
        share = 0.0 if step < 0 else self.share(step)
        return [low + (high - low) * share for low, high in zip(lows, highs, strict=True)]

    def share(self, step: int) -> float:
        """Return the fraction of the way from the smallest to the largest rate, from 0 to 1."""
        warm = _warmup(self.params, step)
        return 1.0 if warm is None else warm


class WarmupDecayLR(WarmupLR):
    """A warm-up as :class:`WarmupLR`'s, then a linear decay to ``warmup_min_lr`` at ``total_num_steps``."""

    defaults = {"total_num_steps": REQUIRED, **WarmupLR.defaults, "warmup_max_lr": 0.001}

    def share(self, step: int) -> float:
        """Return the fraction of the way from the smallest to the largest rate, from 0 to 1."""
        warm, total = _warmup(self.params, step), int(self.params["total_num_steps"])
        if warm is not None:
            return warm
        return max(0.0, (total - step) / max(1.0, total - max(2, int(self.params["warmup_num_steps"]))))


class WarmupCosineLR(Schedule):
    """A warm-up from ``warmup_min_ratio``, then a half cosine to ``cos_min_ratio``, both times the initial rate."""

    defaults = {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    }

    def rates_at(self, base_lrs: list[float], step: int) -> list[float]:
        """Return the learning rate of each group."""
        return [lr * self._ratio(step) for lr in base_lrs]

    def _ratio(self, step: int) -> float:
        if step < 0:
            return 0.0
        warm, low = _warmup(self.params, step), self.params["warmup_min_ratio"]
        if warm is not None:
            return float(low + (1 - low) * warm)
        warmup_steps = max(2, int(self.params["warmup_num_steps"]))
        decay_steps = max(1, int(self.params["total_num_steps"]) - warmup_steps)
        progress = min(1.0, (step - warmup_steps + 1) / decay_steps)
        low = self.params["cos_min_ratio"]
        return float(max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2))


class LRRangeTest(Schedule):
    """Rates that grow until training diverges, to find the largest usable one (Smith, arXiv 1803.09820)."""

    defaults = {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    }

    def rates_at(self, base_lrs: list[float], step: int) -> list[float]:
        """Return the learning rate of each group."""
        interval = (step + 1) / int(self.params["lr_range_test_step_size"])
        if switch(self.params["lr_range_test_staircase"], "scheduler.params.lr_range_test_staircase"):
            interval = math.floor(interval)
        rate = number(self.params["lr_range_test_step_rate"], "scheduler.params.lr_range_test_step_rate")
        return [low * (1 + rate * interval) for low in self.each("lr_range_test_min_lr")]


class OneCycle(Schedule):
    """A cycle from ``cycle_min_lr`` to ``cycle_max_lr`` and back, then a decay.

    The first beta moves in the opposite direction. The second beta is set to 0.99, as in DeepSpeed.
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

    def rates_at(self, base_lrs: list[float], step: int) -> list[float]:
        """Return the learning rate of each group, and set its betas."""
        lows, highs = self.each("cycle_min_lr"), self.each("cycle_max_lr")
        self._set_momentum(step)
        if step < self._total:
            height = 0.0 if step < 0 else self._height(step)
            return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]
        return [low / self._decay("decay_lr_rate", step) for low in lows]

    @property
    def _total(self) -> int:
        first, second = self.params["cycle_first_step_size"], self.params["cycle_second_step_size"]
        return int(first) + int(first if second is None else second)

    def _height(self, step: int) -> float:
        """Return the position in the cycle: 0 at its ends, 1 at its top."""
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
        lows, highs = self.each("cycle_min_mom"), self.each("cycle_max_mom")
        for group, low, high in zip(self.optimizer.param_groups, lows, highs, strict=True):
            if step < 0:
                momentum = low
            elif step < self._total:
                momentum = high - (high - low) * self._height(step)
            else:
                momentum = high * self._decay("decay_mom_rate", step)
            group["betas"] = (momentum, 0.99)


SCHEDULES: Mapping[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
