"""Interrupts that are caught, forked processes that call the step, processes that have ended: nobody waits long."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import zerograph as zg
from tests.faults.lost_ranks import Failing, note_time, noted_time, run
from tests.harness import told
from tests.models import TrainStep, adam_step, adamw, batches, make, part
from tests.pool import Pool
from zerograph.integrations.state import whole_state
from zerograph.loops.prepare import loop_of
from zerograph.runtime.job.reports import Answers, name_ranks
from zerograph.runtime.wire import collectives
from zerograph.state import state_dict

# Seconds until the others know of an interrupt: some looks into the store, and a loaded machine. The timeout is longer.
SOON, TIMEOUT = 20.0, 120.0


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


class Interrupting(TrainStep):
    """A step whose ``build()`` is interrupted as long as ``_interrupts``."""

    _interrupts = False

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        if self._interrupts:
            interrupted()
        return super().build(x, y)


def interrupt_in_step(wire: str, folder: str) -> tuple[str, str, float]:
    """Return rank 0's error, and after how long, when rank 1 is interrupted in backward, catches it and lives on."""
    if wire == "sockets":
        os.environ["ZEROGRAPH_WIRE"] = wire
    try:
        mine = dist.get_rank() == 1

        def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
            return Failing(graph, "aten.gelu_backward", interrupted).run if mine else graph.forward

        step = adam_step("mlp", 2, timeout=TIMEOUT, backend=backend)
        x, y = (part(one) for one in batches("mlp", 1)[0])
        began = time.monotonic()
        kind, message = told(lambda: step(x, y))
        taken = time.monotonic() - began
        # It lives on, without another word, until the other has been told or should have been.
        while mine and time.monotonic() - began < SOON and not Path(folder, "lost").exists():
            time.sleep(0.1)
        note_time(folder)
        return kind, message, taken
    finally:
        os.environ.pop("ZEROGRAPH_WIRE", None)


@pytest.mark.parametrize("wire", ["memory", "sockets"])
def test_nobody_waits_for_a_rank_that_was_interrupted_in_a_step(pool: Pool, wire: str, tmp_path: Path) -> None:
    (kind, message, seconds), (there, _, _) = pool.run(2, interrupt_in_step, wire, str(tmp_path))
    assert there == "KeyboardInterrupt"
    assert kind == "CommunicationError", message
    assert "lost rank 1" in message
    assert "KeyboardInterrupt" in message
    assert seconds < SOON


def interrupt_while_tracing() -> tuple[str, str, float]:
    """(what this rank fails with, its message, the loss of the next try)."""
    model = make("mlp")
    step = Interrupting(model, adamw(model), 2, timeout=TIMEOUT)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step._interrupts = dist.get_rank() == 1
    kind, message = told(lambda: step(x, y))
    step._interrupts = False
    return kind, message, float(step(x, y))


def test_an_interrupt_while_tracing_is_an_error_on_all_and_they_may_go_on(pool: Pool) -> None:
    (kind, message, loss), (there, _, other) = pool.run(2, interrupt_while_tracing)
    assert there == "KeyboardInterrupt"
    assert kind == "RankMismatchError", message
    assert "rank 1" in message
    assert "KeyboardInterrupt" in message
    assert loss == other


class _Interrupting(torch.optim.lr_scheduler.ConstantLR):
    """A scheduler that is interrupted as long as ``interrupts``."""

    interrupts = False

    def step(self, epoch: int | None = None) -> None:
        if self.interrupts:
            interrupted()
        super().step(epoch)


def interrupt_before_the_scheduler() -> tuple[str, int, str, str]:
    """(what the second step fails with, steps counted after it, what the third fails with, its message)."""
    model = make("mlp")
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, 2, timeout=TIMEOUT, backend="eager")
    scheduler = step._schedulers[0] = _Interrupting(optimizer)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step(x, y)
    scheduler.interrupts = dist.get_rank() == 1
    second, _ = told(lambda: step(x, y))
    scheduler.interrupts = False
    return second, step.steps_done, *told(lambda: step(x, y))


def test_an_interrupt_between_the_update_and_the_scheduler_breaks_the_step_off(pool: Pool) -> None:
    (kind, counted, third, message), (there, counted_there, third_there, _) = pool.run(
        2, interrupt_before_the_scheduler
    )
    assert (kind, there) == ("nothing", "KeyboardInterrupt")
    # The update is made and counted on both; only one learning rate has moved on.
    assert counted == counted_there == 2
    assert "nothing" not in (third, third_there)
    assert "rank 1" in message
    assert "interrupted" in message


def interrupt_while_loading() -> tuple[str, str]:
    step = adam_step("mlp", 2, timeout=TIMEOUT)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step(x, y)
    state, read = step.state_dict(), state_dict.read_modules
    if dist.get_rank() == 1:
        state_dict.read_modules = lambda *_: interrupted()
    try:
        return told(lambda: step.load_state_dict(state))
    finally:
        state_dict.read_modules = read


def test_an_interrupt_while_loading_is_an_error_on_all(pool: Pool) -> None:
    (kind, message), (there, _) = pool.run(2, interrupt_while_loading)
    assert (there, kind) == ("KeyboardInterrupt", "RankMismatchError")
    assert "KeyboardInterrupt" in message


def interrupt_while_gathering() -> str:
    """Return the error of the step after a Ctrl-C that all ranks catch, each as it begins another gather."""
    step = adam_step("mlp", 3, timeout=TIMEOUT, bucket_size=1)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step(x, y)
    gathers = [collectives.gather_pieces] * (1 + dist.get_rank())
    with patch.object(collectives, "gather_pieces", lambda *args: (gathers.pop() if gathers else interrupted)(*args)):
        told(lambda: step.full_parameters().__enter__())
    return told(lambda: step(x, y))[1]


def test_after_an_interrupt_within_an_exchange_of_a_state_no_rank_goes_on(pool: Pool) -> None:
    for words in pool.run_afresh(2, interrupt_while_gathering):
        assert "first in where the step before broke off" in words
        assert "rank 1: gathering state outside a step, rank 1, interrupted by KeyboardInterrupt" in words


def save_after_an_interrupt() -> tuple[str, float]:
    """Return the error of a rank that goes on, and of one that saves the whole model after its interrupt; how late."""
    model = make("mlp")
    prepared, optimizer = zg.prepare(model, adamw(model), config=zg.Config(stage=3, timeout=2 * SOON))
    x = part(batches("mlp", 1)[0][0])
    prepared(x).square().mean().backward()
    optimizer.step()
    began = time.monotonic()
    loop = loop_of(prepared)
    assert loop is not None
    alone = (lambda: whole_state(prepared, loop, here=True)) if dist.get_rank() == 1 else (lambda: prepared(x))
    return told(alone)[1], time.monotonic() - began


def test_nobody_waits_for_a_rank_that_saves_the_model_after_its_interrupt(pool: Pool) -> None:
    """As a trainer does whose callback saves on exceptions."""
    for words, seconds in pool.run_afresh(2, save_after_an_interrupt):
        assert "saving bucket 0 of a model" in words
        assert seconds < SOON


def step_in_forked_child() -> tuple[str, float, float]:
    """(what a child is told that rank 0 forks and that calls the step, how long it took, the next loss)."""
    step = adam_step("mlp", 2, timeout=TIMEOUT)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step(x, y)
    told, began = "", time.monotonic()
    if dist.get_rank() == 0:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            answer = "nothing"
            try:
                step(x, y)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            told = file.read()
        os.waitpid(child, 0)
    taken = time.monotonic() - began
    return told, taken, float(step(x, y))


def test_a_forked_child_that_calls_the_step_is_refused_and_its_parent_goes_on(pool: Pool) -> None:
    (told, seconds, loss), (_, _, other) = pool.run(2, step_in_forked_child)
    assert told.startswith("CommunicationError: this process was forked from rank 0 of 2")
    assert seconds < SOON
    assert loss == other


def end_at_once(folder: str) -> tuple[str, float]:
    """Rank 1 ends in its second step; what rank 0 is told, and when."""
    step = adam_step("mlp", 2, timeout=TIMEOUT)
    x, y = (part(one) for one in batches("mlp", 1)[0])
    step(x, y)
    if dist.get_rank() == 1:
        note_time(folder)
        os._exit(3)
    return told(lambda: step(x, y))[1], time.monotonic()


def test_a_process_that_is_known_to_have_ended_is_not_asked(tmp_path: Path) -> None:
    answer, _ = run(2, 1, end_at_once, str(tmp_path))
    message, when = answer.value
    assert "lost rank 1" in message
    assert "its process has ended" in message
    # Asking a rank that may be alive takes three seconds at least.
    assert when - noted_time(str(tmp_path)) < 2.0


def test_a_cut_network_is_named_as_a_cause() -> None:
    assert "network" in "".join(Answers(0, "step 1", {}, silent=(1,)).lines(name_ranks))
    assert "network" in "".join(Answers(0, "step 1", {}, reached=False, store_rank=1).lines(name_ranks))
