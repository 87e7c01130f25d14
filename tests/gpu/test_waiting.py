"""A step leaves the host free: nothing in it waits for the device, and a CUDA graph takes it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.comparison import BodyStep, deviation, fused, in_a_process, inputs, perceptron, train

STAGES = pytest.mark.parametrize("stage", [2, 3])


@contextmanager
def no_wait() -> Iterator[None]:
    """Make an operator that waits for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@STAGES
def test_a_step_waits_for_nothing(stage: int, card: str) -> None:
    model, batches = perceptron(card), inputs(card)
    step = BodyStep(model, fused(model), stage)
    for x in batches:
        step(x)
    with no_wait():
        for x in batches:
            step(x)


def through_cudagraph(stage: int, device: str) -> float:
    """Return how far the backend is from plain PyTorch."""
    model, plain, batches = perceptron(device), perceptron(device), inputs(device) * 2
    step = BodyStep(model, fused(model), stage, backend="cudagraph")
    return deviation([float(step(x)) for x in batches], train(plain, fused(plain), batches))


@STAGES
def test_the_backend_cudagraph_trains_as_plain_pytorch(stage: int, card: str) -> None:
    assert in_a_process(through_cudagraph, stage, card) < 1e-5
