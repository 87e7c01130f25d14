"""Several calls of ``backward()`` before a step, and gradients that a loop reads or changes, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import compilations_of, sliced
from tests.loops.test_prepare import X, Y, loop_of, network
from zerograph.loops.loop_graph import Update

Edit = Callable[[list[nn.Parameter]], Iterable[float]]


def train(prepared: bool, windows: Iterable[int], edit: Edit | None = None, stage: int = 3) -> Any:
    """Return the printed numbers, the states and the model of a loop with a window of backwards for each step."""
    model = network(nn.BatchNorm1d(16))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if prepared:
        model, optimizer = zg.prepare(model, optimizer, stage=stage)
    printed = []
    for count in windows:
        running: Any = torch.zeros(())
        for number in range(count):
            rows = 8 if number < 2 else 6
            loss = F.cross_entropy(model(X[:rows] * (number + 1)), Y[:rows]) / count
            loss.backward()
            running = running + loss.detach()
        printed += edit(list(model.parameters())) if edit else []
        optimizer.step()
        optimizer.zero_grad()
        printed += [loss.item(), running.item()]
    return printed, [model.state_dict(), optimizer.state_dict()], model


def assert_same(windows: Iterable[int], edit: Edit | None = None, stage: int = 3) -> nn.Module:
    printed, states, _ = train(False, windows, edit)
    mine, my_states, model = train(True, windows, edit, stage)
    assert mine == pytest.approx(printed, rel=1e-9)
    torch.testing.assert_close(my_states, states, rtol=1e-9, atol=1e-12)
    return model


def compilations(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of graphs of calls and of updates that a loop has compiled."""
    loop = loop_of(model)
    calls = [kind.graph for kind in loop.calls._kinds.values() if kind.graph is not None]
    return sum(compilations_of(one) for one in calls), sum(compilations_of(one) for one in loop._updates.values())


def test_another_number_of_backwards_compiles_nothing() -> None:
    # Again for another size of the batch.
    model = assert_same([2, 3, 4, 1, 3, 2])
    assert compilations(model) == (2, 1)


def several_at_once(parameters: list[nn.Parameter]) -> list[float]:
    torch._foreach_mul_([gradient_of(parameter) for parameter in parameters], 0.5)
    for parameter in parameters:
        parameter.grad += 0.01
        gradient_of(parameter).view(-1)[0] = 0.25
    return []


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@sliced("count", [2], [1])
def test_gradients_can_be_read_and_changed_before_the_step(count: int) -> None:
    assert_same([count, count], several_at_once, stage=count)


def test_a_limit_of_clipping_may_be_a_tensor_that_changes() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        limit = torch.tensor(0.1)
        for _ in range(4):
            F.cross_entropy(model(X), Y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            limit.mul_(1.0001)

    model, twin = network(), network()
    loop(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop(model, optimizer)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def changing_what_was_read(model: nn.Module, optimizer: Any) -> list[float]:
    printed = []
    for _ in range(3):
        F.cross_entropy(model(X), Y).backward()
        gradient = gradient_of(next(model.parameters()))
        F.cross_entropy(model(X), Y).backward()
        printed.append(float(gradient.norm()))
        gradient.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
    return printed


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()

    def forward(self, x: Tensor, first: bool) -> Tensor:
        out: Tensor = (self.first if first else self.second)(x)
        return out


def zeroing(model: nn.Module, optimizer: Any) -> list[float]:
    """A parameter whose gradient is zero, not None, is decayed too."""
    printed = []
    for number in range(5):
        loss = F.cross_entropy(model(X, number % 2 == 0), Y)
        (model if number == 3 else optimizer).zero_grad(set_to_none=number == 4)
        gradient = next(model.parameters()).grad
        printed.append(-1.0 if gradient is None else float(gradient.norm()))
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return printed


def clearing_some(model: nn.Module, optimizer: Any) -> list[float]:
    """Gradients of others in the bucket add up, and are not read."""
    printed = []
    for _ in range(3):
        for x in (X, 2 * X):
            next(model.parameters()).grad = None
            loss = F.cross_entropy(model(x), Y)
            loss.backward()
            printed.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return printed


@pytest.mark.parametrize(
    ("loop", "make"),
    [(zeroing, Branches), (clearing_some, network), (changing_what_was_read, network)],
)
def test_gradients_are_kept_changed_and_cleared_as_in_plain_pytorch(
    loop: Callable[[nn.Module, Any], list[float]], make: Callable[[], nn.Module]
) -> None:
    model, twin = make(), make()
    options: dict[str, float] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    printed = loop(twin, torch.optim.SGD(twin.parameters(), **options))
    mine = loop(*zg.prepare(model, torch.optim.SGD(model.parameters(), **options), stage=2))
    assert mine == pytest.approx(printed, rel=1e-9)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


def halve_large(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05)


def test_a_hook_after_accumulation_sees_each_sum() -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for number in range(3):
            loss = F.cross_entropy(model(X * (number + 1)), Y)
            loss.backward()
            losses.append(loss.item())
            if number:
                optimizer.step()
        return losses

    model, twin = network(), network()
    for module in (model, twin):
        module[0].weight.register_post_accumulate_grad_hook(halve_large)  # type: ignore[index, operator]
        module[2].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index, operator]
    losses = loop(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    mine = loop(*zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2))
    assert mine == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


def test_an_interrupt_before_the_update_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    F.cross_entropy(model(X), Y).backward()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Update, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    twin = network()
    F.cross_entropy(twin(X), Y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
