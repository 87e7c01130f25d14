"""Values that a loop reads before ``backward()``, and decides by, are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerograph as zg
from tests.harness import LossStep, prepare, sliced
from tests.loops.test_accumulation import compilations
from tests.loops.test_prepare import X, Y, network
from zerograph._torch import written_arguments
from zerograph.compiler.step_key import StepRequest
from zerograph.ir.alias import WAIT
from zerograph.ir.metadata import role
from zerograph.ir.pause import pause_of

Train = Callable[[nn.Module, Any], list[float]]


def assert_like_plain(train: Train, *layers: nn.Module, stage: int = 3) -> nn.Module:
    """Assert that a loop prints and learns what it does in plain PyTorch; return the prepared model."""
    twin, model = network(*copy.deepcopy(layers)), network(*layers)
    printed = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    mine = train(*zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage))
    assert mine == pytest.approx(printed, rel=1e-9)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
    return model


def test_a_loss_and_a_norm_are_read(recwarn: pytest.WarningsRecorder) -> None:
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
    assert not recwarn.list


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


@sliced("what", ["skip", "evaluate", "another loss"], ["save", "raise", "a change"])
def test_a_loop_may_go_on_differently_after_a_read(what: str) -> None:
    layers = [nn.BatchNorm1d(16)] if what != "another loss" else []
    assert_like_plain(lambda model, optimizer: interrupted(model, optimizer, what), *layers)


def test_a_branch_on_a_value_is_ordinary_python() -> None:
    def train(model: nn.Module, optimizer: Any) -> list[float]:
        printed = []
        for limit in (9, 9, 0, 0, 9, 9, 0):
            loss = F.cross_entropy(model(X), Y)
            printed.append(loss.item())
            if printed[-1] > limit:
                loss = loss.sqrt() * 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return printed

    model = assert_like_plain(train)
    # The graph of the calls does not depend on what the loop does with their result.
    assert compilations(model) == (1, 1)


def test_numbers_are_those_of_a_loop_that_reads_nothing() -> None:
    states = []
    for reads in (False, True):
        torch.manual_seed(1)
        model = network(nn.BatchNorm1d(16), nn.Dropout(0.5))
        model, optimizer = zg.prepare(model, torch.optim.AdamW(model.parameters()), stage=2)
        for _ in range(3):
            loss = F.cross_entropy(model(X), Y)
            early = loss.item() if reads else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert early in (None, loss.item())
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_before_a_pause_nothing_is_in_flight_and_only_buffers_change(budget: str | None) -> None:
    options: dict[str, Any] = {"backend": "eager", "shard_min_size": 1, "bucket_size": 200, "memory_budget": budget}
    model = network(nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = LossStep(model, optimizer, 3, lambda module, x, y: F.cross_entropy(module(x), y), **options)
    step._request = StepRequest(early_outputs=1)
    graph = prepare(step, X, Y).emitted
    pause = pause_of(graph)
    assert pause is not None
    before = [node for node in graph.nodes if node < pause]
    starts = [wait.args[0] for wait in graph.find_nodes(op="call_function", target=WAIT)]
    assert all(start < pause for start in starts[:2])
    assert not any(wait > pause for start in starts if start < pause for wait in start.users if wait.target is WAIT)
    written = [argument for node in before for argument in written_arguments(node)]
    kinds = [role(node).kind for node in written if node.op == "placeholder"]
    assert set(kinds) <= {"gather_buffer", "buffer"}
    assert kinds.count("buffer") == 3
