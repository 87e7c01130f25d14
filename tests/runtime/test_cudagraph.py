"""The backend cudagraph: what the CPU computes, what is captured, and which steps are refused. Replays: tests/gpu."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerograph as zg
from tests.harness import LossStep, sliced, sum_of_squares
from tests.models import adam_step, batches
from zerograph import _torch
from zerograph.errors import ConfigError
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.mesh import line
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.backends import backends, cudagraph
from zerograph.runtime.backends.cudagraph import Captures, Replay, _check_loops, _is_collective, _split, in_stretches

ACCELERATOR = torch.device("meta")


def parts(optimizer: type[torch.optim.Optimizer], *layers: nn.Module, **config: Any) -> tuple[fx.GraphModule, ...]:
    options = config.pop("optimizer_options", {"fused": True})
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), *layers, nn.Linear(8, 8, device="meta"))
    step = LossStep(model, optimizer(model.parameters(), lr=0.1, **options), 2, sum_of_squares, **config)
    prepared = step.prepare(line(1, 0, "ranks"), torch.empty(4, 8, device="meta"), device="meta")
    return (*_split(prepared.graph, ACCELERATOR), prepared.graph)


def on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def test_counts_and_rates_are_the_cpu_s_and_cross_to_the_device() -> None:
    host, device, whole = parts(torch.optim.AdamW)
    called = {str(node.target) for node in host.graph.nodes if node.op == "call_function"}
    assert called == {"aten._foreach_add_.Scalar", "zerograph.pack.default", "aten.select.int"}
    # Step counts in one transfer, the rate in another.
    crossing = host.graph.output_node().args[0]
    assert isinstance(crossing, tuple)
    assert len(crossing) == 2
    computed = [node for node in device.graph.nodes if node.op == "call_function"]
    assert not any(on_cpu(source) for node in computed for source in node.all_input_nodes)
    inputs = sum(node.op == "placeholder" for node in whole.graph.nodes)
    assert sum(node.op == "placeholder" for node in device.graph.nodes) == inputs + len(crossing)


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        ((), {"optimizer_options": {}}, "takes a number from the CPU"),
        ((nn.Dropout(),), {}, r"uniform\.default in the forward of model\.1"),
        ((), {"grad_scaler": zg.GradScaler()}, "the CPU reads a value of the device"),
    ],
)
def test_a_number_that_a_graph_would_keep_is_refused(layers: Any, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(torch.optim.AdamW, *layers, **config)


def test_a_model_on_the_cpu_is_refused_before_anything_changes() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, sum_of_squares, backend="cudagraph")
    with pytest.raises(ConfigError, match="needs a model on a CUDA device"):
        step(torch.ones(2, 4))
    assert torch.equal(model.weight, before)


RANKS = 2


class Again(Captures):
    """Computes again, into the same memory, where a card would replay."""

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> tuple[Replay, Sequence[Any]]:
        self.captured += 1
        results = function(*inputs)
        runs = 0

        def replay() -> None:
            nonlocal runs
            runs += 1
            if runs > 1:
                for place, value in zip(results, function(*inputs), strict=True):
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)

        return replay, results

    def allocate(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def static(self, tensor: Any) -> Any:
        return tensor


def stretched(graph: fx.GraphModule) -> Any:
    """As the backend lowers a graph, but all of it is captured: the CPU stands for the device."""
    nothing = fx.Graph()
    inputs = [nothing.placeholder(node.name) for node in placeholders(graph.graph)]
    nothing.output(())
    assert len(inputs) == len(placeholders(graph.graph))
    batch = [number for number, node in enumerate(placeholders(graph.graph)) if meta(node)["role"].kind == "input"]
    return SimpleNamespace(forward=cudagraph._Step(fx.GraphModule(nn.Module(), nothing), graph, batch))


def losses(stage: int, clip: float | None) -> list[list[float]]:
    """Losses of rank 0 of simulated ranks, whose collectives copy its own data: as a whole, and in stretches."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = []
    for in_parts in (False, True):
        if in_parts:
            backends.queue_updates = stretched
            cudagraph.Captures = Again  # type: ignore[misc]
        step = adam_step("gpt_of_one_block", stage, clip_grad_norm=clip)
        found.append([float(step(x, y)) for x, y in batches("gpt", 6)])
    return found


@sliced("stage, clip", [(2, 0.1)], [(1, None), (3, None)])
def test_stretches_between_collectives_train_as_the_whole_does(stage: int, clip: float | None) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        found = process.submit(losses, stage, clip).result(timeout=300)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


def test_collectives_stay_in_their_order_and_everything_else_is_in_stretches() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(4)))
    step = LossStep(model, torch.optim.AdamW(model.parameters(), fused=True), 2, sum_of_squares, bucket_size=300)
    prepared = step.prepare(line(RANKS, 0, "ranks"), torch.empty(4, 8, device="meta"), device="meta")
    _, device = _split(prepared.graph, ACCELERATOR)
    divided = in_stretches(device, Again())
    names = [node.name for node in device.graph.nodes if _is_collective(node) or node.target is WAIT]
    calls = [node for node in divided.graph.nodes if node.op == "call_function" and node.target is not getitem]
    assert [node.name for node in calls if node.name in names] == names
    assert names
    others = [node for node in calls if node.name not in names]
    assert all(node.target.__name__ == "stretch" or is_view(node) for node in others)
    # A wait holds what its collective reads.
    waits = [node for node in calls if node.name in names and node.target.__name__ in ("_wait", "land")]
    assert all(len(node.all_input_nodes) > 1 for node in waits)


def test_a_loop_with_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(4)))
    step = LossStep(model, torch.optim.AdamW(model.parameters(), fused=True), 3, sum_of_squares, bucket_size=300)
    step.config.gradient_accumulation_steps = 2
    prepared = step.prepare(line(RANKS, 0, "ranks"), torch.empty(4, 8, device="meta"), device="meta")
    with pytest.raises(ConfigError, match="captured whole, this one has collectives"):
        _check_loops(prepared.graph.graph)


def test_a_borrowed_tensor_is_of_the_same_memory_and_does_not_keep_it() -> None:
    owner = torch.arange(12.0).view(3, 4)[1:, ::2]
    borrowed = _torch.borrowed(owner)
    borrowed += 1
    assert torch.equal(borrowed, owner)
    assert borrowed.stride() == owner.stride()
    assert _torch.storage_key(borrowed.untyped_storage()) != _torch.storage_key(owner.untyped_storage())
