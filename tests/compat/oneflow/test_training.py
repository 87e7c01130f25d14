"""Training through OneFlow's names computes what plain PyTorch computes on the whole batch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import (
    CLASSES,
    INPUTS,
    B,
    Predict,
    Train,
    batches,
    everybody,
    given,
    mlp,
    own,
    plainly,
    trained,
)
from tests.harness import optimizer_of
from tests.pool import Pool
from zerograph.compat.oneflow import nn

STAGE3 = {"stage": 3}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: flow.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True),
}


def groups(model: Any, norm: float) -> Any:
    return flow.optim.SGD(
        [
            {"params": list(model[0].parameters()), "clip_grad_max_norm": norm, "clip_grad_norm_type": 2.0},
            {"params": list(model[2].parameters())},
        ],
        lr=0.5,
    )


def clipped() -> list[Tensor]:
    model = mlp()
    graph = Train(model, groups(model, 0.05), **STAGE3)
    losses = trained(graph, batches())
    optimizer_of(graph).param_groups[0]["clip_grad_max_norm"] = 0.01
    return losses + trained(graph, batches())


def test_groups_that_say_so_are_clipped_each_by_itself_to_the_norm_of_the_step(pool: Pool) -> None:
    model = mlp()
    optimizer, losses = groups(model, 0.05), []
    for norm in (0.05, 0.01):
        losses += plainly(model, optimizer, batches(), clip=lambda model, norm=norm: clip(model[0].parameters(), norm))
    torch.testing.assert_close(pool.run(2, clipped)[0], losses, rtol=1e-10, atol=1e-12)


def checkpointed() -> dict[str, Any]:
    found = {}
    for mode in (False, True):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh()) for _ in range(3)))
        model = model.append(nn.Linear(INPUTS, CLASSES)).double()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        graph = Train(model, flow.optim.SGD(model.parameters(), lr=0.1), **STAGE3)
        for block in list(model)[:3]:
            block.to(nn.graph.GraphModule).activation_checkpointing = mode
        losses = trained(graph, batches())
        again = sum(bool(node.meta.get("recomputed")) for node in graph.inspect.graph.graph.nodes)
        found[mode] = losses, again, block.to(nn.graph.GraphModule).activation_checkpointing
    return found


def test_checkpointed_modules_are_made_again_and_no_number_changes() -> None:
    found = checkpointed()
    for kept, made in zip(found[False][0], found[True][0], strict=True):
        assert torch.equal(kept, made)
    assert (found[False][1:], found[True][2]) == ((0, False), True)
    assert found[True][1] > 0


def global_or_local() -> dict[str, Any]:
    model = mlp()
    graph = Train(model, OPTIMIZERS["sgd"](model), **STAGE3)
    (x, y), *_ = batches()
    local = graph(own(x), own(y))
    placed = graph(given(x), given(y))
    return {
        "local": [(type(one) is Tensor, tuple(one.shape)) for one in local],
        "placed": [(one.sbp, tuple(one.shape), one.is_global) for one in placed],
        "numbers": (placed[1].numpy().shape, placed[1].item() == float(f"{placed[1]:.17g}"), placed[1].tolist()),
    }


def test_a_loss_is_global_where_the_batch_was_and_plain_where_it_was_not(pool: Pool) -> None:
    found = pool.run(2, global_or_local)[0]
    assert found["local"] == [(True, (8, CLASSES)), (True, ())]
    assert found["placed"] == [((zg.sbp.split(0),), (16, CLASSES), True), ((zg.sbp.broadcast,), (), True)]
    assert found["numbers"][:2] == ((), True)


def refused() -> list[str]:
    model = mlp()
    graph = Train(model, OPTIMIZERS["sgd"](model), **STAGE3)
    (x, y), *_ = batches()
    first = flow.placement("cpu", ranks=[0])
    found = []
    for inputs in (
        (x.to_global(placement=first, sbp=B), given(y)),  # type: ignore[attr-defined]
        (flow.ones(15, INPUTS, placement=everybody(), sbp=flow.sbp.split(0)), given(y)),
        (given(x), y.numpy()),
        (given(x.requires_grad_()), given(y)),
    ):
        with pytest.raises(zg.ZeroGraphError) as problem:
            graph(*inputs)
        found.append(str(problem.value))
    assert not graph.is_compiled
    return found


def test_inputs_are_checked_on_every_rank_before_anything_changes(pool: Pool) -> None:
    found = pool.run(2, refused)
    for messages in found:
        parts = ("placed on the ranks [0]", "15 does not divide by 2", "not a tensor", "requires a gradient")
        for message, part in zip(messages, parts, strict=True):
            assert part in message


class Locally(nn.Graph):
    def build(self, x: Tensor) -> Tensor:
        return x - x.to_local().mean()  # type: ignore[attr-defined]


def local_in_build() -> str:
    with pytest.raises(zg.CaptureError) as problem:
        Locally()(given(batches()[0][0]))
    return str(problem.value)


def test_a_ranks_own_part_inside_build_is_refused(pool: Pool) -> None:
    message = pool.run(2, local_in_build)[1]
    assert "x.to_local().mean()" in message
    assert "use zg.local" in message


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "CrossEntropyLoss": lambda scores, labels: nn.CrossEntropyLoss()(scores, labels),
    "cross_entropy": nn.functional.cross_entropy,
    "NLLLoss": lambda scores, labels: nn.NLLLoss()(scores, labels),
    "nll_loss": nn.functional.nll_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_may_be_a_column_of_any_integer_type(name: str) -> None:
    scores, labels = torch.randn(5, CLASSES).log_softmax(1), torch.tensor([0, 3, 1, 2, 2])
    # Of log probabilities the two are the same.
    wanted = torch.nn.functional.nll_loss(scores, labels)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        for shape in ((5,), (5, 1)):
            torch.testing.assert_close(LOSSES[name](scores, labels.to(dtype).view(shape)), wanted)
    with pytest.raises(zg.InputError, match=r"labels \(N,\) or \(N, 1\)"):
        LOSSES[name](scores, torch.zeros(5, 2, dtype=torch.int64))


def traced() -> Tensor:
    @nn.Graph.trace
    def twice(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    assert (twice.__doc__, type(twice).__name__) == ("Doubles.", "twice_graph")
    found: Tensor = twice(flow.ones(2, 3))
    return found


def test_a_traced_function_is_a_graph(pool: Pool) -> None:
    assert torch.equal(pool.run(2, traced)[1], torch.full((2, 3), 2.0))


def printed() -> dict[int, str]:
    found = {}
    for level in (-1, 0, 1, 2, 3):
        graph = Predict(mlp())
        graph.debug(level, ranks=[1])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            graph(batches()[0][0])
            graph(batches()[0][0])
        found[level] = out.getvalue()
    return found


def test_debug_prints_once_on_its_ranks_and_more_at_higher_levels(pool: Pool) -> None:
    silent, found = pool.run(2, printed)
    assert set(silent.values()) == {""}
    assert found[-1] == ""
    assert len(found[0].splitlines()) == 1
    assert "pass place" in found[1]
    assert "addmm" not in found[1]
    assert "addmm" in found[2]
    assert "test_training" not in found[2]
    assert "samples.py" in found[3]


def predicting_after_training() -> list[Any]:
    model = mlp()
    model.to_global(placement=everybody(), sbp=B)
    graph = Train(model, OPTIMIZERS["sgd"](model), **STAGE3)
    data = batches()
    losses = trained(graph, data)
    model.eval()
    predict = Predict(model)
    first = predict(given(data[0][0])).full_tensor()
    model.train()
    losses += trained(graph, data)
    return [losses, first, predict(given(data[0][0])).full_tensor(), repr(predict).splitlines()[0]]


def test_training_predicting_and_training_again(pool: Pool) -> None:
    losses, first, second, title = pool.run(2, predicting_after_training)[0]
    model = mlp()
    optimizer, data = OPTIMIZERS["sgd"](model), batches()
    wanted = plainly(model, optimizer, data)
    torch.testing.assert_close(first, model(data[0][0]).detach(), rtol=1e-10, atol=1e-12)
    wanted += plainly(model, optimizer, data)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(second, model(data[0][0]).detach(), rtol=1e-10, atol=1e-12)
    assert title == "Predict(forward graph)"
