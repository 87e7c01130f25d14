"""A rank that dies or stalls makes the others fail within config.timeout, naming the collective they were in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import zerograph as zg
from tests.models import TrainStep, adamw, batches, make, part
from tests.pool import Pool, RanksError

TIMEOUT = 3.0

# What each is in the emitted graph: torch's own, or the exchange in its place.
KINDS = {"reduce-scatter": ("reduce_scatter_tensor", "exchange_pieces")}


@pytest.fixture
def doomed() -> Iterator[Pool]:
    """Two workers of their own: one of them will not come back."""
    pool = Pool(2, patience=60)
    yield pool
    pool.close()


class _Failing(fx.Interpreter):
    """Runs the emitted graph, but rank 1 is lost just before the first collective of that kind."""

    def __init__(self, graph: fx.GraphModule, kind: str, lose: Callable[[], None]) -> None:
        super().__init__(graph)
        self._kind, self._lose = kind, lose

    def run_node(self, node: fx.Node) -> Any:
        if any(name in str(node.target) for name in KINDS[self._kind]) and dist.get_rank() == 1:
            self._lose()
        return super().run_node(node)


def die() -> None:
    os._exit(1)


def stall() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lost_in_a_step(kind: str, lose: Callable[[], None], micro_batches: int) -> tuple[str, str, float]:
    """What a step fails with on rank 0, if rank 1 is lost in the middle of it."""
    model = make("gpt")

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        # Rank 0 runs what a user would; rank 1 runs the same nodes up to its end.
        return graph.forward if dist.get_rank() == 0 else _Failing(graph, kind, lose).run

    step = TrainStep(model, adamw(model), 3, timeout=TIMEOUT, backend=backend)
    step.config.set_gradient_accumulation_steps(micro_batches)
    return failure(step, *batches("gpt", 1)[0])


def failure(step: TrainStep, x: Tensor, y: Tensor) -> tuple[str, str, float]:
    """(type of error, message, seconds until it came) of a step."""
    began = time.monotonic()
    try:
        step(part(x), part(y))
    except zg.ZeroGraphError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", 0.0


def lost_between_steps(lose: Callable[[], None]) -> tuple[str, str, float]:
    model = make("mlp")
    step = TrainStep(model, adamw(model), 2, timeout=TIMEOUT)
    (x, y), *_ = batches("mlp", 1)
    step(part(x), part(y))
    if dist.get_rank() == 1:
        lose()
    return failure(step, x, y)


@pytest.mark.parametrize(("lose", "micro_batches"), [(die, 1), (stall, 2)])
@pytest.mark.parametrize(("kind", "name"), [("reduce-scatter", "reduce-scatter of gradient of bucket")])
def test_a_rank_lost_in_a_step(
    doomed: Pool, lose: Callable[[], None], micro_batches: int, kind: str, name: str
) -> None:
    error, message, seconds = doomed.run_first(2, lost_in_a_step, kind, lose, micro_batches)
    assert error == "CommunicationError"
    assert name in message
    assert "step 1" in message
    assert "rank 0 of 2" in message
    # The first call compiles, too.
    assert seconds < TIMEOUT + 20


def test_a_rank_lost_between_steps(doomed: Pool) -> None:
    error, message, seconds = doomed.run_first(2, lost_between_steps, stall)
    assert error == "CommunicationError"
    assert "before step 2" in message
    assert seconds < TIMEOUT + 5


def test_the_pool_itself_reports_failures(pool: Pool) -> None:
    with pytest.raises(RanksError, match="ZeroDivisionError"):
        pool.run(2, divide)


def divide() -> float:
    return 1 / dist.get_rank() + torch.ones(()).item()
