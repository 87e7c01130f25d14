"""Loss scaling for fp16: the options of ``torch.amp.GradScaler``, and the scale as state of the step graph.

The scale is a tensor that the step reads and writes, like a moment of the optimizer. The graph multiplies the loss by
it and divides the reduced gradients. If one of them is infinite or NaN on any rank, the update is skipped on all ranks.
Then the scale is lowered or raised (pass ``skip_overflowed_update``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import ConfigError

_TRACKERS = {"scale": torch.float32, "growth_tracker": torch.int32, "hysteresis_tracker": torch.int32}
_LARGEST = torch.finfo(_TRACKERS["scale"]).max


class GradScaler:
    """Dynamic loss scaling. Give it to ``config.precision.grad_scaler``; the graph does the rest.

    Args:
        init_scale: the scale of the first step.
        growth_factor: factor for the scale after ``growth_interval`` steps in a row without overflow.
        backoff_factor: factor for the scale after a step with overflow, whose update is skipped. Each of several
            optimizers skips its update if its own gradients overflow.
        growth_interval: number of steps.
        enabled: False for no scaling.
        min_scale: lower bound of the scale.
        hysteresis: number of overflows since the last growth from which on each one lowers the scale: 1 as in
            ``torch.amp.GradScaler``, 2 to tolerate one as in Megatron-LM.
        growth_delay: number of steps, at the beginning and after an overflow, that do not count for
            ``growth_interval``: 1 as DeepSpeed counts.

    Raises:
        ConfigError: an argument is out of range.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        hysteresis: int = 1,
        growth_delay: int = 0,
    ) -> None:
        for name, value in (
            *(("init_scale", init_scale), ("growth_factor", growth_factor), ("backoff_factor", backoff_factor)),
            ("min_scale", min_scale),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name} = {value!r:.60}: give a number")
        for name, count in (
            *(("growth_interval", growth_interval), ("hysteresis", hysteresis), ("growth_delay", growth_delay)),
        ):
            if isinstance(count, bool) or not isinstance(count, int):
                raise ConfigError(f"{name} = {count!r:.60}: give a whole number")
        if not isinstance(enabled, bool):
            raise ConfigError(f"enabled = {enabled!r:.60}: choose True or False")
        for good, complaint in (
            (0 < init_scale <= _LARGEST, f"init_scale = {init_scale}: give a finite number above 0, which fp32 has"),
            (growth_factor > 1, f"growth_factor = {growth_factor}: give a number above 1"),
            (0 < backoff_factor < 1, f"backoff_factor = {backoff_factor}: give a number between 0 and 1"),
            (growth_interval >= 1, f"growth_interval = {growth_interval}: give a number of steps, 1 or more"),
            (0 <= min_scale <= init_scale, f"min_scale = {min_scale}: give a number from 0 to init_scale"),
            (hysteresis >= 1, f"hysteresis = {hysteresis}: give a number of overflows, 1 or more"),
            (growth_delay >= 0, f"growth_delay = {growth_delay}: give a number of steps"),
        ):
            if not good:
                raise ConfigError(complaint)
        self.init_scale, self.enabled = float(init_scale), enabled
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.hysteresis, self.growth_delay = min_scale, hysteresis, growth_delay
        self._tensors: dict[str, Tensor] = {}

    def get_scale(self) -> float:
        """Return the scale of the next step; this waits for its device."""
        return float(self._tensors["scale"]) if self._tensors else self.init_scale

    def tensors(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the 0-d tensors that the step reads and writes, by name, on ``device``."""
        if not self._tensors:
            values = (self.init_scale, -self.growth_delay, self.hysteresis)
            self._tensors = {
                name: torch.tensor(value, dtype=dtype, device=device)
                for (name, dtype), value in zip(_TRACKERS.items(), values, strict=True)
            }
        elif self._tensors["scale"].device != device:
            self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return self._tensors

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its trackers, under the names of ``torch.amp.GradScaler``."""
        trackers = {f"_{name}": int(tensor) for name, tensor in self._tensors.items() if name != "scale"}
        fresh = {"_growth_tracker": -self.growth_delay, "_hysteresis_tracker": self.hysteresis}
        return {"scale": self.get_scale(), **fresh, **trackers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from :meth:`state_dict` of this class or of ``torch.amp.GradScaler``.

        Only the scale and its trackers are loaded, not the options.

        Raises:
            ConfigError: ``state`` is not such a state.
        """
        self.check_state(state)
        tensors = self.tensors(torch.device("cpu")) if not self._tensors else self._tensors
        tensors["scale"].fill_(float(state["scale"]))
        tensors["growth_tracker"].fill_(int(state.get("_growth_tracker", 0)))
        tensors["hysteresis_tracker"].fill_(int(state.get("_hysteresis_tracker", self.hysteresis)))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check a state for :meth:`load_state_dict`.

        Raises:
            ConfigError: ``state`` is not a state of a scaler.
        """
        if not isinstance(state, Mapping) or "scale" not in state:
            has = ", ".join(map(str, state)) or "no entries" if isinstance(state, Mapping) else f"{state!r:.60}"
            raise ConfigError(f"not a state of a GradScaler: it has {has}, but no scale")
        scale = state["scale"]
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 <= scale < float("inf"):
            raise ConfigError(f"scale = {scale!r:.60}: give a finite number")
        for name in ("_growth_tracker", "_hysteresis_tracker"):
            count = state.get(name, 0)
            if isinstance(count, bool) or not isinstance(count, int) or not -(2**31) <= count < 2**31:
                raise ConfigError(f"{name} = {count!r:.60}: give a number of steps")

    def __repr__(self) -> str:
        # Ranks compare their configurations by it, so it has no state.
        return (
            f"{type(self).__name__}(init_scale={self.init_scale}, growth_factor={self.growth_factor}, "
            f"backoff_factor={self.backoff_factor}, growth_interval={self.growth_interval}, enabled={self.enabled}, "
            f"min_scale={self.min_scale}, hysteresis={self.hysteresis}, growth_delay={self.growth_delay})"
        )


class StaticGradScaler(GradScaler):
    """Loss scaling with a constant scale. An update whose gradients overflow is skipped as with :class:`GradScaler`.

    Args:
        scale: the scale.

    Raises:
        ConfigError: ``scale`` is no finite number above 0.
    """

    dynamic = False

    def __init__(self, scale: float) -> None:
        super().__init__(init_scale=scale)

    def __repr__(self) -> str:
        return f"StaticGradScaler({self.init_scale})"
