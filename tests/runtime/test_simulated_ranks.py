"""One process as one rank of many, under torch's fake process group: a step looked at without the other ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.models import adam_step, batches, make

RANKS = 8


@pytest.fixture
def process() -> Iterator[ProcessPoolExecutor]:
    """A process of the test's own, which its process group dies with."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        yield pool


def simulated(rank: int, stage: int) -> tuple[int, list[str]]:
    """(bytes at rest, kinds of collectives in order) of a step that has run twice."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    step = adam_step("gpt_of_one_block", stage)
    for x, y in batches("gpt_of_one_block", 2):
        step(x, y)
    return step.state_bytes(), [one.kind for one in step.inspect.collectives()]


def test_a_rank_of_simulated_ones_holds_its_part_of_the_state(process: ProcessPoolExecutor) -> None:
    held, kinds = process.submit(simulated, 0, 3).result(timeout=300)
    weight = sum(parameter.nbytes for parameter in make("gpt_of_one_block").parameters())
    # Parameters and the two moments of AdamW; buckets are padded.
    assert held == pytest.approx(3 * weight / RANKS, rel=0.02)
    assert {"all-gather", "reduce-scatter"} <= set(kinds)


def test_any_rank_can_be_the_real_one(process: ProcessPoolExecutor) -> None:
    _, kinds = process.submit(simulated, RANKS - 1, 2).result(timeout=300)
    assert "reduce-scatter" in kinds
