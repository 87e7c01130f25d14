"""The front door: what a user may write in build(), what is compiled again, what can be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import zerograph as zg
from tests.harness import LossStep, Predict, compilations_of, mean_of_squares, sliced
from tests.models import TrainStep, adam_step, adamw, batches, make, part, train_plainly, update_by
from tests.pool import Pool
from zerograph.passes.pipeline import PIPELINE


class Nested(zg.ZeroGraph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, pair: dict[str, Any], *, scale: Tensor) -> Any:
        out = self.model(pair["x"][0]) * scale
        return {"out": out, "more": [out.sum(), (pair["x"][1] + 1,)], "name": "fixed", "none": None}


def nested() -> Any:
    torch.manual_seed(0)
    graph = Nested(nn.Linear(3, 2))
    x = torch.arange(12.0).view(4, 3)
    return graph({"x": [part(x), part(x[:, 0])]}, scale=torch.tensor(2.0))


def test_inputs_and_outputs_nest_as_they_like(pool: Pool) -> None:
    torch.manual_seed(0)
    x = torch.arange(12.0).view(4, 3)
    whole = nn.Linear(3, 2)(x) * 2
    first, second = pool.run(2, nested)
    torch.testing.assert_close(torch.cat([first["out"], second["out"]]), whole)
    torch.testing.assert_close(first["more"][0], whole.sum())
    assert torch.equal(first["more"][0], second["more"][0])
    assert torch.equal(torch.cat([first["more"][1][0], second["more"][1][0]]), x[:, 0] + 1)
    assert first["name"] == "fixed"
    assert first["none"] is None


def predict_after_training(stage: int) -> Tensor:
    train = adam_step("mlp", stage)
    for x, y in batches("mlp", 3):
        train(part(x), part(y))
    predict = Predict(train.model)
    (x, _), *_ = batches("mlp", 1)
    first = predict(part(x))
    train(part(x), part(batches("mlp", 1)[0][1]))
    assert not torch.equal(predict(part(x)), first), "the forward graph sees the newest parameters"
    assert predict.steps_done == 0
    return first


@sliced("stage", [3], [0, 1])
def test_a_forward_graph_predicts_from_split_parameters(pool: Pool, stage: int) -> None:
    model = make("mlp")
    train_plainly(model, adamw(model), batches("mlp", 3))
    (x, _), *_ = batches("mlp", 1)
    parts = pool.run(2, predict_after_training, stage)
    torch.testing.assert_close(torch.cat(parts), model(x).detach(), rtol=1e-5, atol=1e-6)


def test_only_what_changes_the_graph_compiles_again() -> None:
    model = make("conv")
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, 2)
    (x, y), *_ = batches("conv", 1)
    step(x, y)
    step(x, y)
    assert compilations_of(step) == 1
    optimizer.param_groups[0]["lr"] = 1e-4
    step(x, y)
    assert compilations_of(step) == 1, "a learning rate is an input"
    step(x[:4], y[:4])
    step(x, y)
    assert compilations_of(step) == 2, "a new shape compiles, the old step is kept"
    model.eval()
    step(x, y)
    model.train()
    step(x, y)
    assert compilations_of(step) == 3, "eval() compiles, train() again is kept"
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    step(x, y)
    assert compilations_of(step) == 4, "a captured hyperparameter compiles"
    model.head.weight.requires_grad_(False)
    step(x, y)
    assert compilations_of(step) == 5, "requires_grad compiles"
    step.config.zero.stage = 3
    step(x, y)
    assert compilations_of(step) == 6, "the stage compiles"
    assert step.steps_done == 10


def test_an_assigned_configuration_is_the_one_that_is_compiled() -> None:
    model = make("mlp")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    (x, y), *_ = batches("mlp", 1)
    step(x, y)
    before = step.state_dict()["modules"]["model"]
    for _ in range(2):
        step.config = zg.Config(stage=3, clip_grad_norm=1e-3)
        step(x, y)
    assert compilations_of(step) == 2, "an equal one is the same step"
    assert "ZeRO stage 3" in repr(step)
    after = step.state_dict()["modules"]["model"]
    moved = torch.cat([(after[name] - one).flatten() for name, one in before.items()])
    # At a learning rate of 1 a step is as long as its gradient, and two alike are twice as long.
    assert moved.norm().item() == pytest.approx(2e-3, rel=1e-2)


def test_train_and_eval_mode_use_their_own_statistics() -> None:
    model, twin = make("conv"), make("conv")
    predict = Predict(model)
    (x, _), *_ = batches("conv", 1)
    for mode in (True, False, True):
        model.train(mode)
        twin.train(mode)
        torch.testing.assert_close(predict(x), twin(x).detach())
    assert torch.equal(model.features[1].num_batches_tracked, twin.features[1].num_batches_tracked)
    torch.testing.assert_close(model.features[1].running_var, twin.features[1].running_var)


class Partly(nn.Module):
    """A frozen layer, an unused one, a tied one, a 0-d parameter, and one smaller than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.head = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(F.relu(self.first(self.frozen(x)))) * self.scale)


def partly(stage: int) -> tuple[dict[str, Tensor], set[str]]:
    torch.manual_seed(0)
    model = Partly()
    data = torch.randn(4, 8, 7)
    step = LossStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage, mean_of_squares)
    for x in data:
        step(part(x))
    return step.state_dict()["modules"]["model"], {str(sbp) for sbp in step.inspect.placements().values()}


def test_frozen_unused_tied_and_tiny_parameters(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Partly()
    data = torch.randn(4, 8, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in data:
        update_by(optimizer, model(x).square().mean())
    state, sbp = pool.run(4, partly, 3)[0]
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=1e-6)
    assert "S(0)" in sbp


def to_global_and_back() -> None:
    mesh = zg.placement("cpu", ranks=[0, 1])
    rank = zg.rank()
    mine = torch.full((2, 3), float(rank))
    split = zg.to_global(mine, placement=mesh, sbp=zg.sbp.split(1))
    assert split.shape == (2, 6)
    assert torch.equal(zg.to_local(split), mine)
    total = zg.to_global(mine, placement=mesh, sbp=zg.sbp.partial_sum)
    assert torch.equal(total.full_tensor(), torch.ones(2, 3))
    assert torch.equal(zg.to_local(zg.to_global(mine, placement=mesh, sbp=zg.sbp.broadcast)), torch.zeros(2, 3))
    torch.manual_seed(rank)
    module = nn.Linear(4, 6)
    first = [torch.zeros_like(p) + p for p in module.parameters()]
    torch.distributed.broadcast(first[0].detach(), 0)
    zg.to_global(module, placement=mesh, sbp=zg.sbp.split(0))
    assert module.weight.placements == (Shard(0),)
    assert zg.to_local(module.weight).shape == (3, 4)
    assert torch.equal(module.weight.full_tensor(), first[0])
    again = zg.to_global(module.weight.detach(), placement=mesh, sbp=zg.sbp.broadcast)
    assert again.placements == (Replicate(),)


def test_to_global_and_to_local(pool: Pool) -> None:
    pool.run(2, to_global_and_back)


def looked_at() -> dict[str, Any]:
    step = adam_step("conv", 2)
    before = str(step)
    (x, y), *_ = batches("conv", 1)
    step.compile(part(x), part(y))
    compiled = step.steps_done
    step(part(x), part(y))
    graph = step.inspect.graph_after("box")
    return {
        "before": before,
        "page": str(step),
        "text": step.inspect.describe(),
        "compiled": compiled,
        "done": step.steps_done,
        "passes": [(p.name, p.summary, p.nodes, p.seconds) for p in step.inspect.passes],
        "sbp": all("sbp" in n.meta for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)),
        "readable": graph.print_readable(print_output=False),
        "c10d": sum("_c10d_functional" in str(n.target) for n in step.inspect.graph_after("localize").graph.nodes),
        "placements": step.inspect.placements(),
        "collectives": step.inspect.collectives(),
    }


def test_the_graph_can_be_looked_at_after_every_pass(pool: Pool) -> None:
    seen = pool.run(2, looked_at)[0]
    assert "not compiled yet" in seen["before"]
    assert seen["compiled"] == 0
    assert seen["done"] == 1
    names = [name for name, *_ in seen["passes"]]
    assert names == ["capture", *(one.name for one in PIPELINE)]
    assert all(summary.endswith(".") and nodes > 0 and seconds >= 0 for _, summary, nodes, seconds in seen["passes"])
    assert seen["sbp"]
    assert "boxing" in seen["readable"]
    assert seen["c10d"] >= 4
    assert seen["placements"]["model.head.weight"] == zg.sbp.split(0)
    assert seen["placements"]["model.head.weight.exp_avg"] == zg.sbp.split(0)
    assert seen["placements"]["model.head.weight.step"] == zg.sbp.broadcast
    assert seen["placements"]["model.features.1.running_mean"] == zg.sbp.broadcast
    for text in ("stage 2", "inputs", "outputs", "S(0)", "all-gather", "reduce-scatter", "model.head.weight"):
        assert text in seen["text"]
    for text in ("stage 2", "S(0)", "all-gather", "reduce-scatter", "at the peak", "warnings: none"):
        assert text in seen["page"]
    assert {one.phase for one in seen["collectives"]} <= {"forward", "backward", "update"}


def test_any_callable_is_a_backend() -> None:
    given: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        given.append((graph, example_inputs))
        return graph.forward

    model, twin = make("mlp"), make("mlp")
    step = TrainStep(model, adamw(model), 2, backend=backend)
    data = batches("mlp", 2)
    losses = [step(x, y) for x, y in data]
    assert isinstance(given[0][0], torch.fx.GraphModule)
    assert len(given[0][1]) == len(given[0][0].graph.find_nodes(op="placeholder"))
    torch.testing.assert_close(losses, train_plainly(twin, adamw(twin), data))


def test_a_returned_buffer_is_not_changed_by_the_next_step() -> None:
    class Counting(zg.ZeroGraph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.register_buffer("seen", torch.zeros(1))

        def build(self, x: Tensor) -> Tensor:
            self.model.seen.add_(x.sum())
            return self.model.seen

    graph = Counting()
    first = graph(torch.ones(2))
    assert graph(torch.ones(2)).item() == 4.0
    assert first.item() == 2.0


def averaging(mean: Tensor) -> LossStep:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        model.mean.lerp_(x.mean(0), 0.5)
        return model(x - model.mean).square().mean()

    model = nn.Conv2d(2, 3, 1)
    model.register_buffer("mean", mean)
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of, backend="eager")


@pytest.mark.parametrize(
    "mean",
    [
        pytest.param(lambda: torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)[0], id="channels last"),
        pytest.param(lambda: torch.zeros(4, 3, 2).permute(2, 1, 0), id="turned"),
        pytest.param(lambda: torch.zeros(2, 3, 8)[..., ::2], id="every other"),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_buffer_is_written_however_it_lies_in_memory(mean: Callable[[], Tensor], micro_batches: int) -> None:
    buffer, plain = mean(), torch.zeros(2, 3, 4)
    assert not buffer.is_contiguous()
    graph = averaging(buffer)
    graph.config.gradient_accumulation_steps = micro_batches
    for number in range(3):
        x = torch.full((4, 2, 3, 4), float(number))
        graph(x)
        plain.lerp_(x.mean(0), 0.5)
    assert graph.model.mean is buffer
    torch.testing.assert_close(buffer, plain)
