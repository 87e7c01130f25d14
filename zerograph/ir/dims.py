"""Dynamic dimensions of inputs, and what the symbols of a graph stand for."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

Size = int | torch.SymInt

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
        along: the mesh dimensions that split the rows, outermost first. With micro-batches the last one is time.
        micro_batches: number of micro-batches into which each rank's rows are cut.
        largest: largest size seen or declared; memory is predicted for it.
        largest_part: the same of the rows of one rank; for row dimensions only.
        minimum, maximum: limits that the user declared; a call outside of them is an error. For row dimensions they are
            those of the rows of one rank.
    """

    name: str
    hint: int
    rows: bool = False
    pieces: int = 1
    along: tuple[int, ...] = ()
    micro_batches: int = 1
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
        dim: name of the dimension; empty for ``"position"``.
        kind: ``"all"`` for the global size, ``"rows"`` for the rows of this part, ``"start"`` for the number of rows
            of the parts before it, ``"of"`` for the rows of the part at ``place``, ``"position"`` for the position of
            this rank along the mesh dimension ``along``.
        along: the mesh dimensions that split the rows so far, outermost first. The last one divides the part that the
            others make.
        place: position along the last of them; for ``"of"`` only.
        micro_batches: the last of them is time, with so many places; 0 for a dimension of ranks.
    """

    dim: str
    kind: Literal["all", "rows", "start", "of", "position"]
    along: tuple[int, ...] = ()
    place: int = 0
    micro_batches: int = 0

    def __str__(self) -> str:
        if self.micro_batches:
            words = {"start": "before this micro-batch", "of": f"of micro-batch {self.place}"}
            return f"rows of this rank {words.get(self.kind, 'in this micro-batch')}, of {self.dim}"
        words = {
            "all": f"global size {self.dim}",
            "rows": f"rows of this rank, of {self.dim}",
            "start": f"rows of {self.dim} on the ranks before this one",
            "of": f"rows of rank {self.place}, of {self.dim}",
            "position": "position of this rank",
        }
        is_line = not self.along or (self.along == (0,) and self.kind != "position")
        return words[self.kind] + ("" if is_line else f" along mesh dimension {self.along[-1]}")

    def value(self, rows: Sequence[int], shape: Sequence[int], position: Sequence[int]) -> int:
        """Return the value in a call.

        Args:
            rows: rows of each part, of all mesh dimensions that split them; for another dimension its one size.
            shape: number of ranks along each mesh dimension.
            position: position of this rank along each.
        """
        if self.kind == "all":
            return sum(rows)
        if self.kind == "position":
            return position[self.along[0]]
        *outer, last = self.along
        part = list(rows)
        for dim in outer:
            part = _chunks(part, shape[dim])[position[dim]]
        each = [sum(chunk) for chunk in _chunks(part, shape[last])]
        if self.kind == "start":
            return sum(each[: position[last]])
        return each[self.place if self.kind == "of" else position[last]]

    def value_in(self, number: int, rows: int) -> int:
        """Return the value in the micro-batch of this number, of a rank that holds ``rows`` rows.

        The first ``rows % micro_batches`` micro-batches have one row more than the others.
        """
        fewer, more = divmod(rows, self.micro_batches)
        return fewer * number + min(number, more) if self.kind == "start" else fewer + (number < more)


def _chunks(rows: list[int], count: int) -> list[list[int]]:
    size = len(rows) // count
    return [rows[at * size : (at + 1) * size] for at in range(count)]


@dataclass(frozen=True)
class SizeGuard:
    """A condition on global sizes that a trace relied on.

    Attributes:
        condition: the condition in Python, over names of dimensions.
        symbols: the names in it.
        line, code: the user's line that depends on it.
        fixes: it is an equality that one size only fulfils: the program needs that size as a number.
    """

    condition: str
    symbols: frozenset[str]
    line: str
    code: str
    fixes: bool = False

    def __post_init__(self) -> None:
        _arithmetic(self.condition)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the condition holds for sizes by name."""
        code = _arithmetic(self.condition)
        return bool(eval(code, {"math": math, "__builtins__": {"min": min, "max": max}}, dict(sizes)))


_ARITHMETIC = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.BinOp),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Pow, ast.Name, ast.Load),
)
_ROUNDING = ("math.floor", "math.ceil", "math.trunc")


@functools.lru_cache(maxsize=4096)
def _arithmetic(text: str) -> Any:
    """Return the code of a condition on sizes, which may come from a file.

    Raises:
        ValueError: it is not arithmetic only.
    """
    try:
        tree = ast.parse(text, mode="eval")
        if all(map(_is_arithmetic, ast.walk(tree))):
            return compile(tree, "<condition>", "eval")
    except (SyntaxError, RecursionError, MemoryError):
        pass
    raise ValueError(f"{text!r:.80} is not arithmetic")


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("min", "max", *_ROUNDING) and not node.keywords
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in _ROUNDING
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    return isinstance(node, _ARITHMETIC)
