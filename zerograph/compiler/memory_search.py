"""The memory search: bucket size, recomputation and offloading under a memory budget.

Preparing a candidate runs all passes, which takes seconds for a large model. So the search prepares few candidates, and
none that the numbers of an earlier one rule out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from zerograph.errors import MemoryBudgetError
from zerograph.ir.memory import Memory, MemoryKind, profile, show_bytes
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import collective_runs
from zerograph.passes.context import Context

# Smaller buckets cost latency and save little memory.
_MIN_BUCKET_BYTES = 2**20
# Buckets of more than this many times the default size leave nothing to overlap with.
_MAX_BUCKET_GROWTH = 4
# Each round recomputes at least a further 1/_MIN_SHARE of the activations.
_MIN_SHARE = 16


@dataclass(frozen=True)
class MemoryCandidate:
    """One way to prepare a step.

    Attributes:
        bucket_size: largest size of a bucket, in bytes; None: the default.
        min_recompute_bytes: least activations that are freed and recomputed in backward, in bytes.
        offload_activations: activations may be offloaded to the CPU between forward and backward.
    """

    bucket_size: int | None
    min_recompute_bytes: int
    offload_activations: bool


# A prepared step, whose module imports this one.
Step = TypeVar("Step")
Prepare = Callable[[MemoryCandidate], Step | MemoryBudgetError]


def search_memory(
    prepare: Prepare[Step],
    start: MemoryCandidate,
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
        prepare: runs the passes; returns the step, or the error of a step that does not keep the budget.
        start: the first candidate.
        default_bucket_bytes: size of the buckets without a budget, which the search varies. None: keep that of
            ``start``.
        may_recompute: allow more recomputation than in ``start``.
        may_offload: allow offloading of activations even if ``start`` has none.

    Raises:
        MemoryBudgetError: no candidate keeps the budget. The numbers are those of the one that lacks the least.
    """
    least: MemoryBudgetError | None = None
    candidate, activations, shares = start, 0, 1
    while True:
        if default_bucket_bytes is None:
            result = prepare(candidate)
        else:
            result = _with_largest_buckets(prepare, candidate, default_bucket_bytes)
        if not isinstance(result, MemoryBudgetError):
            return result
        if may_offload and not candidate.offload_activations:
            candidate = replace(candidate, offload_activations=True)
            continue
        recomputed, missing = candidate.min_recompute_bytes, result.missing
        activations = activations or result.activations
        # With all activations recomputed and the smallest buckets, no more is freed than both take.
        out_of_reach = missing > result.activations + result.in_buckets
        shares = 2 * shares if least is not None and missing >= least.missing else 1
        least = min(least or result, result, key=lambda error: error.missing)
        if not may_recompute or recomputed >= activations or out_of_reach:
            raise least
        more = max(missing, shares * -(-activations // _MIN_SHARE)) if recomputed else missing
        candidate = replace(candidate, min_recompute_bytes=recomputed + more)


def _with_largest_buckets(prepare: Prepare[Step], candidate: MemoryCandidate, default: int) -> Step | MemoryBudgetError:
    """Return the candidate's step with the largest buckets that keep the budget, or the error with the smallest.

    Larger buckets need fewer collectives, and so cost less latency. Buckets exceed the default size only where that
    sends no more bytes.

    Args:
        default: default size of a bucket, in bytes.
    """
    sizes = [default]
    while sizes[0] // 2 >= _MIN_BUCKET_BYTES:
        sizes.insert(0, sizes[0] // 2)
    too_large = len(sizes)
    # A candidate recomputes because the smallest buckets were too large: the default size most likely still does.
    if candidate.min_recompute_bytes == 0:
        result = prepare(replace(candidate, bucket_size=default))
        if not isinstance(result, MemoryBudgetError):
            return _with_larger_buckets(prepare, candidate, default, result)
        # Smaller buckets free no more than the buckets take.
        if len(sizes) == 1 or result.missing > result.in_buckets:
            return result
        too_large -= 1
    best = prepare(replace(candidate, bucket_size=sizes[0]))
    if isinstance(best, MemoryBudgetError):
        return best
    fits = 0
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        result = prepare(replace(candidate, bucket_size=sizes[middle]))
        if isinstance(result, MemoryBudgetError):
            too_large = middle
        else:
            best, fits = result, middle
    return best if sizes[fits] < default else _with_larger_buckets(prepare, candidate, default, best)


def _with_larger_buckets(prepare: Prepare[Step], candidate: MemoryCandidate, default: int, best: Step) -> Step:
    """Double the bucket size while the budget is kept and fewer collectives send no more bytes; return the last step.

    Args:
        default: default size of a bucket, in bytes.
        best: the step with buckets of the default size.
    """
    size = default
    while size < _MAX_BUCKET_GROWTH * default:
        size *= 2
        larger = prepare(replace(candidate, bucket_size=size))
        if isinstance(larger, MemoryBudgetError):
            break
        (count, sent), (best_count, best_sent) = _traffic(larger), _traffic(best)
        if count >= best_count or sent > best_sent:
            break
        best = larger
    return best


def _traffic(step: Any) -> tuple[int, float]:
    """Return the number of collectives in one run of a step, and the bytes that each rank sends in them."""
    runs = collective_runs(step.emitted)
    return sum(times for _, times in runs), sum(meta(node)["boxing"].sent * times for node, times in runs)


def budget_error(emitted: fx.Graph, context: Context) -> MemoryBudgetError | None:
    """Return the error of a graph that exceeds the memory budget; None if it keeps it, or has none."""
    budget = context.memory.budget
    if budget is None or (memory := profile(emitted).memory()).peak <= budget:
        return None
    origin, kinds, missing = memory.where, memory.kinds, memory.peak - budget
    place = f"{memory.node} ({origin.phase}{f', {origin.module}' if origin.module else ''})"
    shown = ", ".join(f"{kind} {show_bytes(count)}" for kind, count in kinds.items())
    return MemoryBudgetError(
        f"the step needs {show_bytes(memory.peak)} on this rank, and config.memory.memory_budget is "
        f"{show_bytes(budget)}: {missing:,} bytes are missing\n"
        f"  most is held at {place}: {shown}\n"
        f"{origin.line}\n"
        f"{f'  for {memory.validity}{chr(10)}' if memory.sizes else ''}"
        f"What would help: {'; '.join(remedies(memory, context))}.",
        missing,
        kinds.get("activations", 0),
        kinds.get("gathered", 0) + kinds.get("gradients", 0),
    )


def remedies(least: Memory, context: Context) -> list[str]:
    """Return what would reduce each kind of memory at the peak, the largest kind first."""
    policy = context.policy

    def count(*kinds: MemoryKind) -> int:
        return sum(least.kinds.get(kind, 0) for kind in kinds)

    advice = [
        (count("inputs", "activations"), "activations and inputs", "a smaller batch"),
        (count("activations"), "activations", "more micro-batches (config.gradient_accumulation_steps)"),
    ]
    if context.memory.recompute != "auto" and context.updates:
        advice.append(
            (
                count("activations"),
                "activations",
                "config.memory.activation_checkpointing = 'auto', which computes them again",
            )
        )
    stored = count("parameters", "optimizer state"), "parameters and optimizer state"
    if any(bucket.storage.state is None for bucket in context.buckets):
        in_files = "config.memory.offload with the optimizer in files (nvme)"
        advice.append((count("optimizer state"), "optimizer state", in_files))
    if policy.split:
        advice.append((*stored, "more ranks, which share them"))
        if not policy.reshard_after_forward:
            advice.append((count("gathered"), "gathered parameters", "ZeRO stage 3, which gathers them layer by layer"))
        if not policy.reduce_early:
            advice.append((count("gradients"), "gradients", "ZeRO stage 2, which reduces them bucket by bucket"))
        elif any(len(bucket.slots) > 1 for bucket in context.buckets):
            in_use = count("gathered", "gradients") if policy.reshard_after_forward else count("gradients")
            advice.append((in_use, "buckets at work", "a smaller config.zero.bucket_size"))
    elif context.updates:
        advice.append((*stored, "ZeRO stage 3 over several ranks, which splits them"))
    return [f"{remedy} ({kind}: {show_bytes(size)})" for size, kind, remedy in sorted(advice, reverse=True) if size]
