"""Operators that simplify rewrites, and those that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.harness import Function

aten = torch.ops.aten
Computation = Callable[[Tensor], Tensor]


def check(compute: Computation, operator: object, *, stays: bool) -> None:
    x = torch.randn(6, 6)
    graph = Function(compute)
    assert torch.equal(graph(x), compute(x))
    assert any(node.target is operator for node in graph.inspect.graph_after("capture").graph.nodes)
    assert any(node.target is operator for node in graph.inspect.graph_after("simplify").graph.nodes) is stays


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[torch.arange(6)[:, None], torch.arange(6)],
        lambda x: x[torch.arange(6)[:, None, None], torch.arange(6)[None, None, :] + 0],
    ],
)
def test_a_lookup_at_all_positions_in_order_is_a_view(compute: Computation) -> None:
    check(compute, aten.index.Tensor, stays=False)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[torch.arange(6), torch.arange(6)[:, None]],  # transposed
        lambda x: x[torch.arange(6), torch.arange(6)],  # the diagonal
        lambda x: x[torch.arange(5)[:, None], torch.arange(6)],
        lambda x: x[torch.arange(6)[:, None], torch.arange(6) - 1],
        lambda x: x[torch.arange(6)[:, None], torch.arange(0, 12, 2) % 6],
        lambda x: x[torch.arange(6)],
    ],
)
def test_any_other_lookup_stays(compute: Computation) -> None:
    check(compute, aten.index.Tensor, stays=True)


def test_a_copy_over_memory_of_the_same_kind_is_what_was_copied() -> None:
    def compute(x: Tensor) -> Tensor:
        return torch.zeros(6, 6).copy_(x + 1) * 2

    check(compute, aten.copy.default, stays=False)


def test_a_copy_that_casts_or_broadcasts_stays() -> None:
    check(lambda x: torch.zeros(6, 6, dtype=torch.float64).copy_(x + 1), aten.copy.default, stays=True)
    check(lambda x: torch.zeros(2, 6, 6).copy_(x + 1), aten.copy.default, stays=True)


class Swapped(zg.ZeroGraph):
    """Two buffers that take each other's values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.register_buffer("one", torch.tensor([1.0]))
        self.model.register_buffer("two", torch.tensor([2.0]))

    def build(self, x: Tensor) -> Tensor:
        kept = self.model.one.clone()
        self.model.one.copy_(self.model.two)
        self.model.two.copy_(kept)
        return x + self.model.one


def test_a_copy_of_state_that_changes_keeps_the_old_value() -> None:
    graph = Swapped()
    assert graph(torch.zeros(1)).item() == 2.0
    assert (graph.model.one.item(), graph.model.two.item()) == (2.0, 1.0)
