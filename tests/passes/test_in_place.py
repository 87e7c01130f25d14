"""In-place writes of the emitted graph; they change no number."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx

from tests.harness import LossStep, prepare, stores_of
from tests.models import TrainStep, batches, make, part
from tests.pool import Pool
from zerograph.ir.step_graph import is_collective
from zerograph.passes.memory.reuse_temporaries import reuse_temporaries
from zerograph.passes.recompute import recompute_cheap
from zerograph.runtime.wire import collectives

aten = torch.ops.aten


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def as_it_is(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend of a user's: temporaries are its own business, so they are not written over."""
    return graph.forward


@functools.cache
def _trained(name: str, backend: Any) -> tuple[list[Tensor], TrainStep]:
    """Return what nobody may change."""
    model = make(name)
    step = TrainStep(model, _adamw(model), 2, backend=backend)
    return [step(x, y) for x, y in batches(name, 3)], step


def _targets(step: TrainStep) -> Counter[Any]:
    return Counter(node.target for node in step.inspect.graph.graph.nodes)


@pytest.mark.parametrize("name", ["gpt_of_one_block", "conv"])
def test_writing_over_temporaries_changes_no_bit(name: str) -> None:
    over, step = _trained(name, "eager")
    apart, plain = _trained(name, as_it_is)
    torch.testing.assert_close(over, apart, rtol=0, atol=0)
    torch.testing.assert_close(step.state_dict(), plain.state_dict(), rtol=0, atol=0)
    found, other = _targets(step), _targets(plain)
    logits = aten._log_softmax_backward_data
    assert (found[logits.out], found[logits.default]) == (1, 0)
    assert (other[logits.out], other[logits.default]) == (0, 1)


def test_a_gradient_in_another_order_of_dimensions_is_not_written_over() -> None:
    # The kernel would take it for contiguous.
    def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
        return model(x).log_softmax(-1).transpose(0, 1).contiguous().tanh().sum()

    model, x = torch.nn.Linear(6, 4), torch.randn(3, 5, 6)
    plain = copy.deepcopy(model)
    loss_of(plain, x).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=1.0), 2, loss_of, backend="eager")
    step(x)
    torch.testing.assert_close(step.state_dict()["modules"]["model"], plain.state_dict())


class Beside(torch.nn.Module):
    """Multiplies by a matrix that has the parameter as a column: so is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.stack([self.weight, torch.ones(4)], 1)).square().mean()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_is_the_only_one_of_its_bucket_is_sent_without_gaps(stage: int) -> None:
    model = Beside()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=1.0), stage)
    graph = prepare(step, torch.ones(2, 4)).graph.graph
    sent = [node.all_input_nodes[0].meta["val"] for node in filter(is_collective, graph.nodes)]
    assert len(sent) > 1
    assert all(value.is_contiguous() for value in sent)


def test_gradients_of_products_are_made_in_their_bucket() -> None:
    _, step = _trained("gpt_of_one_block", "eager")
    copied = [
        node.args[1].meta["val"].shape
        for node in step.inspect.graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if isinstance(node.args[1], fx.Node)
    ]
    # Layer norm yields its gradients with its input's, and an embedding's is scattered.
    assert all(len(shape) == 1 or shape in ((61, 32), (16, 32)) for shape in copied)
    products = [p for n, p in make("gpt_of_one_block").named_parameters() if p.dim() == 2 and n not in _EMBEDDINGS]
    assert _targets(step)[aten.mm.out] == len(products) > 4


_EMBEDDINGS = ("tokens.weight", "positions.weight")


def test_what_backward_can_make_again_in_one_pass_is_not_kept() -> None:
    kept, remade = [], []
    for least, found in ((2**62, kept), (1, remade)):
        with patch.multiple(recompute_cheap, _MIN_BYTES=least, _SHARE=1):
            losses, step = _trained.__wrapped__("gpt", "eager")
        found += [losses, step.state_dict(), step.inspect.memory.kinds["activations"], _targets(step)]
    torch.testing.assert_close(kept[:2], remade[:2], rtol=0, atol=0)
    blocks = 2
    # The activation function, and both layer norms; the last norm, before the head, too.
    assert remade[3][aten.gelu.default] == 2 * kept[3][aten.gelu.default] == 2 * blocks
    assert remade[3][aten.native_layer_norm.default] == 2 * kept[3][aten.native_layer_norm.default]
    # At the peak, in backward of the last block, of all blocks before: two norms of (8, 16) tokens of width 32, and the
    # activation function's four times that.
    tokens = 8 * 16 * 32 * 4
    assert kept[2] - remade[2] >= (blocks - 1) * (2 + 4) * tokens


def positions_of_the_head() -> tuple[int, int, int]:
    """Where backward's product with the head's weight stands, where its gradient, and where the logits' is made."""
    model = make("gpt_of_one_block")
    step = TrainStep(model, _adamw(model), 3)
    nodes = list(prepare(step, *batches("gpt_of_one_block", 1)[0]).graph.graph.nodes)
    logits = next(n for n in nodes if n.target is aten._log_softmax_backward_data.out)
    product = next(n for n in nodes if logits < n and n.target is aten.mm.default)
    gradient = next(n for n in nodes if logits < n and n.target is aten.mm.out)
    return nodes.index(logits), nodes.index(product), nodes.index(gradient)


def test_a_gathered_weight_is_read_before_its_gradient_takes_memory() -> None:
    logits, product, gradient = positions_of_the_head()
    assert logits < product < gradient


def test_data_parallel_gradients_are_summed_where_they_lie(pool: Pool) -> None:
    found = pool.run(2, reductions)[0]
    assert found["in place"] == found["buckets"] > 0


def reductions() -> dict[str, int]:
    model = make("gpt_of_one_block")
    step = TrainStep(model, _adamw(model), 0)
    (x, y), *_ = batches("gpt_of_one_block", 1)
    step(part(x), part(y))
    found = _targets(step)
    # Where the ranks cannot read each other's memory it is torch's own.
    in_place = found[collectives.sum_ranks_] + found[torch.ops._c10d_functional.all_reduce_.default]
    return {"in place": in_place, "buckets": len(stores_of(step))}


def test_a_fused_optimizer_updates_each_bucket_by_its_own_operator() -> None:
    _, step = _trained("gpt_of_one_block", "eager")
    found = _targets(step)
    assert found[aten._fused_adamw_.tensor_lr] == len(stores_of(step))
    assert not any(found[one] for one in (aten.addcdiv.default, aten.addcdiv_.default, aten.sqrt.default))


def test_a_schedule_of_another_hyperparameter_runs_the_plain_operators() -> None:
    model = make("mlp")
    optimizer = _adamw(model)
    step = TrainStep(model, optimizer, 2)
    for number, (x, y) in enumerate(batches("mlp", 3)):
        optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.999)
        step(x, y)
    assert not _targets(step)[aten._fused_adamw_.tensor_lr]


def test_a_chain_may_have_any_length() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2)
    for _ in range(1500):
        node = graph.call_function(aten.exp.default, (node,))
        node.meta["val"] = torch.empty(2)
    graph.output((node,))
    context: Any = SimpleNamespace(backend=SimpleNamespace(node_by_node=True))
    reuse_temporaries(fx.GraphModule({}, graph), context)
    assert len(graph.find_nodes(op="call_function", target=aten.exp_.default)) == 1499
