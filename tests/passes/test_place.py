"""Placement: what a graph costs is no more than the cheapest choice of all, where all can be tried."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.mesh import Mesh, line
from zerograph.ir.metadata import Boxing, Role
from zerograph.ir.sbp import Split, broadcast
from zerograph.ir.step_graph import placeholders
from zerograph.ir.zero import OFF
from zerograph.passes.context import BatchLayout, Context
from zerograph.passes.placement.box import box
from zerograph.passes.placement.place import place
from zerograph.passes.placement.problem import PlacementProblem, placement_problem

CONTEXT = Context(line(2, 0, "none"), OFF, (), {}, BatchLayout(((Split(0),),)))
SIZE = 64


def graph_of(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """A step graph of one function of a (64, 64) tensor, whose result is read whole."""
    with _torch.fake_mode(), torch.no_grad():
        module = _torch.trace(lambda x: [function(x)], [torch.empty(SIZE, SIZE)])
    placeholders(module.graph)[0].meta["role"] = Role("input", "0")
    module.graph.output_node().meta["roles"] = [Role("output", "0")]
    return module


def placed(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    module = graph_of(function)
    return box(place(module, CONTEXT), CONTEXT)


def sent(module: fx.GraphModule) -> float:
    return sum(node.meta["boxing"].sent for node in module.graph.nodes if isinstance(node.meta.get("boxing"), Boxing))


def alternating(x: Tensor) -> Tensor:
    """Each softmax wants another dimension whole: turning the tensor for each costs less once, and more in all."""
    for dim in (0, 1, 0, 1, 0, 1):
        x = torch.softmax(x, dim)
    return x


def test_a_chain_is_gathered_once_rather_than_turned_at_every_step() -> None:
    whole = SIZE * SIZE * 4
    # Greedily: five times an all-to-all of a quarter of the tensor; a half to gather it.
    assert sent(placed(alternating)) == pytest.approx(whole / 2)


def test_a_later_mesh_dimension_splits_what_an_operator_reads_and_not_what_was_computed() -> None:
    rows = (Split(0), Split(0))
    context = Context(Mesh((2, 2), (0, 0), ("a", "b")), OFF, (), {}, BatchLayout((rows,)))
    # The first ranks gather all rows, of which their own are as many as those of the indices.
    module = place(graph_of(lambda x: x.gather(1, torch.zeros(SIZE // 2, SIZE, dtype=torch.int64))), context)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.gather.default)
    assert node.meta["sbp"] == (broadcast, broadcast)


def test_a_row_that_an_earlier_mesh_dimension_leaves_is_not_squeezed() -> None:
    context = Context(Mesh((2, 2), (0, 0), ("a", "b")), OFF, (), {}, BatchLayout(((Split(0), broadcast),)))
    module = place(graph_of(lambda x: x.view(2, 1, -1).squeeze()), context)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.squeeze.default)
    assert node.meta["sbp"] == (Split(0), broadcast)


def test_a_chain_is_turned_where_that_is_cheaper() -> None:
    found = placed(lambda x: torch.softmax(torch.softmax(x, 1), 0))
    assert sent(found) == pytest.approx(SIZE * SIZE * 4 / 4)


def random_chain(seed: int) -> Callable[[Tensor], Tensor]:
    choose = random.Random(seed)
    steps = [choose.choice(STEPS) for _ in range(4)]

    def chain(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return chain


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.softmax(x, 0),
    lambda x: torch.softmax(x, 1),
    torch.exp,
    lambda x: x.t(),
    lambda x: torch.flip(x, [0]),
    lambda x: torch.cumsum(x, 1),
]


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_for_a_chain_is_cheaper(seed: int) -> None:
    module = graph_of(random_chain(seed))
    place(module, CONTEXT)
    found = cost_of(module, {n: n.meta["signature"][0] for n in module.graph.nodes if "signature" in n.meta})
    problem = fresh(module)
    operators = [node for node in module.graph.nodes if node.op == "call_function"]
    choices = [problem.signatures(node) or () for node in operators]
    best = min(cost_of(module, dict(zip(operators, one, strict=True))) for one in itertools.product(*choices))
    assert found == pytest.approx(best)


def fresh(module: fx.GraphModule) -> PlacementProblem:
    problem = placement_problem(module.graph, CONTEXT, [])
    for node in placeholders(module.graph):
        problem.sbp[node] = (Split(0),)
    return problem


def cost_of(module: fx.GraphModule, signatures: dict[fx.Node, object]) -> float:
    """By the cost model, of a graph under these signatures."""
    problem = fresh(module)
    for node, signature in signatures.items():
        problem.choose(node, signature)
    return sum(problem.tensor_cost((node, 0)) for node in problem.sbp)


def test_what_no_reader_needs_whole_stays_split() -> None:
    found = placed(lambda x: torch.relu(x @ torch.ones(SIZE, SIZE)).sum(1))
    assert sent(found) == 0
    assert broadcast not in {n.meta["sbp"][0] for n in found.graph.nodes if "aten.mm" in str(n.target)}
