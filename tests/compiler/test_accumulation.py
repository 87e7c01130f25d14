"""``config.gradient_accumulation_steps`` and what a graph then takes and returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zerograph as zg
from tests.harness import needs_compiler
from tests.models import TrainStep, adam_step, batches
from tests.pool import Pool
from zerograph.runtime.backends import pieces


def indivisible() -> tuple[str, int, bool]:
    step = adam_step("mlp", 2)
    step.config.gradient_accumulation_steps = 2
    ((x, y),) = batches("mlp", 1, size=6)
    before = [parameter.clone() for parameter in step.model.parameters()]
    mesh = zg.placement("cpu", ranks=[0, 1])
    with pytest.raises(zg.InputError) as raised:
        step(*(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, y)))
    return str(raised.value), step.steps_done, all(map(torch.equal, before, step.model.parameters()))


def test_global_tensors_that_micro_batches_do_not_divide_are_refused_on_every_rank(pool: Pool) -> None:
    for message, steps, same in pool.run(2, indivisible):
        assert "args[0] has 3 samples on this rank" in message
        assert "gradient_accumulation_steps = 2" in message
        assert "pass a multiple of it on every rank" in message
        assert steps == 0
        assert same


class Step(zg.ZeroGraph):
    def __init__(self, train: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 4)
        if train:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.config.set(**{"gradient_accumulation_steps": 2, **options})

    def build(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.model(x)
        loss = F.cross_entropy(logits, y, weights)
        if self._optimizers:
            loss.backward()
        return {"loss": loss, "logits": logits}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, generator=generator), torch.tensor([0, 1, 2, 3, -100, 0])


def test_there_must_be_something_to_cut() -> None:
    step = Step()
    step.add_optimizer(step.optimizer)
    with pytest.raises(zg.InputError, match="no input is split along it"):
        step(*(torch.tensor(1.0) for _ in range(2)))


def test_replicated_global_inputs_stay_whole() -> None:
    step, plain = Step(gradient_accumulation_steps=3), Step(gradient_accumulation_steps=1)
    step.add_optimizer(step.optimizer)
    plain.add_optimizer(plain.optimizer)
    (x, y), weights = data(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    mesh = zg.placement("cpu", ranks=[0])
    found = step(
        distribute_tensor(x, mesh, [Shard(0)]),
        distribute_tensor(y, mesh, [Shard(0)]),
        distribute_tensor(weights, mesh, [Replicate()]),
    )
    # As a plain tensor four class weights would be taken for rows of the batch.
    wanted = F.cross_entropy(plain.model(x), y, weights)
    torch.testing.assert_close(found["loss"], wanted.detach())
    assert found["logits"].shape == (6, 4)
    unlike = pytest.warns(UserWarning, match="weight tensor should be defined")
    refused = pytest.raises(zg.InputError, match=r"args\[2\] has 4 on rank 0\n.*zg.replicated\(x\)")
    with unlike, refused:
        step(x, y, weights)


def test_a_graph_that_only_predicts_takes_any_number_of_samples() -> None:
    step = Step(train=False, gradient_accumulation_steps=4)
    x, y = data()
    torch.testing.assert_close(step(x, y)["logits"], step.model(x).detach())


def test_a_scheduler_watches_the_mean_of_packed_losses() -> None:
    step = Step(accumulation_outputs="packed")
    watched: list[float] = []

    class Watching(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            watched.append(metrics)

    step.add_optimizer(step.optimizer, Watching(step.optimizer))
    losses = step(*data())["loss"]
    assert losses.shape == (2,)
    assert watched == pytest.approx([float(losses.double().mean())])


def losses(backend: Any) -> tuple[list[Tensor], TrainStep]:
    step = adam_step("mlp", 2, backend=backend)
    step.config.gradient_accumulation_steps = 2
    return [step(x, y) for x, y in batches("mlp", 2)], step


def test_a_backend_is_given_the_body_and_what_stands_around_it() -> None:
    given: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        assert len(example_inputs) == len(graph.graph.find_nodes(op="placeholder"))
        assert not graph.graph.find_nodes(op="call_module")
        given.append(graph)
        return graph.forward

    found, _ = losses(backend)
    assert all(map(torch.equal, found, losses("eager")[0]))
    # Before, body and behind, of the first step and of the later ones.
    assert [sum("log_softmax" in str(node.target) for node in graph.graph.nodes) for graph in given] == [0, 2, 0]


@needs_compiler
@pytest.mark.long
def test_inductor_compiles_pieces_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 0)
    found, step = losses("inductor")
    torch.testing.assert_close(found, losses("eager")[0])
    body = step._latest.executor.function.__self__.get_submodule("micro_batches").body
    assert any("inductor" in str(node.target) for node in body.graph.nodes)
