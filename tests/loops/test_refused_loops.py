"""Check that what a step of a loop cannot do is an error on the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import zerograph as zg
from tests.loops.test_prepare import X, Y, network, ready


def no_backward(model: nn.Module, optimizer: Any) -> None:
    model(X)
    optimizer.step()


def not_cleared(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def twice(model: nn.Module, optimizer: Any) -> None:
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    loss.backward()


def changed_input(model: nn.Module, optimizer: Any) -> None:
    x = torch.zeros(2**15, 6, dtype=torch.float64)
    loss = model(x).square().mean()
    x.fill_(1.0)
    loss.backward()
    optimizer.step()


def written_gradient(model: nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    next(model.parameters()).grad = torch.zeros(3)


def closure(model: nn.Module, optimizer: Any) -> None:
    optimizer.step(lambda: None)


def updated_since(model: nn.Module, optimizer: Any) -> None:
    out = model(X)
    F.cross_entropy(out.detach() + model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    out.mean().backward()


def around_the_model(model: nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    next(model.children())(X).square().mean().backward()
    optimizer.step()


def one_optimizer_alone(model: nn.Module, optimizer: Any) -> None:
    first = network()
    part = torch.optim.SGD(first[0].parameters(), lr=0.1)
    last = torch.optim.SGD(first[2].parameters(), lr=0.1)
    first, part = zg.prepare(first, part)
    F.cross_entropy(first(X), Y).backward()
    part.step()
    last.step()


def group_with_a_gradient(model: nn.Module, optimizer: Any) -> None:
    first = network()
    part = torch.optim.SGD(first[0].parameters(), lr=0.1)
    first, part = zg.prepare(first, part)
    F.cross_entropy(first(X), Y).backward()
    part.add_param_group({"params": list(first[2].parameters())})


def anomalies(model: nn.Module, optimizer: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def penalty(model: nn.Module, optimizer: Any) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def penalty_within(model: nn.Module, optimizer: Any) -> None:
    model(X).requires_grad_()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        last: Tensor = self.rnn(packed)[1][0][-1]
        return last


def packed_rows(model: nn.Module, optimizer: Any) -> None:
    rnn = Packed()
    rnn, _ = zg.prepare(rnn, torch.optim.SGD(rnn.parameters(), lr=0.1))
    rnn(torch.zeros(4, 5, 6), torch.tensor([5, 2, 3, 1]))


LOOPS: dict[str, tuple[Callable[[nn.Module, Any], None], str]] = {
    "no backward": (no_backward, r"without loss\.backward"),
    "gradients not cleared": (not_cleared, r"without zero_grad\(\)"),
    "one loss twice": (twice, "twice on one loss"),
    "an input that changed": (changed_input, "changed in place"),
    "a gradient of another shape": (written_gradient, r"set to a tensor of shape \(3,\)"),
    "a loss from a submodule": (around_the_model, "computed without the prepared model"),
    "a closure": (closure, "closure"),
    "an optimizer that is not prepared": (one_optimizer_alone, "no prepared optimizer trains"),
    "a new group with a gradient": (group_with_a_gradient, "has a gradient already"),
    "detection of anomalies": (anomalies, "on_nonfinite = 'raise'"),
    "a penalty on gradients of an input": (penalty, r"WGAN-GP's, into the build\(\) of a zg\.ZeroGraph"),
    "a penalty on gradients of a result": (penalty_within, r"create_graph=True\) works there"),
    "rows packed by their lengths": (packed_rows, r"output\[torch\.arange\(len\(lengths\)\), lengths - 1\]"),
    "a result of an updated model": (updated_since, "was updated since"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_step_cannot_do_is_an_error(name: str) -> None:
    loop, message = LOOPS[name]
    with pytest.raises(zg.ZeroGraphError, match=message):
        loop(*ready())
