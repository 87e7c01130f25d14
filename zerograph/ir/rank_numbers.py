"""Whole numbers among the arguments of nodes that differ between ranks, as functions of the rank's position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankNumber:
    """A number that is linear in the position of the rank on the mesh.

    Attributes:
        steps: what each position along a mesh dimension adds; dimensions after the last entry add nothing.
        start: the number at position 0.
        limit: a number that is not in ``range(limit)`` is replaced by -1; None for no limit.
        most: a smaller number replaces this one; None for none.
    """

    steps: tuple[int, ...]
    start: int = 0
    limit: int | None = None
    most: RankNumber | None = None

    def at(self, position: Sequence[int]) -> int:
        """Return the number at a position on the mesh."""
        number = self.start + sum(step * index for step, index in zip(self.steps, position, strict=False))
        number = number if self.most is None else min(number, self.most.at(position))
        return number if self.limit is None or 0 <= number < self.limit else -1


# By position of the argument. A tuple has one entry for each number in an argument that is a list; None stands for a
# number, or a whole argument, that the graph computes from symbolic sizes.
RankArguments = Mapping[int, RankNumber | tuple[RankNumber | None, ...] | None]


def along(mesh_dim: int, step: int, start: int = 0, limit: int | None = None) -> RankNumber:
    """Return a number that depends on the position along one mesh dimension only."""
    return RankNumber((*(0 for _ in range(mesh_dim)), step), start, limit)
