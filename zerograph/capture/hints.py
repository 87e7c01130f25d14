"""Sizes that symbolic dimensions are traced with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from zerograph.ir.dims import Dim, SizeGuard


def other_hints(
    dims: Sequence[Dim], hints: Mapping[str, int], guards: Sequence[SizeGuard], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return hints for which all guards decide as for the sizes of the call."""
    hints = dict(hints)
    for dim in dims:
        mine = [guard for guard in guards if dim.name in guard.symbols]
        if all(guard.holds(hints) == guard.holds(sizes) for guard in mine):
            continue
        size, pieces = sizes[dim.name], dim.pieces
        if any(guard.fixes for guard in mine):
            hints[dim.name] = size if size % pieces == 0 else hints[dim.name]
            continue
        near = [prime * factor * pieces for factor in (1, 2, 4, 8, 16) for prime in _primes_near(size, factor * pieces)]
        for hint in [*near, size]:
            if hint % pieces == 0 and all(
                guard.holds({**hints, dim.name: hint}) == guard.holds(sizes) for guard in mine
            ):
                hints[dim.name] = hint
                break
    return hints


def _primes_near(size: int, factor: int) -> list[int]:
    """Return primes whose product with ``factor`` is about ``size``, nearest first."""
    around = sorted(range(3, 2 * size // factor + 16), key=lambda number: abs(number * factor - size))
    primes = (number for number in around if all(number % low for low in range(2, math.isqrt(number) + 1)))
    return list(itertools.islice(primes, 8))
