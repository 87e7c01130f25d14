"""Models, loops and graphs are freed with the user's objects: no cache of the process keeps them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.pool import Pool
from zerograph.loops.prepare import loop_of


class Scaled(nn.Parameter):
    """A class of parameters of the user's."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.scale = Scaled(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) * self.scale).square().mean()


def prepared_loop(kind: Callable[..., nn.Module] = Net, *args: Any) -> list[Any]:
    model: Any = kind(*args)
    model, optimizer = zg.prepare(model, torch.optim.Adam(model.parameters()), stage=3)
    for _ in range(2):
        model(torch.ones(4, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zg.full_parameters(model):
        len(optimizer.state)
    loop: Any = loop_of(model)
    return [model, optimizer, loop, loop.graph(optimizer), loop.graph()]


class TwoResults(Net):
    def forward(self, x: Tensor) -> Any:
        features = self.layers(x) * self.scale
        return features.square().mean(), {"features": features}


def loop_of_two_results() -> list[Any]:
    """Autograd's node of such a call belongs to several tensors, and so is no part of a cycle that Python sees."""
    model: Any = TwoResults()
    model, optimizer = zg.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(4):
        loss, _ = model(torch.ones(4, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model, optimizer, loop_of(model)]


def layer_of_torch() -> list[Any]:
    """A prepared model has a class of its own, which is in a module of torch here."""
    return prepared_loop(nn.Sequential, Net())


def graph() -> list[Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step = LossStep(model, optimizer)
    step(torch.ones(4, 4))
    step.state_dict()
    return [model, optimizer, step, step._compiled().captured.graph, step._compiled().executor]


def users_classes() -> list[Any]:
    class Own(Net):
        pass

    class Parameter(nn.Parameter):
        pass

    model: Any = Own()
    model.scale = Parameter(torch.ones(()))
    zg.prepare(model, torch.optim.Adam(model.parameters()))
    return [Own, Parameter]


@pytest.mark.parametrize("make", [prepared_loop, layer_of_torch, loop_of_two_results, graph, users_classes])
def test_what_was_prepared_is_freed(make: Callable[[], list[Any]]) -> None:
    references = [weakref.ref(one) for one in make()]
    # Tensors that torch's nodes hold are freed by the first, and what holds those nodes by the second.
    gc.collect()
    gc.collect()
    alive = [reference() for reference in references]
    assert alive == [None] * len(alive)


def tensors_in_cycles() -> list[str]:
    """Return the tensors that a step of a loop leaves for the garbage collector."""
    torch.manual_seed(0)
    model, optimizer, loader = zg.prepare(net := Net(), torch.optim.Adam(net.parameters()), [torch.ones(4, 4)] * 4)
    gc.collect()
    gc.disable()
    for number, x in enumerate(loader):
        if number == 3:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        model(x).backward()
        model.layers(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x).item()
    gc.collect()
    gc.set_debug(0)
    gc.enable()
    left = [str(type(one)) for one in gc.garbage if isinstance(one, Tensor)]
    gc.garbage.clear()
    return left


def test_a_step_leaves_no_tensor_to_the_garbage_collector(pool: Pool) -> None:
    assert pool.run(2, tensors_in_cycles) == [[], []]
