"""The memory search: bucket size, recomputation and offloading under a memory budget.

Preparing a candidate runs all passes, which takes seconds for a large model. So the search prepares few candidates, and
none that the numbers of an earlier one rule out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import fx

from zerograph.errors import MemoryBudgetError
from zerograph.ir.memory_budget import Shortage
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import collective_runs

# Smaller buckets cost latency and save little memory.
_MIN_BUCKET_BYTES = 2**20
# Buckets of more than this many times the default size leave nothing to overlap with.
_MAX_BUCKET_GROWTH = 4
# Each round recomputes at least a further 1/_MIN_SHARE of the activations.
_MIN_SHARE = 16


@dataclass(frozen=True)
class Candidate:
    """One way to prepare a step.

    Attributes:
        bucket_size: largest size of a bucket, in bytes; None: the default.
        min_recompute_bytes: least activations that are freed and recomputed in backward, in bytes.
        offload_activations: activations may be offloaded to the CPU between forward and backward.
    """

    bucket_size: int | None
    min_recompute_bytes: int
    offload_activations: bool


class Emitted(Protocol):
    """A step with the graph that a rank runs."""

    @property
    def emitted(self) -> fx.Graph:
        """The graph."""


Step = TypeVar("Step", bound=Emitted)
Prepare = Callable[[Candidate], Step | Shortage]


def search_memory(
    prepare: Prepare[Step],
    start: Candidate,
    *,
    default_bucket_bytes: int | None,
    may_recompute: bool,
    may_offload: bool,
) -> Step:
    """Return the step that keeps the budget with the least offloading and recomputation.

    First activations are offloaded, which takes no time where the transfers overlap with computation. Then each round
    recomputes as many further bytes as are missing. That lowers the peak by less if the peak moves to another node. So
    a round recomputes at least a sixteenth of the activations more, and doubles this as long as the peak does not fall.

    Args:
        prepare: runs the passes; returns the step, or the shortage of a step that does not keep the budget.
        start: the first candidate.
        default_bucket_bytes: size of the buckets without a budget, which the search varies. None: keep that of
            ``start``.
        may_recompute: allow more recomputation than in ``start``.
        may_offload: allow offloading of activations even if ``start`` has none.

    Raises:
        MemoryBudgetError: no candidate keeps the budget. The numbers are those of the last candidate.
    """
    candidate, activations, least_missing, shares = start, 0, math.inf, 1
    while True:
        if default_bucket_bytes is None:
            result = prepare(candidate)
        else:
            result = _with_largest_buckets(prepare, candidate, default_bucket_bytes)
        if not isinstance(result, Shortage):
            return result
        if may_offload and not candidate.offload_activations:
            candidate = replace(candidate, offload_activations=True)
            continue
        recomputed, missing = candidate.min_recompute_bytes, result.missing
        activations = activations or result.activations
        # With all activations recomputed and the smallest buckets, no more is freed than both take.
        out_of_reach = missing > result.activations + result.in_buckets
        if not may_recompute or recomputed >= activations or out_of_reach:
            raise MemoryBudgetError(str(result), missing, result.activations, result.in_buckets)
        shares = 2 * shares if missing >= least_missing else 1
        least_missing = min(least_missing, missing)
        more = max(missing, shares * -(-activations // _MIN_SHARE)) if recomputed else missing
        candidate = replace(candidate, min_recompute_bytes=recomputed + more)


def _with_largest_buckets(prepare: Prepare[Step], candidate: Candidate, default: int) -> Step | Shortage:
    """Return the candidate's step with the largest buckets that keep the budget, or the shortage with the smallest.

    Larger buckets need fewer collectives, and so cost less latency. Buckets exceed the default size only where that
    sends no more bytes.

    Args:
        default: default size of a bucket, in bytes.
    """
    sizes = [default]
    while sizes[0] // 2 >= _MIN_BUCKET_BYTES:
        sizes.insert(0, sizes[0] // 2)
    too_large = len(sizes)
    # A candidate recomputes because the smallest buckets left a shortage: the default size most likely still does.
    if candidate.min_recompute_bytes == 0:
        result = prepare(replace(candidate, bucket_size=default))
        if not isinstance(result, Shortage):
            return _with_larger_buckets(prepare, candidate, default, result)
        # Smaller buckets free no more than the buckets take.
        if len(sizes) == 1 or result.missing > result.in_buckets:
            return result
        too_large -= 1
    best = prepare(replace(candidate, bucket_size=sizes[0]))
    if isinstance(best, Shortage):
        return best
    fits = 0
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        result = prepare(replace(candidate, bucket_size=sizes[middle]))
        if isinstance(result, Shortage):
            too_large = middle
        else:
            best, fits = result, middle
    return best if sizes[fits] < default else _with_larger_buckets(prepare, candidate, default, best)


def _with_larger_buckets(prepare: Prepare[Step], candidate: Candidate, default: int, best: Step) -> Step:
    """Double the bucket size while the budget is kept and fewer collectives send no more bytes; return the last step.

    Args:
        default: default size of a bucket, in bytes.
        best: the step with buckets of the default size.
    """
    size = default
    while size < _MAX_BUCKET_GROWTH * default:
        size *= 2
        larger = prepare(replace(candidate, bucket_size=size))
        if isinstance(larger, Shortage):
            break
        (count, sent), (best_count, best_sent) = traffic(larger), traffic(best)
        if count >= best_count or sent > best_sent:
            break
        best = larger
    return best


def traffic(step: Emitted) -> tuple[int, float]:
    """Return the number of collectives in one run of a step, and the bytes that each rank sends in them."""
    runs = collective_runs(step.emitted)
    return sum(times for _, times in runs), sum(meta(node)["boxing"].sent * times for node, times in runs)
