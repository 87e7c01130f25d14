"""Memory of model states in closed form: ZeRO (arXiv 1910.02054), sections 3.1 and 5.

Model states are parameters, gradients and optimizer state. With mixed precision and Adam a parameter takes 2 bytes,
its gradient 2, and its optimizer state K = 12: fp32 master, momentum and variance. In fp32 these are 4, 4 and 8. States
that a stage splits between N ranks are divided by N; activations, temporary buffers and fragmentation do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from zerograph.errors import ConfigError

Precision = Literal["mixed", "fp32"]

_BYTES: dict[str, tuple[int, int, int]] = {"mixed": (2, 2, 12), "fp32": (4, 4, 8)}


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank, as fractional numbers.

    Attributes:
        parameters: in the compute dtype.
        gradients: in the compute dtype.
        optimizer_state: masters, if there are any, and moments.
    """

    parameters: float
    gradients: float
    optimizer_state: float

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.parameters + self.gradients + self.optimizer_state


def model_states(parameters: float, world_size: int, stage: int, precision: Precision = "mixed") -> ModelStates:
    """Return the bytes of model states on each of ``world_size`` ranks, for Adam; Table 1 and Figure 1 of the paper.

    Args:
        parameters: their number.
        stage: 1, 2 or 3, or 0 for plain data parallel.
        precision: ``"mixed"`` (16-bit with fp32 masters) or ``"fp32"``.

    Raises:
        ConfigError: a number or precision is out of range.
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


def closed_form_table(
    parameters: float, world_sizes: Sequence[int], precision: Precision, capacity: int | None
) -> Table:
    """Return model states in GB (10^9 bytes) by number of ranks and stage; a cell above ``capacity`` bytes is red."""
    table = Table("ranks", box=box.SIMPLE_HEAD)
    stages = ("off", "stage 1", "stage 2", "stage 3")
    for name in stages:
        table.add_column(f"{name} GB", justify="right")
    for size in world_sizes:
        cells = []
        for stage in range(len(stages)):
            total = model_states(parameters, size, stage, precision).total
            style = "" if capacity is None else "green" if total <= capacity else "red"
            cells.append(Text(_gigabytes(total), style=style))
        table.add_row(f"{size:,}", *cells)
    return table


def _gigabytes(count: float) -> str:
    """Format bytes in GB with the digits of the paper's Table 1; whole numbers from 100."""
    number = count / 1e9
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 2 else f"{number:.2f}"
