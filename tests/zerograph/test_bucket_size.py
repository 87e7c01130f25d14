"""Buckets under a budget: the largest that fit, found with few compilations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import zerograph as zg
from zerograph.compiler.bucket_size import fitting
from zerograph.passes.pipeline import PassRecord

MIB = 2**20


@dataclass
class Compiler:
    """Steps that fit with buckets of at most ``room``; all send nothing, so that none larger than usual is better."""

    room: int
    tried: list[int] = field(default_factory=list)

    def lay(self, size: int) -> Laid:
        self.tried.append(size // MIB)
        if size > self.room:
            raise zg.MemoryBudgetError("too little", missing=size - self.room, in_buckets=size)
        return Laid(size)


@dataclass(frozen=True)
class Laid:
    size: int

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        raise NotImplementedError


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("room", [1, 2, 4, 8, 16])
def test_the_largest_that_fit_are_taken(room: int, tight: bool) -> None:
    compiler = Compiler(room * MIB)
    assert fitting(compiler.lay, 32 * MIB, tight=tight).size == room * MIB
    assert len(compiler.tried) <= 5


def test_the_smallest_tell_that_none_fits() -> None:
    compiler = Compiler(MIB // 2)
    with pytest.raises(zg.MemoryBudgetError):
        fitting(compiler.lay, 32 * MIB)
    assert compiler.tried == [32, 1]


def test_where_none_is_expected_to_fit_one_is_compiled() -> None:
    compiler = Compiler(MIB // 2)
    with pytest.raises(zg.MemoryBudgetError):
        fitting(compiler.lay, 32 * MIB, tight=True)
    assert compiler.tried == [1]


def test_what_lacks_more_than_buckets_hold_is_refused_at_once() -> None:
    def lay(size: int) -> Laid:
        tried.append(size)
        raise zg.MemoryBudgetError("too little", missing=2 * size, in_buckets=size)

    tried: list[int] = []
    with pytest.raises(zg.MemoryBudgetError):
        fitting(lay, 32 * MIB)
    assert tried == [32 * MIB]
