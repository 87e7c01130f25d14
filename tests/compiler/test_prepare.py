"""Everything before the backend: without a process group, without weights, in work that grows with the layers only."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import LossStep, mean_of_squares, prepare, sum_of_squares
from tests.inspection.models import Block, Net
from zerograph.compiler.members import find_members
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh, line
from zerograph.optim import trace_update
from zerograph.runtime.job import process_group


class Step(LossStep):
    def __init__(self, layers: int, device: str = "meta", optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model = nn.Sequential(*(Block(64) for _ in range(layers)))
        options = {"shard_min_size": 1, "bucket_size": 2**16}
        super().__init__(model, optimizer(model.parameters(), lr=0.001), 3, mean_of_squares, **options)


def prepared(layers: int, mesh: Mesh) -> Prepared:
    return Step(layers).prepare(mesh, torch.empty(4, 64, device="meta"))


def calls_for(layers: int) -> int:
    profile = cProfile.Profile()
    profile.enable()
    prepared(layers, line(2, 0, "ranks"))
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_work_is_linear_in_layers() -> None:
    prepared(1, line(2, 0, "ranks"))  # what only the first step of a process does: imports, tables
    few, more, many = (calls_for(layers) for layers in (1, 2, 4))
    assert many - more < 1.25 * 2 * (more - few)


def test_the_emitted_graph_is_as_large_for_any_number_of_ranks() -> None:
    sizes = []
    for ranks in (2, 64, 1024):
        graph = prepared(3, line(ranks, 0, "ranks")).graph.graph
        # More ranks may pad a bucket that two need not pad: one slice of it, filled with zeros.
        padded = len(graph.find_nodes(op="call_function", target=torch.ops.aten.zero_.default))
        sizes.append(len(graph.nodes) - 2 * padded)
    assert sizes[0] == sizes[1] == sizes[2]


def _no_process_group(*_: Any, **__: Any) -> None:
    raise AssertionError("a process group is asked for")


def test_a_step_can_be_prepared_without_a_process_group_and_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test may have made one.
    for name in ("init_process_group", "new_group", "all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(dist, name, _no_process_group)
    monkeypatch.setattr(process_group, "join", _no_process_group)
    step = Step(2)
    found = step.prepare(line(1024, 7, "ranks"), torch.empty(4, 64, device="meta"))
    assert all(parameter.is_meta for parameter in step.model.parameters())
    assert found.captured.graph.graph.find_nodes(op="placeholder")[-1].meta["val"].shape == (4 * 1024, 64)
    assert all(bucket.device == torch.device("cpu") for bucket in found.context.buckets)


def test_what_is_prepared_is_what_runs() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    step = Step(2, device="cpu")
    mine = step.prepare(line(1, 0, "ranks"), x)
    step(x)
    assert [str(node.target) for node in mine.graph.graph.nodes] == [
        str(node.target) for node in step.inspect.graph.graph.nodes
    ]


class BySize(torch.optim.SGD):
    """Its update is elementwise, and another one for another size."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.5 / parameter.shape[0])


class Scaled(torch.optim.SGD):
    """Its update is elementwise, and the same for all sizes."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, Scaled])
def test_an_optimizer_that_asks_for_no_size_has_one_program_for_all(optimizer: Any) -> None:
    made = optimizer([nn.Parameter(torch.zeros(2))], lr=0.1)
    shapes = [torch.Size(shape) for shape in ((), (1,), (5,), (4, 3), (2, 3, 4))]
    programs = [trace_update(made, made.param_groups[0], shape, torch.float32, "cpu") for shape in shapes]
    assert all(program.any_shape for program in programs)
    assert len({program.key for program in programs}) == 1


def test_an_update_that_depends_on_a_size_gets_each_size_right() -> None:
    step, plain = Step(1, "cpu", BySize), Step(1, "cpu", BySize)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    step(x)
    plain.model(x).square().mean().backward()
    BySize(plain.model.parameters(), lr=0.1).step()
    with step.full_parameters():
        for one, other in zip(step.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(one, other)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model


@pytest.mark.parametrize(
    ("others", "tied"),
    [
        (lambda model: {"loss": Wrapper(model)}, set()),
        (lambda model: {"model": nn.Sequential(model, Wrapper(model.last))}, {"model.0.last.weight"}),
        (lambda model: {"model": Net(1, tied=True)}, {"model.first.weight"}),
    ],
    ids=["a model that is wrapped", "a layer that is used twice", "two layers with one weight"],
)
def test_weights_are_tied_that_a_model_uses_in_two_places(others: Any, tied: set[str]) -> None:
    model = Net(1)
    assert find_members({"model": model, **others(model)}).tied() == tied


def test_a_model_is_in_the_same_buckets_if_another_module_wraps_it() -> None:
    alone, wrapped = Step(2), Step(2)
    wrapped.wrapper = Wrapper(wrapped.model)
    first, second = (step.prepare(line(4, 0, "ranks"), torch.empty(4, 64, device="meta")) for step in (alone, wrapped))
    assert [str(one) for one in second.collectives()] == [str(one) for one in first.collectives()]


class UnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks = self.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_under_two_names_shares_buckets_as_under_one() -> None:
    model = UnderTwoNames()
    step = LossStep(model, torch.optim.AdamW(model.parameters()), 2, sum_of_squares)
    assert len(prepare(step, torch.ones(4, 8)).layout) == 1
