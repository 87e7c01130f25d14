"""Values that a loop reads before ``backward()``: the step pauses there, and no second forward runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, prepare
from tests.loops.test_prepare import X, Y, loop_of, network
from zerograph._torch import written_arguments
from zerograph.compiler.step_key import StepRequest
from zerograph.ir.alias import WAIT
from zerograph.ir.metadata import role
from zerograph.ir.pause import pause_of
from zerograph.loops.loop_graphs import LoopForward, LoopPreview, LoopStep
from zerograph.loops.prepare import loop_of as loop_of_module

Train = Callable[[nn.Module, Any], list[float]]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that ran besides steps that paused and went on, and besides updates."""
    programs: list[str] = []
    for kind in (LoopPreview, LoopForward, LoopStep):
        plain = kind.run_loop

        def run_loop(self: Any, program: Any, plain: Any = plain) -> Any:
            if program.calls:
                programs.append(program.text)
            return plain(self, program)

        monkeypatch.setattr(kind, "run_loop", run_loop)
    return programs


def assert_like_plain(train: Train, *layers: nn.Module, stage: int = 3) -> nn.Module:
    """Assert that a loop prints and learns what it does in plain PyTorch; return the prepared model."""
    twin, model = network(*copy.deepcopy(layers)), network(*layers)
    printed = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    mine = train(*zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage))
    assert mine == pytest.approx(printed, rel=1e-9)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
    return model


def test_a_loss_that_is_read_takes_no_second_forward(forwards: list[str], recwarn: pytest.WarningsRecorder) -> None:
    def train(model: nn.Module, optimizer: Any) -> list[float]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        printed = []
        for number in range(4):
            loss = F.cross_entropy(model(X), Y) * (number + 1)
            printed.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            printed.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            schedule.step()
        return [float(one) for one in printed]

    assert_like_plain(train, nn.BatchNorm1d(16))
    # The number that the loss is multiplied by is an input of the graph from the second step on: another step.
    assert len(forwards) == 4
    assert not recwarn.list


def test_a_metric_is_computed_from_values_that_the_step_has(forwards: list[str]) -> None:
    def train(model: nn.Module, optimizer: Any) -> list[float]:
        printed = []
        for _ in range(4):
            output = model(X)
            first, second = F.cross_entropy(output, Y), output.square().mean()
            with torch.no_grad():
                printed += [first.item(), second.item(), (output.argmax(1) == Y).double().mean().item()]
            optimizer.zero_grad()
            (first + second).backward()
            optimizer.step()
        return printed

    assert_like_plain(train)
    assert ["model" in text for text in forwards] == [True] * 4 + [False] * 3


def test_each_backward_of_an_accumulation_may_follow_a_read(forwards: list[str]) -> None:
    def train(model: nn.Module, optimizer: Any) -> list[float]:
        printed = []
        for count in (2, 3, 1):
            for number in range(count):
                loss = F.cross_entropy(model(X * (number + 1)), Y) / 2
                printed.append(loss.item())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return printed

    assert_like_plain(train, nn.BatchNorm1d(16))
    # Two forwards and two backwards of the first step.
    assert len(forwards) == 4


def interrupted(model: nn.Module, optimizer: Any, what: str) -> list[float]:
    """Train, and do something else after a value was read in step 2 of 4."""
    printed, kept = [], []
    for number in range(4):
        loss = F.cross_entropy(model(X * (number + 1)), Y)
        printed.append(loss.item())
        if number == 2:
            if what == "skip":
                kept.append(loss)
                continue
            if what == "evaluate":
                model.eval()
                with torch.no_grad():
                    printed.append(model(X).square().mean().item())
                model.train()
            elif what == "save":
                printed.append(sum(one.double().sum().item() for one in model.state_dict().values()))
            elif what == "another loss":
                loss = loss + model(-X).square().mean()
            elif what == "raise":
                try:
                    model(X[:, :3])
                except (RuntimeError, zg.ZeroGraphError):
                    printed.append(1.0)
            elif what == "a change":
                loss = loss * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return printed


@pytest.mark.parametrize(
    "what",
    [
        "skip",
        "evaluate",
        "another loss",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("save", "raise", "a change")),
    ],
)
def test_a_loop_may_go_on_differently_after_a_read(what: str) -> None:
    layers = [nn.BatchNorm1d(16)] if what != "another loss" else []
    assert_like_plain(lambda model, optimizer: interrupted(model, optimizer, what), *layers)


def test_a_branch_on_a_value_is_ordinary_python(forwards: list[str]) -> None:
    counts = []

    def train(model: nn.Module, optimizer: Any) -> list[float]:
        printed = []
        for limit in (9, 9, 0, 0, 9, 9, 0):
            before = len(forwards)
            loss = F.cross_entropy(model(X), Y)
            printed.append(loss.item())
            if printed[-1] > limit:
                loss = loss.sqrt() * 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counts.append(len(forwards) - before)
        return printed

    model = assert_like_plain(train)
    # Where the outcome changes, what has begun is freed and the step runs whole. Each outcome is a graph.
    assert counts[7:] == [2, 0, 1, 0, 1, 0, 1]
    assert loop_of(model)._steps[(0,), "update"]._steps.compilations == 2


def test_a_value_that_is_read_before_another_batch_takes_a_second_forward() -> None:
    model, optimizer = zg.prepare(model := network(), torch.optim.SGD(model.parameters(), lr=0.1), stage=2)

    def train(number: int) -> None:
        loss = F.cross_entropy(model(X), Y)
        loss.item()
        (loss + model(X * number).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    train(1)
    with pytest.warns(UserWarning, match="takes an extra forward") as seen:
        train(2)
    assert seen[0].filename == __file__


def test_a_paused_step_ends_with_the_results_that_it_serves() -> None:
    model, optimizer = zg.prepare(model := network(), torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    for _ in range(3):
        loss = F.cross_entropy(model(X), Y)
        loss.item()
        running: Any = loop_of(model)._pauses._running
        if _ < 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert running.paused is not None
    del loss
    assert running.paused is None


def test_numbers_are_those_of_a_loop_that_reads_nothing() -> None:
    states, peaks = [], []
    for reads in (False, True):
        model = network(nn.BatchNorm1d(16), nn.Dropout(0.5))
        model, optimizer = zg.prepare(model, torch.optim.AdamW(model.parameters()), stage=2, config=seeded())
        for _ in range(3):
            loss = F.cross_entropy(model(X), Y)
            if reads:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(loop_of(model)._steps[(0,), "update"].memory.peak)
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_nothing_is_in_flight_and_no_state_changes_before_a_pause(budget: str | None) -> None:
    options: dict[str, Any] = {"backend": "eager", "shard_min_size": 1, "bucket_size": 200, "memory_budget": budget}
    model = network(nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = LossStep(model, optimizer, 3, lambda module, x, y: F.cross_entropy(module(x), y), **options)
    step._request = StepRequest(early_outputs=1)
    graph = prepare(step, X, Y).step.emitted
    pause = pause_of(graph)
    assert pause is not None
    before = [node for node in graph.nodes if node < pause]
    starts = [wait.args[0] for wait in graph.find_nodes(op="call_function", target=WAIT)]
    assert all(start < pause for start in starts[:2])
    assert not any(wait > pause for start in starts if start < pause for wait in start.users if wait.target is WAIT)
    written = [argument for node in before for argument in written_arguments(node)]
    assert not any(role(node).kind != "gather_buffer" for node in written if node.op == "placeholder")


def seeded() -> zg.Config:
    config = zg.Config()
    config.seed = 1
    return config


def test_an_interrupt_in_the_rest_of_a_step_leaves_the_loop_usable() -> None:
    def train(model: nn.Module, optimizer: Any) -> list[float]:
        printed = []
        for number in range(4):
            loss = F.cross_entropy(model(X), Y)
            printed.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if number != 2:
                optimizer.step()
            elif loop_of_module(model) is not None:
                loop_of(model)._pauses._running.paused.finish = interrupted_by_user  # type: ignore[union-attr]
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
        return printed

    def interrupted_by_user(_: Any) -> list[Tensor]:
        raise KeyboardInterrupt

    assert_like_plain(train)
