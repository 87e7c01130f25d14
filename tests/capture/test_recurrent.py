"""Recurrent layers whose weights cuDNN has packed into one storage, and their plain form for accelerators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, sliced
from tests.models import update_by
from tests.pool import Pool
from zerograph.capture import substitutes

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


class Cells(nn.Module):
    """Run a cell over a sequence."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = cell(6, 8)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> list[Tensor]:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return [torch.stack(outputs, 1)]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 8, 2, batch_first=True),
    "lstm, both ways, projected": lambda: nn.LSTM(6, 8, proj_size=4, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(6, 8, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(6, 8, batch_first=True, nonlinearity="relu"),
    "lstm cell": lambda: Cells(nn.LSTMCell),
    "gru cell": lambda: Cells(nn.GRUCell),
    "rnn cell": lambda: Cells(nn.RNNCell),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]()


def one_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(6, 8, batch_first=True)


def packed(module: nn.Module) -> nn.Module:
    """Make all parameters views of one storage, as cuDNN does."""
    parameters = list(module.parameters())
    flat, start = torch.cat([parameter.detach().flatten() for parameter in parameters]), 0
    for parameter in parameters:
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return module


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[0].square().mean()  # type: ignore[no-any-return]


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return [update_by(optimizer, loss_of(model, X)) for _ in range(3)]


@pytest.mark.parametrize("name", LAYERS)
def test_the_form_for_accelerators_computes_the_same(name: str) -> None:
    expected, model = trained(make(name)), make(name)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=loss_of)
    with patch.object(substitutes, "_is_on_accelerator", lambda input: True):
        prepared = [step(X) for _ in range(3)]
    torch.testing.assert_close(prepared, expected, rtol=1e-6, atol=0)
    operators = {str(node.target) for node in step.inspect.graph_after("capture").graph.nodes}
    assert not any(word in text for text in operators for word in ("rnn", "lstm", "gru", "storage"))


def with_dropout(kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = kind(6, 8, 2, batch_first=True, bidirectional=True, dropout=0.4)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=loss_of)
    return [step(X) for _ in range(3)]


@sliced("kind", [nn.GRU], [nn.LSTM, nn.RNN])
def test_the_form_for_accelerators_drops_the_same_between_layers(kind: Any) -> None:
    expected = with_dropout(kind)
    with patch.object(substitutes, "_is_on_accelerator", lambda input: True):
        torch.testing.assert_close(with_dropout(kind), expected, rtol=1e-6, atol=0)


def train_packed(stages: Sequence[int]) -> list[list[Tensor]]:
    """Return the losses at each stage; each begins with weights in one storage."""
    torch.set_num_threads(1)
    losses = []
    for stage in stages:
        model = packed(one_layer())
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), stage, loss_of)
        losses.append([step(X.chunk(zg.world_size())[zg.rank()]) for _ in range(3)])
    return losses


def test_parameters_that_are_views_of_one_storage_train_as_others(pool: Pool) -> None:
    expected = trained(one_layer())
    for stages in [train_packed([3]), *pool.run(2, train_packed, (0, 3))]:
        torch.testing.assert_close(stages, [expected] * len(stages), rtol=1e-6, atol=0)


def in_a_loop(prepare: Callable[..., Any], rows: tuple[slice, slice]) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = prepare(module := nn.GRU(6, 8, batch_first=True), torch.optim.SGD(module.parameters(), lr=0.1))
    return [update_by(optimizer, model(X[own])[0].square().mean()).item() for own in rows]


def dynamic_in_a_loop() -> list[float]:
    config = zg.Config(stage=2, dynamic_shapes=True)
    whole, uneven = (slice(2 * zg.rank(), 2 * zg.rank() + 2), slice(zg.rank(), 1 + 3 * zg.rank()))
    return in_a_loop(lambda *objects: zg.prepare(*objects, config=config), (uneven, whole))


def test_a_recurrent_layer_in_a_loop_takes_unequal_rows(pool: Pool) -> None:
    expected = in_a_loop(lambda *objects: objects, (slice(0, 4), slice(0, 4)))
    for losses in pool.run(2, dynamic_in_a_loop):
        assert losses == pytest.approx(expected, rel=1e-5)
