"""``torch.utils.checkpoint`` inside the model is honoured: forward is computed again, and nothing changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import zerograph as zg
from tests.models import TrainStep, adamw, batches
from zerograph.ir.metadata import origin
from zerograph.ir.region import local

aten = torch.ops.aten
LAYERS = 3


class Layer(nn.Module):
    """Products on both sides of a norm that counts its batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 14), nn.BatchNorm1d(14), nn.Linear(14, 7)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        return x + self.down(nn.functional.dropout(h.exp(), 0.2))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(7, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for layer in self.layers:
            layer.checkpointed = way == "inside"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "sequential":
            return checkpoint_sequential(self.layers, LAYERS, x, use_reentrant=False)
        for layer in self.layers:
            x = WAYS[self.way](layer, x)
        return x


def keeping_products(layer: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "inside": lambda layer, x: layer(x),
    "selective": keeping_products,
    "sequential": lambda layer, x: x,
}


@functools.cache
def train(way: str) -> tuple[TrainStep, Tensor]:
    torch.manual_seed(0)
    model = Net(way)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
    return step, torch.stack([step(*batch) for batch in batches("mlp", 2, 64)])


def again(step: TrainStep) -> list[fx.Node]:
    return [node for node in step.inspect.graph_after("capture").graph.nodes if node.meta.get("recomputed")]


@pytest.mark.parametrize(
    ("way", "products"), [("checkpoint", 1), ("inside", 1), ("sequential", 1), ("selective", 0), ("reentrant", 1)]
)
def test_forward_is_computed_again_and_no_bit_changes(way: str, products: int) -> None:
    reference, losses = train("plain")
    step, found = train(way)
    assert torch.equal(found, losses)
    state = step.model.state_dict()
    for name, value in reference.model.named_parameters():
        assert torch.equal(state[name], value), name
    # As in PyTorch, batch norm counts a batch once more when it is computed again.
    plain = Net(way)
    for x, _ in batches("mlp", 2, 64):
        plain(x).sum().backward()
    counts = [name for name in state if name.endswith("num_batches_tracked")]
    assert [state[name] for name in counts] == [plain.state_dict()[name] for name in counts]
    assert state["layers.0.norm.num_batches_tracked"] == 4
    if way == "sequential":
        # Its last segment is run as it is.
        assert {origin(node).module.split(".")[2] for node in again(step)} == {"0", "1"}
        return
    for layer in range(LAYERS):
        mine = [node for node in again(step) if f"layers.{layer}" in origin(node).module]
        assert sum(node.target is aten.addmm.default for node in mine) == products
        assert any(node.target is aten.exp.default for node in mine)
    assert step.inspect.memory.kinds["activations"] < 0.8 * reference.inspect.memory.kinds["activations"]


@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "inside"])
def test_what_is_computed_again_keeps_its_module_and_line(way: str) -> None:
    step, _ = train(way)
    found = {
        node.target: origin(node)
        for node in again(step)
        if origin(node).module.startswith("model.layers.1")
        if node.target in (aten.addmm.default, aten.exp.default)
    }
    assert found[aten.addmm.default].module == "model.layers.1.up"
    assert "self.up(x)" in found[aten.addmm.default].code
    assert found[aten.exp.default].module == "model.layers.1"
    assert "h.exp()" in found[aten.exp.default].code
    assert {one.phase for one in found.values()} == {"backward"}


def test_a_loss_is_scaled_once() -> None:
    """Use a reentrant checkpoint, whose backward is a call of its own within the step's."""
    losses = []
    for way in ("plain", "reentrant"):
        torch.manual_seed(0)
        model = Net(way)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
        step.config.enable_amp(True, dtype=torch.float16)
        losses.append(torch.stack([step(*batch) for batch in batches("mlp", 2, 64)]))
    assert torch.equal(losses[0], losses[1])


class Regional(nn.Module):
    """A local region between two layers, inside a checkpoint or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.up, self.down = again, nn.Linear(7, 14), nn.Linear(14, 7)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.again else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.down(zg.local(lambda h: nn.functional.dropout(h.exp(), 0.2))(self.up(x)))


def test_a_local_region_is_computed_again() -> None:
    losses = []
    for repeated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 7), Regional(repeated))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
        losses.append(torch.stack([step(*batch) for batch in batches("mlp", 2, 64)]))
    assert torch.equal(losses[0], losses[1])
    assert any(node.target is local for node in again(step))


class Watched(nn.Module):
    """Counts in forward, and notes in backward how large the gradient was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)
        y = self.linear(x)
        y.register_hook(self.note)
        return y

    def note(self, gradient: Tensor) -> None:
        self.passes.add_(1)
        self.largest.copy_(gradient.abs().max())


def test_backward_changes_buffers_too() -> None:
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, data = Watched(), batches("mlp", 1)[0]
        if compiled:
            TrainStep(model, adamw(model))(*data)
        else:
            nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        states.append((model.passes, model.largest))
    assert states[1][0] == states[0][0] == 2
    torch.testing.assert_close(states[1][1], states[0][1])


def test_a_checkpoint_that_computes_something_else_again_is_torchs_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(7, 3), [0]

        def other(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            return self.linear(x).exp() if self.calls[0] == 1 else self.linear(x[:2]).exp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.other, x, use_reentrant=False)

    step = TrainStep(model := Fickle(), adamw(model))
    with pytest.raises(Exception, match="different metadata"):
        step(*batches("mlp", 1)[0])
