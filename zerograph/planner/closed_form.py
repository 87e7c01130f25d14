"""What a training job's model states take, in closed form: ZeRO (arXiv 1910.02054), sections 3.1 and 5.

Model states are parameters, gradients and optimizer state. With mixed precision and Adam a parameter takes 2 bytes,
its gradient 2, and its optimizer state K = 12: fp32 master, momentum and variance. In fp32 these are 4, 4 and 8. What
a stage splits between N ranks is divided by N; activations, temporary buffers and fragments are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zerograph.errors import ConfigError

Precision = Literal["mixed", "fp32"]

_BYTES: dict[str, tuple[int, int, int]] = {"mixed": (2, 2, 12), "fp32": (4, 4, 8)}


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank, fractions kept.

    Attributes:
        parameters: in the dtype that they are computed with.
        gradients: in that dtype.
        optimizer_state: masters, where there are any, and moments.
    """

    parameters: float
    gradients: float
    optimizer_state: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_state


def model_states(parameters: float, world_size: int, stage: int, precision: Precision = "mixed") -> ModelStates:
    """Bytes of model states on each of ``world_size`` ranks, for Adam; Table 1 and Figure 1 of the paper.

    Args:
        parameters: how many there are.
        stage: 1, 2 or 3, or 0 for plain data parallel.
        precision: ``"mixed"`` (16-bit with fp32 masters) or ``"fp32"``.

    Raises:
        ConfigError: a number that is none of these.
    """
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"stage = {stage!r}: choose 1, 2 or 3, or 0 for plain data parallel")
    if world_size < 1 or not 0 < parameters < math.inf:
        raise ConfigError(f"{parameters:g} parameters on {world_size} ranks: give finite numbers above 0")
    if precision not in _BYTES:
        raise ConfigError(f"precision = {precision!r}: choose {' or '.join(map(repr, _BYTES))}")
    per_parameter, per_gradient, per_state = _BYTES[precision]
    return ModelStates(
        parameters * per_parameter / (world_size if stage >= 3 else 1),
        parameters * per_gradient / (world_size if stage >= 2 else 1),
        parameters * per_state / (world_size if stage >= 1 else 1),
    )
