"""Dynamic dimensions of inputs, and what the symbols of a graph stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

# A dimension of size 0 or 1 is static, as in torch: operators treat these sizes differently.
SMALLEST_DYNAMIC = 2


@dataclass(frozen=True)
class Dim:
    """A dimension of inputs whose size may differ between calls; stands for it in shapes.

    Attributes:
        name: name of its symbol, such as ``"s0"``.
        hint: size that the step is traced with.
        rows: dimension 0 of plain inputs, of which ranks may hold unequal numbers.
        pieces: number of parts that ranks and micro-batches make of the dimension; divides the hint.
        largest: largest size seen or declared; memory is predicted for it.
        largest_part: the same of the rows of one rank; for row dimensions only.
        minimum, maximum: limits that the user declared; a call outside of them is an error. For row dimensions they are
            those of the rows of one rank.
    """

    name: str
    hint: int
    rows: bool = False
    pieces: int = 1
    largest: int = field(default=0, compare=False)
    largest_part: int = field(default=0, compare=False)
    minimum: int = 0
    maximum: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def declared(self) -> bool:
        """True if the user declared a maximum, which no call exceeds."""
        return self.maximum is not None

    def holds(self, rows: Sequence[int]) -> bool:
        """Return whether sizes are at most the largest that memory is predicted for.

        Args:
            rows: as for :meth:`SizeInput.value`.
        """
        return sum(rows) <= self.largest and (not self.rows or max(rows) <= self.largest_part)

    def of(self, rows: Sequence[int]) -> Dim:
        """Return this dimension with the largest size of one call; unchanged if its maximum is declared."""
        return self if self.declared else replace(self, largest=sum(rows), largest_part=max(rows))

    def grown(self, rows: Sequence[int]) -> Dim:
        """Return this dimension after a further call."""
        largest, part = max(self.largest, sum(rows)), max(self.largest_part, max(rows))
        if (largest, part) == (self.largest, self.largest_part):
            return self
        return replace(self, largest=largest, largest_part=part)


@dataclass(frozen=True)
class SizeInput:
    """The meaning of a symbol of a graph; a step computes its value from the sizes of each call.

    Attributes:
        dim: name of the dimension.
        kind: ``"all"`` for the global size, ``"rows"`` for the rows of this rank, ``"start"`` for the number of rows
            of the ranks before this one, ``"of"`` for the rows of the rank at ``place``, ``"position"`` for the
            position of this rank along the mesh dimension that ``dim`` numbers.
        place: position along the mesh dimension that the rows are split over; for ``"of"`` only.
    """

    dim: str
    kind: Literal["all", "rows", "start", "of", "position"]
    place: int = 0

    def __str__(self) -> str:
        words = {
            "all": f"global size {self.dim}",
            "rows": f"rows of this rank, of {self.dim}",
            "start": f"rows of {self.dim} on the ranks before this one",
            "of": f"rows of rank {self.place}, of {self.dim}",
            "position": f"position of this rank along mesh dimension {self.dim}",
        }
        return words[self.kind]

    def value(self, rows: Sequence[int], place: int) -> int:
        """Return the value in a call.

        Args:
            rows: rows of each rank along the mesh dimension that splits them; for another dimension its one size.
            place: position of this rank along that mesh dimension.
        """
        if self.kind == "all" or len(rows) == 1:
            return 0 if self.kind == "start" else sum(rows)
        if self.kind == "rows":
            return rows[place]
        return sum(rows[:place]) if self.kind == "start" else rows[self.place]


@dataclass(frozen=True)
class SizeGuard:
    """A condition on global sizes that a trace relied on.

    Attributes:
        condition: the condition in Python, over names of dimensions.
        symbols: the names in it.
        line, code: the user's line that depends on it.
    """

    condition: str
    symbols: frozenset[str]
    line: str
    code: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the condition holds for sizes by name."""
        return bool(eval(self.condition, {"math": math, "__builtins__": {"min": min, "max": max}}, dict(sizes)))
