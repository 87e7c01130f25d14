"""Plans of sequences of other lengths, and of the longest ones that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.base.progress import tell
from zerograph.base.sizes import show_bytes
from zerograph.compiler.input_layout import is_sequence, length_of
from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.planner.plan import Plan, tensors

# Lengths that are tried are multiples of this, as kernels prefer, unless the batch is shorter.
_UNIT = 128
# The longest sequences are found to this part of their length.
_PRECISION = 64


def own_length(batch: Any) -> int:
    """Return the number of positions of a batch's sequences.

    Raises:
        ConfigError: no input is a sequence.
    """
    length = length_of(("", tensor) for tensor in tensors(batch))[1]
    if not length:
        raise ConfigError(
            "plan(length=): no input is a sequence: tokens [batch, length], or [batch, length, channels]\n"
            "Leave length out, or pass such an input."
        )
    return length


def with_length(batch: Any, length: int) -> Any:
    """Return the batch with sequences of another length: inputs that have its positions in dimension 1 become empty.

    Raises:
        ConfigError: no input is a sequence.
    """
    before = own_length(batch)

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_sequence(x, before):
            return x
        return torch.empty((x.shape[0], length, *x.shape[2:]), dtype=x.dtype, device=x.device)

    return pytree.tree_map(resized, batch)


def longest(plan_at: Callable[[int], Plan], begin: int, ranks: int) -> Plan:
    """Return the plan of the longest sequences that fit; of the shortest that were tried if none do.

    Args:
        plan_at: plans sequences of a length.
        begin: the length that is tried first.
        ranks: number of ranks that split each sequence, which must divide the length.

    Raises:
        ZeroGraphError: as ``plan_at`` for the first length.
    """
    unit = math.lcm(ranks, _UNIT) if begin >= _UNIT else ranks
    length = max(begin // unit, 1) * unit
    tried = {length: plan_at(length)}
    reasons: dict[int, str] = {}
    while (length := _next(tried, reasons, unit)) > 0:
        tell("lengths", len(tried) + len(reasons), len(tried) + len(reasons) + 1, f"{length:,} positions")
        try:
            tried[length] = plan_at(length)
        except ZeroGraphError as error:
            reasons[length] = str(error).splitlines()[0]
    fitting = [length for length, plan in tried.items() if plan.fits]
    if not fitting:
        return tried[min(tried)]
    plan, above = tried[max(fitting)], _too_long(tried, reasons, max(fitting))
    reason = reasons.get(above) or f"they need {show_bytes(tried[above].memory.peak)}"
    return replace(plan, longer=f"{above:,} do not fit: {reason}")


def _too_long(tried: dict[int, Plan], reasons: dict[int, str], fits: int) -> int:
    """Return the shortest length after ``fits`` that does not fit or cannot be compiled; 0 without one."""
    return min((length for length in (*tried, *reasons) if length > fits), default=0)


def _next(tried: dict[int, Plan], reasons: dict[int, str], unit: int) -> int:
    """Return the length to try next; 0 if the longest one is found.

    Peaks are near a line in the length, so every other guess is where that line meets the usable memory.
    """
    fits = max((length for length, plan in tried.items() if plan.fits), default=0)
    above = _too_long(tried, reasons, fits)
    if above and above - fits <= max(unit, fits // _PRECISION // unit * unit):
        return 0
    known = sorted(tried)
    at = max(0, min(known.index(fits) if fits else 0, len(known) - 2))
    guess = 2 * fits
    if above and (len(tried) + len(reasons)) % 2:
        guess = (fits + above) // 2
    elif len(known) > 1:
        low, high = known[at], known[at + 1]
        slope = (tried[high].memory.peak - tried[low].memory.peak) / (high - low)
        if slope > 0:
            guess = low + int((tried[low].usable - tried[low].memory.peak) / slope)
    most = above - unit if above else max(2 * fits, 64 * unit, 8 * fits)
    return max(fits + unit, min(guess // unit * unit, most))
