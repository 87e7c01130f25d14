"""Training through OneFlow's names computes what plain PyTorch computes on the whole batch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
from tests.pool import Pool
from zerograph.compat.oneflow import nn

STAGE3 = {"mode": "distributed_split", "stage": 3}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: flow.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True),
    "adagrad": lambda model: flow.optim.Adagrad(model.parameters(), lr=0.01),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: flow.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
    "cosine": lambda optimizer: flow.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "lambda": lambda optimizer: flow.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


def with_optimizers() -> dict[str, list[Tensor]]:
    return {name: trained(Train(m := mlp(), make(m), **STAGE3), batches()) for name, make in OPTIMIZERS.items()}


def with_schedulers() -> dict[str, Any]:
    found = {}
    for name, make in SCHEDULERS.items():
        model = mlp()
        optimizer = OPTIMIZERS["sgd"](model)
        scheduler = make(optimizer)
        graph = Train(model, optimizer, lr_sch=scheduler, **STAGE3)
        found[name] = trained(graph, batches(5)), scheduler.get_last_lr()
    return found


def test_optimizers_give_torchs_numbers(pool: Pool) -> None:
    found = pool.run(2, with_optimizers)[0]
    for name, make in OPTIMIZERS.items():
        model = mlp()
        torch.testing.assert_close(found[name], plainly(model, make(model), batches()), rtol=1e-10, atol=1e-12)


def test_schedulers_give_torchs_numbers(pool: Pool) -> None:
    found = pool.run(2, with_schedulers)[0]
    for name, make in SCHEDULERS.items():
        model = mlp()
        optimizer = OPTIMIZERS["sgd"](model)
        scheduler = make(optimizer)
        losses = plainly(model, optimizer, batches(5), scheduler)
        torch.testing.assert_close(found[name][0], losses, rtol=1e-10, atol=1e-12)
        assert found[name][1] == scheduler.get_last_lr()


def groups(model: Any, norm: float) -> Any:
    return flow.optim.SGD(
        [
            {"params": list(model[0].parameters()), "clip_grad_max_norm": norm, "clip_grad_norm_type": 2.0},
            {"params": list(model[2].parameters())},
        ],
        lr=0.5,
    )


def clipped() -> dict[str, Any]:
    model = mlp()
    whole = Train(model, groups(model, 0.05), **STAGE3)
    found: dict[str, Any] = {"whole": trained(whole, batches())}
    whole._optimizers[0].param_groups[0]["clip_grad_max_norm"] = 0.01
    found["changed"] = trained(whole, batches())
    model = mlp()
    cut = Train(model, groups(model, 0.05), lambda g: g.config.set_gradient_accumulation_steps(4), **STAGE3)
    found["accumulated"] = trained(cut, batches())
    return found


@pytest.fixture(scope="module")
def clipping(pool: Pool) -> dict[str, Any]:
    found: dict[str, Any] = pool.run(2, clipped)[0]
    return found


def clip(norm: float) -> Callable[[Any], Any]:
    return lambda model: torch.nn.utils.clip_grad_norm_(model[0].parameters(), norm)


def test_groups_that_say_so_are_clipped_each_by_itself(clipping: dict[str, Any]) -> None:
    model = mlp()
    optimizer = groups(model, 0.05)
    losses = plainly(model, optimizer, batches(), clip=clip(0.05))
    torch.testing.assert_close(clipping["whole"], losses, rtol=1e-10, atol=1e-12)
    # A norm that changes between steps is the one of the next step.
    losses = plainly(model, optimizer, batches(), clip=clip(0.01))
    torch.testing.assert_close(clipping["changed"], losses, rtol=1e-10, atol=1e-12)


def test_accumulated_gradients_are_clipped_once_and_a_loss_is_that_of_the_whole_batch(clipping: dict[str, Any]) -> None:
    model = mlp()
    losses = plainly(model, groups(model, 0.05), batches(), clip=clip(0.05))
    torch.testing.assert_close(clipping["accumulated"], losses, rtol=1e-10, atol=1e-12)


def scaled(told: Callable[[Any], Any], amp: Any) -> tuple[list[Tensor], str]:
    model = mlp(torch.float32)
    graph = Train(model, flow.optim.SGD(model.parameters(), lr=0.1), told, **STAGE3)
    graph.config.enable_amp(True, **amp)
    return trained(graph, batches(dtype=torch.float32)), repr(graph)


def under_autocast(dtype: torch.dtype, scale: float) -> list[Tensor]:
    """One device: autocast, the loss scaled and the gradients unscaled."""
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches(dtype=torch.float32):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = torch.nn.functional.cross_entropy(model(x), y.squeeze(1))
        (loss * scale).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_amp_with_static_scaling(pool: Pool) -> None:
    losses, text = pool.run(2, scaled, set_static, {})[0]
    torch.testing.assert_close(losses, under_autocast(torch.float16, 200.0), rtol=2e-3, atol=2e-3)
    assert "loss scale: 200" in text


def test_amp_with_dynamic_scaling_skips_what_overflows(pool: Pool) -> None:
    losses, text = pool.run(2, scaled, set_dynamic, {})[0]
    # The scale halves until nothing overflows: with 2^30 the first steps change nothing.
    first = under_autocast(torch.float16, 1.0)[0]
    torch.testing.assert_close(losses[0], first, rtol=2e-3, atol=2e-3)
    assert f"loss scale: {2.0**27:g}" in text
    assert "0 steps done" in text


def test_amp_in_bf16_needs_no_scaling(pool: Pool) -> None:
    losses, text = pool.run(2, scaled, set_nothing, {"dtype": torch.bfloat16})[0]
    torch.testing.assert_close(losses, under_autocast(torch.bfloat16, 1.0), rtol=2e-2, atol=2e-2)
    assert "loss scale" not in text


def set_static(graph: Any) -> None:
    graph.set_grad_scaler(flow.amp.StaticGradScaler(scale_factor=200.0))


def set_dynamic(graph: Any) -> None:
    graph.set_grad_scaler(flow.amp.GradScaler(init_scale=2.0**30, growth_interval=1000))


def set_nothing(graph: Any) -> None:
    pass


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
        again = sum(bool(node.meta.get("recomputed")) for node in graph.graph().graph.nodes)
        found[mode] = losses, again, block.to(nn.graph.GraphModule).activation_checkpointing
    return found


def test_checkpointed_modules_are_made_again_and_no_number_changes(pool: Pool) -> None:
    found = pool.run(2, checkpointed)[0]
    for kept, made in zip(found[False][0], found[True][0], strict=True):
        assert torch.equal(kept, made)
    assert (found[False][1:], found[True][2]) == ((0, False), True)
    assert found[True][1] > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS, bias=False), nn.Linear(INPUTS, INPUTS, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()))


def tied() -> Any:
    torch.manual_seed(0)
    return Tied().double()


def trained_tied() -> tuple[list[Tensor], bool, list[str]]:
    model: Any = tied()
    model.to_global(placement=everybody(), sbp=B)
    graph = Train(model, OPTIMIZERS["adamw"](model), **STAGE3)
    losses = trained(graph, batches())
    return losses, model.first.weight is model.second.weight, list(model.state_dict())


def test_tied_weights_stay_tied(pool: Pool) -> None:
    losses, one, names = pool.run(2, trained_tied)[0]
    model = tied()
    torch.testing.assert_close(losses, plainly(model, OPTIMIZERS["adamw"](model), batches()), rtol=1e-10, atol=1e-12)
    assert one
    assert names == list(model.state_dict())


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


def whole_variables() -> list[Any]:
    model: Any = mlp()
    model.to_global(placement=everybody(), sbp=B)

    def told(graph: Any) -> None:
        graph.config.set_zero_redundancy_optimizer_mode("non_distributed")
        graph.config.set_zero_redundancy_optimizer_min_size_after_split(1)

    graph = Train(model, OPTIMIZERS["adamw"](model), told)
    losses = trained(graph, batches())
    owners = {slot.name: owner for bucket in graph._latest.context.buckets for slot, owner in _owned(bucket)}
    return [losses, owners, model.state_dict(), repr(graph).splitlines()[0]]


def _owned(bucket: Any) -> Any:
    return zip(bucket.slots, bucket.owners, strict=True)


def test_non_distributed_deals_whole_variables_out_to_the_ranks(pool: Pool) -> None:
    losses, owners, state, text = pool.run(2, whole_variables)[0]
    model = mlp()
    torch.testing.assert_close(losses, plainly(model, OPTIMIZERS["adamw"](model), batches()), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    # The two weights, 120 and 40 elements, are not one rank's; the largest is alone but for what it outweighs.
    held = {name: parameter.numel() for name, parameter in model.named_parameters()}
    loads = [
        sum(held[name.removeprefix("model.")] for name, owner in owners.items() if owner == rank) for rank in (0, 1)
    ]
    assert sorted(loads) == [54, 120]
    assert "stage 1" in text
