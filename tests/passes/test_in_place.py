"""What is written where in the emitted graph, and that it changes no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.models import TrainStep, batches, make

aten = torch.ops.aten


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def as_it_is(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend of a user's: temporaries are its own business, so they are not written over."""
    return graph.forward


def _trained(name: str, backend: Any) -> tuple[list[Tensor], TrainStep]:
    model = make(name)
    step = TrainStep(model, _adamw(model), 2, backend=backend)
    return [step(x, y) for x, y in batches(name, 3)], step


def _targets(step: TrainStep) -> Counter[Any]:
    return Counter(node.target for node in step.graph().graph.nodes)


@pytest.mark.parametrize("name", ["gpt", "conv"])
def test_writing_over_temporaries_changes_no_bit(name: str) -> None:
    over, step = _trained(name, "eager")
    apart, plain = _trained(name, as_it_is)
    torch.testing.assert_close(over, apart, rtol=0, atol=0)
    torch.testing.assert_close(step.state_dict(), plain.state_dict(), rtol=0, atol=0)
    found, other = _targets(step), _targets(plain)
    logits = aten._log_softmax_backward_data
    assert (found[logits.out], found[logits.default]) == (1, 0)
    assert (other[logits.out], other[logits.default]) == (0, 1)


def test_gradients_of_products_are_made_in_their_bucket() -> None:
    _, step = _trained("gpt", "eager")
    copied = [
        node.args[1].meta["val"].shape
        for node in step.graph().graph.find_nodes(op="call_function", target=aten.copy_.default)
        if isinstance(node.args[1], fx.Node)
    ]
    # Layer norm yields its gradients with its input's, and an embedding's is scattered.
    assert all(len(shape) == 1 or shape in ((61, 32), (16, 32)) for shape in copied)
    products = [p for n, p in make("gpt").named_parameters() if p.dim() == 2 and n not in _EMBEDDINGS]
    assert _targets(step)[aten.mm.out] == len(products) > 4


_EMBEDDINGS = ("tokens.weight", "positions.weight")


def test_a_fused_optimizer_updates_each_bucket_by_its_own_operator() -> None:
    _, step = _trained("gpt", "eager")
    found = _targets(step)
    assert found[aten._fused_adamw_.tensor_lr] == len(step._stores())
    assert not any(found[one] for one in (aten.addcdiv.default, aten.addcdiv_.default, aten.sqrt.default))


def test_a_schedule_of_another_hyperparameter_runs_the_plain_operators() -> None:
    model = make("mlp")
    optimizer = _adamw(model)
    step = TrainStep(model, optimizer, 2)
    for number, (x, y) in enumerate(batches("mlp", 3)):
        optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.999)
        step(x, y)
    assert not _targets(step)[aten._fused_adamw_.tensor_lr]
