"""The closed form as a table for a terminal; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from zerograph.planner.closed_form import Precision, model_states


def closed_form(parameters: float, world_sizes: Sequence[int], precision: Precision, capacity: int | None) -> Table:
    """Return model states in GB (10^9 bytes) by number of ranks and stage; what does not fit ``capacity`` is red."""
    table = Table("ranks", box=box.SIMPLE_HEAD)
    stages = ("off", "stage 1", "stage 2", "stage 3")
    for name in stages:
        table.add_column(f"{name} GB", justify="right")
    for size in world_sizes:
        cells = []
        for stage in range(len(stages)):
            total = model_states(parameters, size, stage, precision).total
            style = "" if capacity is None else "green" if total <= capacity else "red"
            cells.append(Text(gigabytes(total), style=style))
        table.add_row(f"{size:,}", *cells)
    return table


def gigabytes(count: float) -> str:
    """Format bytes in GB with the digits of the paper's Table 1; whole above 100."""
    number = count / 1e9
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 2 else f"{number:.2f}"
