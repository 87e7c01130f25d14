"""A step leaves the host free: nothing in it waits for the device, and a CUDA graph takes it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import zerograph as zg
from tests.gpu.comparison import BodyStep, adamw, deviation, fused, inputs, perceptron, train

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


@STAGES
def test_a_step_is_captured_by_hand(stage: int, card: str) -> None:
    model, plain, x = perceptron(card), perceptron(card), inputs(card)[0]
    step = BodyStep(model, adamw(model, fused=True, capturable=True), stage)
    losses = [float(step(x)) for _ in range(4)]
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = step(x)
    for _ in range(4):
        captured.replay()
        losses.append(float(loss))
    expected = train(plain, adamw(plain, fused=True, capturable=True), [x] * 8)
    assert deviation(losses, expected) < 1e-6


@STAGES
def test_the_backend_cudagraph_trains_as_plain_pytorch(stage: int, card: str) -> None:
    model, plain, batches = perceptron(card), perceptron(card), inputs(card) * 2
    step = BodyStep(model, fused(model), stage)
    try:
        step.config.backend = "cudagraph"
    except zg.ConfigError:
        pytest.skip("there is no such backend")
    assert deviation([float(step(x)) for x in batches], train(plain, fused(plain), batches)) < 1e-6
