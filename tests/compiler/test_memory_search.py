"""The memory search, with numbers instead of steps: which candidate it chooses, and how few it prepares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from torch import fx

import zerograph as zg
from zerograph.compiler.memory_search import MemoryCandidate, search_memory
from zerograph.errors import MemoryBudgetError

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """A step that fits. Its graph has no collectives, so that no buckets larger than the default are better."""

    candidate: MemoryCandidate

    @property
    def emitted(self) -> fx.Graph:
        graph = fx.Graph()
        graph.output(())
        return graph


@dataclass
class Steps:
    """Prepares steps of which only the peak is known, and notes the candidates.

    Attributes:
        peak: bytes of the peak, of the activations and of the buckets at it.
    """

    budget: int
    peak: Callable[[MemoryCandidate], tuple[int, int, int]]
    candidates: list[MemoryCandidate] = field(default_factory=list)

    def prepare(self, candidate: MemoryCandidate) -> Step | MemoryBudgetError:
        self.candidates.append(candidate)
        peak, activations, in_buckets = self.peak(candidate)
        if peak <= self.budget:
            return Step(candidate)
        missing = peak - self.budget
        return MemoryBudgetError(
            f"{missing} bytes are missing\nWhat would help: less.", missing, activations, in_buckets
        )

    def search(
        self, *, recomputed: int = 0, default: int | None = None, may_recompute: bool = False, may_offload: bool = False
    ) -> MemoryCandidate:
        start = MemoryCandidate(None, recomputed, offload_activations=False)
        return search_memory(
            self.prepare, start, default_bucket_bytes=default, may_recompute=may_recompute, may_offload=may_offload
        ).candidate

    @property
    def sizes(self) -> list[int]:
        """Bucket sizes of the candidates in MiB."""
        return [one.bucket_size // MIB for one in self.candidates if one.bucket_size is not None]


def in_buckets(budget: int) -> Steps:
    """Steps that hold one bucket and nothing else."""

    def peak(candidate: MemoryCandidate) -> tuple[int, int, int]:
        assert candidate.bucket_size is not None
        return candidate.bucket_size, 0, candidate.bucket_size

    return Steps(budget, peak)


@pytest.mark.parametrize("recomputed", [0, MIB])
@pytest.mark.parametrize("room", [1, 2, 4, 8, 16])
def test_the_largest_buckets_that_fit_are_taken(room: int, recomputed: int) -> None:
    steps = in_buckets(room * MIB)
    assert steps.search(recomputed=recomputed, default=32 * MIB).bucket_size == room * MIB
    assert len(steps.candidates) <= 5


def test_the_default_is_kept_where_larger_buckets_save_no_collective() -> None:
    steps = in_buckets(1000 * MIB)
    assert steps.search(default=32 * MIB).bucket_size == 32 * MIB
    assert steps.sizes == [32, 64]


def test_the_smallest_buckets_tell_that_none_fit() -> None:
    steps = in_buckets(MIB // 2)
    with pytest.raises(zg.MemoryBudgetError):
        steps.search(default=32 * MIB)
    assert steps.sizes == [32, 1]


def test_only_the_smallest_buckets_are_tried_where_a_step_that_recomputes_lacks_memory() -> None:
    steps = in_buckets(MIB // 2)
    with pytest.raises(zg.MemoryBudgetError):
        steps.search(recomputed=MIB, default=32 * MIB)
    assert steps.sizes == [1]


def test_a_shortage_above_what_buckets_hold_is_refused_at_once() -> None:
    steps = Steps(0, lambda one: (2 * (one.bucket_size or 0), 0, one.bucket_size or 0))
    with pytest.raises(zg.MemoryBudgetError):
        steps.search(default=32 * MIB)
    assert steps.sizes == [32]


def test_the_error_has_the_numbers_of_the_last_step_and_its_message() -> None:
    steps = Steps(1000, lambda one: (1234, 200, 30))
    with pytest.raises(zg.MemoryBudgetError, match="234 bytes are missing\nWhat would help: less") as raised:
        steps.search()
    error = raised.value
    assert (error.missing, error.activations, error.in_buckets) == (234, 200, 30)


def test_what_is_missing_is_recomputed() -> None:
    steps = Steps(1000, lambda one: (1600 - one.min_recompute_bytes, 1600, 0))
    assert steps.search(may_recompute=True).min_recompute_bytes == 600
    assert len(steps.candidates) == 2


def test_activations_are_offloaded_before_any_are_recomputed() -> None:
    def peak(candidate: MemoryCandidate) -> tuple[int, int, int]:
        return 1600 - 500 * candidate.offload_activations - candidate.min_recompute_bytes, 1600, 0

    steps = Steps(1000, peak)
    assert steps.search(may_recompute=True, may_offload=True) == MemoryCandidate(None, 100, offload_activations=True)
    assert steps.candidates[1] == MemoryCandidate(None, 0, offload_activations=True)


def test_rounds_grow_as_long_as_the_peak_does_not_fall() -> None:
    # Another node holds the most until half of the activations are recomputed.
    steps = Steps(1000, lambda one: (1001 if one.min_recompute_bytes < 800 else 1000, 1600, 0))
    steps.search(may_recompute=True)
    # A sixteenth is 100 bytes; twice as many each round.
    assert [one.min_recompute_bytes for one in steps.candidates] == [0, 1, 201, 601, 1401]


def test_a_step_that_recomputes_everything_is_the_last() -> None:
    steps = Steps(1000, lambda one: (1001, 1600, 0))
    with pytest.raises(zg.MemoryBudgetError):
        steps.search(may_recompute=True)
    assert [one.min_recompute_bytes for one in steps.candidates] == [0, 1, 201, 601, 1401, 3001]


def test_a_shortage_above_activations_and_buckets_is_refused_at_once() -> None:
    steps = Steps(1000, lambda one: (1301, 200, 100))
    with pytest.raises(zg.MemoryBudgetError):
        steps.search(may_recompute=True)
    assert len(steps.candidates) == 1


def test_the_error_is_that_of_the_step_that_lacks_the_least() -> None:
    # Recomputing keeps more at the node where the peak then is.
    steps = Steps(900, lambda one: (1200 if one.min_recompute_bytes else 1000, 400, 0))
    with pytest.raises(zg.MemoryBudgetError, match="100 bytes are missing"):
        steps.search(may_recompute=True)
    assert len(steps.candidates) > 1
