"""Two ranks on one device train as one does, at each stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import zerograph as zg
from tests.gpu import comparison, staged
from tests.gpu.comparison import LIMITS, ROWS, FamilyStep, deviation, part, plain_losses
from tests.pool import Pool
from zerograph.runtime.backends import cudagraph

RANKS = 2
# The pass gathers into memory that the group reads from, which a copy through the CPU does not allow.
APART = (zg.PassEdit.disable("gather_in_place"),)


def ranks_apart_from_one(
    name: str, stages: tuple[int, ...], device: str, steps: int, backend: str = "eager"
) -> dict[int, float]:
    """Return how far each stage is from plain PyTorch on the whole batches."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = False
    # torch calls the all-gather into given memory in C++, past this group's own.
    cudagraph._WITH_PLACE.pop(torch.ops._c10d_functional.all_gather_into_tensor.default, None)
    family = comparison.family(name, device, steps, rows=RANKS * ROWS)
    expected = plain_losses(family.model, family.batches, device, "fp32")
    apart = {}
    for stage in stages:
        model = comparison.family(name, device, 0).model
        step = FamilyStep(model, stage, device, "fp32", passes=APART, backend=backend)
        apart[stage] = deviation([float(step(**part(batch))) for batch in family.batches], expected)
    return apart


def bits(name: str, stages: tuple[int, ...], device: str, steps: int) -> list[dict[str, str]]:
    """Return the bits that each stage ends with, of a batch in two slices, on one or two ranks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for stage in stages:
            family = comparison.family(name, device, steps, rows=RANKS * ROWS)
            options = {"virtual_ranks": RANKS, "clip_grad_norm": 0.1, "passes": APART}
            step = FamilyStep(family.model, stage, device, "fp32", **options)
            losses = [float(step(**part(batch))) for batch in family.batches]
            runs.append({"losses": str(losses)} | step.fingerprint())
        return runs
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def two(device: str) -> Iterator[Pool]:
    forks = device == "cpu"
    workers = Pool(
        size=RANKS, patience=100.0 if device == "cuda" else 300.0, hash_apart=False, backend=staged.NAME, forks=forks
    )
    yield workers
    workers.close(patience=20.0)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param("conv", (3,), marks=pytest.mark.long),
        pytest.param("llama", (0, 1, 2, 3), marks=pytest.mark.long),
        ("mlp", (0, 1, 2, 3)),
    ],
)
def test_two_ranks_on_one_device_train_as_one(
    name: str,
    stages: tuple[int, ...],
    two: Pool,
    device: str,
    steps: int,
    record_property: Callable[[str, object], None],
) -> None:
    apart = two.run(RANKS, ranks_apart_from_one, name, stages, device, steps)[0]
    record_property("deviation", apart)
    assert max(apart.values()) < LIMITS["fp32"]


@pytest.mark.parametrize(
    "name", [pytest.param("conv", marks=pytest.mark.long), pytest.param("llama", marks=pytest.mark.long), "mlp"]
)
def test_two_ranks_on_one_device_have_the_bits_of_one(name: str, two: Pool, device: str, steps: int) -> None:
    (wanted,) = two.run(1, bits, name, (0,), device, steps)[0]
    for run in two.run(RANKS, bits, name, (0, 3), device, steps)[0]:
        assert run == wanted


def test_two_ranks_replay_the_stretches_between_collectives(
    two: Pool, card: str, record_property: Callable[[str, object], None]
) -> None:
    # Two steps before the capture, one of it, and replays.
    apart = two.run(RANKS, ranks_apart_from_one, "mlp", (1, 2, 3), card, 6, "cudagraph")[0]
    record_property("deviation", apart)
    assert max(apart.values()) < 1e-5
