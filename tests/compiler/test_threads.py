"""Several threads that use graphs: one after the other in one process, refused among several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Step, inputs, model, optimizer_of
from tests.models import part
from tests.pool import Pool
from zerograph.state import threads


def loss_of(made: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = made(x).square().mean()
    return loss


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run each of the calls in a thread of its own; return what it returned or raised."""
    results: list[Any] = [None] * len(calls)
    begin = threading.Barrier(len(calls))

    def run(index: int) -> None:
        begin.wait()
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    started = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(120)
    return results


def test_two_threads_train_one_graph_as_one_thread_does() -> None:
    (x,) = inputs([4])
    alone, shared = Step(model(), loss_of), Step(model(), loss_of)
    expected = sorted(alone(x).item() for _ in range(40))

    def train() -> list[float]:
        return [shared(x).item() for _ in range(20)]

    first, second = at_once([train, train])
    assert sorted(first + second) == expected
    assert shared.steps_done == 40
    weights = shared.state_dict()["modules"]["model"], alone.state_dict()["modules"]["model"]
    assert all(torch.equal(a, b) for a, b in zip(*(one.values() for one in weights), strict=True))


def test_a_state_that_another_thread_takes_is_that_of_a_whole_step() -> None:
    (x,) = inputs([4])
    step = Step(model(), loss_of)
    step(x)
    counts: dict[int, Tensor] = {}

    def take() -> None:
        while step.steps_done < 40:
            state = step.state_dict()
            counts[state["steps_done"]] = state["modules"]["model"]["weight"]

    at_once([lambda: [step(x) for _ in range(39)], take])
    alone = Step(model(), loss_of)
    for number in range(1, 41):
        alone(x)
        if number in counts:
            assert torch.equal(counts[number], alone.state_dict()["modules"]["model"]["weight"])


def test_a_hook_of_the_step_may_use_the_graph() -> None:
    (x,) = inputs([4])
    made = model()
    step = Step(made, loss_of)
    optimizer_of(step).register_step_post_hook(lambda *_: step.state_dict())
    step(x)
    assert step.steps_done == 1


def conflicting() -> tuple[str, str, str, list[float]]:
    """A second thread calls the graph while a step is running; then steps from one thread."""
    step = Step(model(), loss_of)
    x = part(inputs([8])[0])
    running, tried = threading.Event(), threading.Event()
    raised: list[str] = []

    def wait(*_: object) -> None:
        running.set()
        assert tried.wait(60)

    handle = optimizer_of(step).register_step_post_hook(wait)

    def second() -> None:
        assert running.wait(60)
        try:
            step(x)
        except zg.InputError as error:
            raised.append(str(error))
        finally:
            tried.set()

    def prepared() -> None:
        """Exchanges nothing with other ranks, so it may wait."""
        step.prepare(zg.mesh.line(2, 0, "ranks"), x)

    others = [threading.Thread(target=second, name="second"), threading.Thread(target=prepared)]
    for thread in others:
        thread.start()
    first = step(x).item()
    for thread in others:
        thread.join(60)
    handle.remove()
    try:
        step(x)
        told = "nothing"
    except zg.ZeroGraphError as error:
        told = f"{type(error).__name__}: {error}"
    return raised[0], told, str(step.steps_done), [first, step(x).item(), step(x).item()]


def on_one_rank_only(rank_of_conflict: int) -> str:
    """A refusal that one rank has is raised by the next step of every rank."""
    step = Step(model(), loss_of)
    x = part(inputs([8])[0])
    step(x)
    if torch.distributed.get_rank() == rank_of_conflict:
        threads._held.refused = "two threads use graphs"
    try:
        step(x)
    except zg.ZeroGraphError as error:
        step(x)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_two_threads_among_several_ranks_are_an_error(pool: Pool) -> None:
    plain = Step(model(), loss_of)
    expected = [plain(*inputs([8])).item() for _ in range(3)]
    for raised, told, steps, losses in pool.run(2, conflicting):
        assert raised.startswith("two threads use graphs at the same time, among several ranks: a call of the graph in")
        assert "in thread second during a call of the graph in thread MainThread" in raised
        assert "two threads use graphs at the same time" in told
        assert steps == "1"
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_refusal_on_one_rank_is_told_on_all(pool: Pool) -> None:
    first, second = pool.run(2, on_one_rank_only, 1)
    assert second == "InputError: two threads use graphs"
    assert first.startswith("RankMismatchError: rank 1 failed before step 2:\n  InputError: two threads use graphs")
