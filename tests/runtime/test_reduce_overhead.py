"""The low-overhead form of a graph computes what the graph does, on the same memory, with fewer calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerograph.runtime.reduce_overhead import reduce_overhead

aten = torch.ops.aten


def step(bucket: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads two weights out of a bucket, makes a gradient in one tensor, and updates the bucket."""
    bucket = aten.alias.default(bucket)
    weight = aten.view.default(aten.slice.Tensor(bucket, 0, 0, 6), [2, 3])
    bias = aten.view.default(aten.slice.Tensor(bucket, 0, 6, 8), [2])
    y = aten.addmm.default(bias, x, aten.t.default(weight))
    gradient = aten.empty.memory_format([8])
    into = aten.view.default(aten.slice.Tensor(gradient, 0, 0, 6), [2, 3])
    aten.mm.out(aten.t.default(y), x, out=into)
    aten.copy_.default(aten.view.default(aten.slice.Tensor(gradient, 0, 6, 8), [2]), aten.sum.dim_IntList(y, [0]))
    scale = aten.scalar_tensor.default(0.5)
    aten.add_.Tensor(bucket, aten.mul.Tensor(gradient, scale))
    counted = aten.scalar_tensor.default(1.0)
    aten.add_.Tensor(counted, 1.0)
    return aten.alias.default(weight), counted


@pytest.fixture
def graph() -> fx.GraphModule:
    traced: fx.GraphModule = make_fx(step)(torch.zeros(8), torch.zeros(4, 3))
    return traced


def test_the_low_overhead_form_computes_the_same_in_every_step(graph: fx.GraphModule) -> None:
    plain, bucket = torch.arange(8.0), torch.arange(8.0)
    run = reduce_overhead(graph, [bucket, None])
    for number in range(3):
        x = torch.full((4, 3), number + 1.0)
        expected, got = graph.forward(plain, x), run(bucket, x)
        assert torch.equal(bucket, plain)
        # A number that the step writes to begins anew in each.
        assert all(map(torch.equal, got, expected))


def test_views_of_constant_feeds_are_created_once(graph: fx.GraphModule) -> None:
    module = reduce_overhead(graph, [torch.arange(8.0), None]).__self__  # type: ignore[attr-defined]
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert aten.slice.Tensor not in targets
    # Pieces of the gradient, which is new in each step, take one call each.
    assert targets.count(torch.as_strided) == 2
    assert targets.count(aten.scalar_tensor.default) == 1


def test_each_step_returns_a_new_tensor(graph: fx.GraphModule) -> None:
    bucket = torch.arange(8.0)
    run = reduce_overhead(graph, [bucket, None])
    (first, _), (second, _) = run(bucket, torch.ones(4, 3)), run(bucket, torch.ones(4, 3))
    assert first is not second
