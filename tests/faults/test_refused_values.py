"""A value that an operator refuses, on one rank or on all, and what becomes of those that go on behind the error."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.faults.lost_ranks import run
from tests.harness import LossStep, sliced, told
from tests.models import update_by
from zerograph._torch import distributed

GOOD, BAD = torch.arange(4), torch.arange(4) + 8
# Nobody is to wait so long.
TIMEOUT = 120.0


def embedding() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(11, 3)


def loss_of(model: nn.Embedding, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


class Tokens(LossStep):
    def __init__(self, stage: int = 3) -> None:
        model = embedding()
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, loss_of, timeout=TIMEOUT)


def refuses_on_one_rank(ends: bool, stage: int = 3) -> list[tuple[str, str]]:
    step = Tokens(stage)
    step(GOOD)
    found = [told(lambda: step(BAD if zg.rank() == 1 else GOOD))]
    return found if ends else [*found, told(lambda: step(GOOD)), told(lambda: step(GOOD))]


def test_a_value_that_an_operator_refuses_on_one_rank_is_the_other_ones_cause() -> None:
    ((other, others_words),), ((mine, words),) = (answer.value for answer in run(2, None, refuses_on_one_rank, True))
    assert (other, mine) == ("CommunicationError", "OperatorError")
    assert "embedding.default in the forward of model failed in step 2 on rank 1" in words
    assert "lost rank 1" in others_words
    assert "index out of range in self" in others_words


# Without ZeRO what is waited for is a small sum, which goes over gloo.
@sliced("stage", [0], [3])
def test_a_rank_that_lives_on_behind_its_error_is_not_waited_for(stage: int) -> None:
    one, two = (answer.value for answer in run(2, None, refuses_on_one_rank, False, stage))
    assert [kind for kind, _ in one] == ["CommunicationError", "RankMismatchError", "RankMismatchError"]
    assert [kind for kind, _ in two] == ["OperatorError", "RankMismatchError", "RankMismatchError"]
    _, words = one[0]
    assert "rank 1 has failed" in words
    assert "index out of range in self" in words
    for _, words in (*one[1:], *two[1:]):
        assert "first in where the step before broke off" in words
        assert "rank 1: step 2, at embedding" in words
        assert "from the last checkpoint" in words


def is_slow(stage: int) -> list[float]:
    """Return the losses of two steps, in the second of which rank 1 is slow."""
    step = Tokens(stage)

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*arguments: Any) -> Any:
            if zg.rank() == 1 and step.steps_done == 1:
                time.sleep(2.5)
            return graph.forward(*arguments)

        return run

    step.config.backend = backend
    return [float(step(GOOD + zg.rank())) for _ in range(2)]


@sliced("stage", [3], [0])
def test_a_rank_that_is_slow_is_waited_for(stage: int) -> None:
    plain = embedding()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = [update_by(optimizer, loss_of(plain, torch.cat([GOOD, GOOD + 1]))).item() for _ in range(2)]
    for answer in run(2, None, is_slow, stage):
        assert answer.value == pytest.approx(losses, rel=1e-6), answer.raised


def fails_behind_the_last_exchange() -> list[tuple[str, str]]:
    step, calls = Tokens(), []

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*arguments: Any) -> Any:
            found = graph.forward(*arguments)
            calls.append(len(calls))
            if len(calls) == 2 and zg.rank() == 1:
                raise ValueError("it has been so good")
            return found

        return run

    step.config.backend = backend
    step(GOOD)
    return [told(lambda: step(GOOD)), told(lambda: step(GOOD))]


def test_a_rank_that_fails_behind_its_last_exchange_is_named_in_the_next_step() -> None:
    one, two = (answer.value for answer in run(2, None, fails_behind_the_last_exchange))
    assert [kind for kind, _ in one] == ["nothing", "RankMismatchError"]
    assert [kind for kind, _ in two] == ["OperatorError", "RankMismatchError"]
    for _, words in (one[1], two[1]):
        assert "rank 0: nowhere" in words
        assert "rank 1: step 2, at test_refused_values.py:" in words


def refuses_on_all() -> tuple[str, list[list[float]]]:
    step = Tokens()
    step(GOOD)
    kind, _ = told(lambda: step(BAD))
    step(GOOD)
    return kind, step.state_dict()["modules"]["model"]["weight"].tolist()


def refuses_while_gathering() -> list[int]:
    """Return how many exchanges are under way after two calls that fail, and after one that does not."""
    model = nn.Sequential(embedding(), nn.Linear(3, 3))
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, loss_of, backend="eager", bucket_size=1)
    under_way = []
    for tokens in (BAD, BAD, GOOD):
        told(lambda tokens=tokens: step(tokens))
        under_way.append(len(distributed._awaited))
    return under_way


def test_ranks_that_refuse_at_the_same_place_go_on_together() -> None:
    plain = embedding()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        update_by(optimizer, loss_of(plain, torch.cat([GOOD, GOOD])))
    for answer in run(2, None, refuses_on_all):
        kind, weight = answer.value
        assert kind == "OperatorError"
        torch.testing.assert_close(torch.tensor(weight), plain.weight.detach())


def test_exchanges_that_a_refused_value_has_left_under_way_are_ended_by_the_next_step() -> None:
    for answer in run(2, None, refuses_while_gathering):
        first, second, after = answer.value
        assert first == second > after == 0
