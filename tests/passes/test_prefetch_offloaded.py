"""Copies to an accelerator and back, and when, in the graph that would run there.

Prepared on the meta device, which stands for an accelerator: autograd over fake CUDA tensors needs a torch with CUDA.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares
from zerograph.errors import ConfigError
from zerograph.inspection.step import Prepared
from zerograph.ir.alias import WAIT
from zerograph.ir.buckets import Bucket
from zerograph.ir.memory import profile, temporary_bytes
from zerograph.ir.mesh import line
from zerograph.ir.metadata import origin, role
from zerograph.ir.step_graph import nbytes, placeholders
from zerograph.ops.offload import FETCH, TRANSFER, WAIT_TRANSFER
from zerograph.passes.memory import offload_activations

aten = torch.ops.aten
CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")
LR = 1e-2


class Step(LossStep):
    def __init__(self, model: nn.Module, optimizer: Any, stage: int, clip: float | None = None) -> None:
        options = {"bucket_size": 4000, "clip_grad_norm": clip, "backend": "eager"}
        super().__init__(model, optimizer(model.parameters()), stage, mean_of_squares, **options)


def layers(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(31, 31, device=device) for _ in range(4)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def plain_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR)


@functools.cache
def emitted(stage: int, optimizer: Any = adamw, ranks: int = 2, clip: float | None = None, **options: Any) -> Prepared:
    """Prepare the step of rank 0, its optimizer offloaded. Nobody may change it."""
    step = Step(layers("meta"), optimizer, stage, clip)
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo(**({"device": "cpu"} | options)))
    return step.prepare(line(ranks, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta")


def carried(graph: fx.Graph, device: torch.device) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=TRANSFER)
    return [node for node in found if node.meta["val"].device == device]


@pytest.mark.parametrize("optimizer", [adamw, plain_adamw, lambda found: torch.optim.SGD(found, lr=LR, momentum=0.9)])
def test_what_rests_and_is_updated_lies_on_the_cpu_and_the_model_on_the_accelerator(optimizer: Any) -> None:
    graph = emitted(2, optimizer).graph.graph
    for node in graph.nodes:
        value = node.meta.get("val")
        found = role(node)
        if not isinstance(value, Tensor) or not value.dim():
            continue
        at_rest = found is not None and found.kind in ("bucket", "state")
        updates = origin(node).phase == "update" and node.target not in (WAIT, TRANSFER)
        assert (value.device == CPU) == (
            at_rest or updates or (node.target is TRANSFER and node in carried(graph, CPU))
        )


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (2, 1), (3, 2)])
def test_each_shard_goes_up_for_each_gather_and_each_gradient_shard_comes_down_once(stage: int, times: int) -> None:
    prepared = emitted(stage)
    graph, buckets = prepared.graph.graph, prepared.context.buckets
    shards = [4 * bucket.padded // 2 for bucket in buckets]
    assert len(shards) == 4
    # One kernel, torch's own fused one, for each bucket.
    assert sum("_fused_adamw_" in str(node.target) for node in graph.nodes) == len(shards)
    assert sorted(nbytes(node.meta["val"]) for node in carried(graph, CPU)) == sorted(shards)
    ups = [nbytes(node.meta["val"]) for node in carried(graph, ACCELERATOR)]
    gathers = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)
    assert sum(ups) == sum(nbytes(node.meta["val"]) // 2 for node in gathers)
    # The last layer is gathered once: its backward follows on its forward.
    assert len(ups) in (times * len(shards), times * len(shards) - 1)
    assert all(node.all_input_nodes[0] in carried(graph, ACCELERATOR) for node in gathers)


def test_shards_go_up_one_ahead_and_gradients_come_down_during_backward() -> None:
    graph = emitted(3).graph.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    landed = {
        node.all_input_nodes[0]: order[node] for node in graph.find_nodes(op="call_function", target=WAIT_TRANSFER)
    }
    ups = sorted(carried(graph, ACCELERATOR), key=lambda node: landed[node])
    for one, other in itertools.pairwise(ups):
        assert order[one] < order[other] < landed[one] < landed[other]
    downs = carried(graph, CPU)
    last = max(order[node] for node in graph.nodes if origin(node).phase == "backward" and "mm" in str(node.target))
    assert sum(order[node] < last for node in downs) >= len(downs) // 2
    # The CPU waits for the first only when everything is on its way that may be.
    assert min(landed[node] for node in downs) > last


def test_the_accelerator_casts_gradients_and_the_cpu_only_updates() -> None:
    step = Step(layers("meta"), adamw, 2)
    step.config.memory.offload = zg.Offload(optimizer="cpu")
    step.config.enable_amp(dtype=torch.bfloat16)
    prepared = step.prepare(line(2, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta")
    downs = carried(prepared.graph.graph, CPU)
    assert {node.all_input_nodes[0].meta["val"].dtype for node in downs} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in downs} == {torch.float32}
    assert all(temporary_bytes(node) == nbytes(node.meta["val"]) for node in downs)
    readers = {str(user.target) for node in downs for user in node.users}
    assert readers == {"zerograph.wait_transfer.default", "aten._fused_adamw_.tensor_lr"}


def test_the_forecast_counts_the_accelerators_memory_only() -> None:
    memory = profile(emitted(2).graph.graph).memory()
    assert not {"optimizer state", "parameters"} & set(memory.kinds)
    step = Step(layers("meta"), adamw, 2)
    here = profile(step.prepare(line(2, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta").graph.graph)
    assert memory.peak < here.memory().peak - here.memory().at_rest // 2


def test_files_are_read_into_the_cpus_memory(tmp_path: Any) -> None:
    step = Step(layers("meta"), adamw, 3)
    files = zg.OffloadTo("nvme", tmp_path)
    step.config.memory.offload = zg.Offload(optimizer=files, parameters=files)
    graph = step.prepare(line(2, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta").graph.graph
    fetches = graph.find_nodes(op="call_function", target=FETCH)
    assert {node.meta["val"].device for node in fetches} == {CPU}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in carried(graph, ACCELERATOR):
        (read,) = node.all_input_nodes
        assert read in fetches
        # It has been read when the copy begins.
        assert min(order[user] for user in read.users if user.target is WAIT_TRANSFER) < order[node]


def test_what_is_whole_on_each_rank_stays_on_the_accelerator(tmp_path: Any) -> None:
    step = Step(layers("meta"), adamw, 2)
    # Biases are smaller.
    step.config.zero.shard_min_size = 100
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", tmp_path))
    prepared = step.prepare(line(2, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta")
    whole = {bucket.name for bucket in prepared.context.buckets if bucket.is_whole}
    assert whole
    for node in placeholders(prepared.graph.graph, "bucket", "state"):
        value, name = node.meta["val"], role(node).name
        if value.dim():
            assert value.device == (ACCELERATOR if name.split(".")[0] in whole else CPU)
    assert not any(
        role(node.args[0]).name.split(".")[0] in whole
        for node in prepared.graph.graph.find_nodes(op="call_function", target=FETCH)
    )


class OnTwoPools(fx.Interpreter):
    """Runs a graph with the CPU in place of the accelerator: what is carried goes to other memory all the same."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda one: CPU if one == ACCELERATOR else one)
        return super().call_function(target, args, kwargs)


def fed(prepared: Prepared, model: nn.Module) -> dict[str, Tensor]:
    """State at rest, by the name of its placeholder."""
    values = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for bucket in prepared.context.buckets:
        found[bucket.name] = laid(bucket, {name.removeprefix("model."): one for name, one in values.items()})
    for node in placeholders(prepared.graph.graph, "state", "hyperparameter"):
        value = node.meta["val"]
        found[node.name] = torch.zeros(value.shape, dtype=value.dtype)
        if role(node).kind == "hyperparameter":
            found[node.name].fill_(LR)
    return found


def laid(bucket: Bucket, values: dict[str, Tensor]) -> Tensor:
    flat = torch.zeros(bucket.padded)
    for slot in bucket.slots:
        flat[slot.offset : slot.offset + slot.numel] = values[slot.name.removeprefix("model.")].detach().flatten()
    return flat


@pytest.mark.parametrize(("optimizer", "clip"), [(adamw, None), (plain_adamw, 0.1)])
def test_on_two_pools_of_memory_it_trains_as_plain_pytorch_does(
    optimizer: Callable[..., Any], clip: float | None
) -> None:
    prepared = emitted(3, optimizer, ranks=1, clip=clip)
    model = layers("cpu")
    state = fed(prepared, model)
    update = optimizer(model.parameters())
    for seed in range(3):
        x = torch.randn(8, 31, generator=torch.Generator().manual_seed(seed))
        inputs = [state.get(node.name, x) for node in placeholders(prepared.graph.graph)]
        with torch.no_grad():
            (loss,) = OnTwoPools(prepared.graph).run(*inputs)
        update.zero_grad()
        wanted = model(x).square().mean()
        wanted.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        update.step()
        torch.testing.assert_close(loss, wanted.detach())
    values = dict(model.named_parameters())
    for bucket in prepared.context.buckets:
        torch.testing.assert_close(state[bucket.name], laid(bucket, values))


def test_a_model_on_the_cpu_is_as_it_was() -> None:
    graphs = []
    for offload in (zg.Offload(), zg.Offload(optimizer="cpu")):
        step = Step(layers("cpu"), adamw, 2)
        step.config.memory.offload = offload
        prepared = step.prepare(line(2, 0, "ranks"), torch.empty(8, 31))
        graphs.append([node.format_node() for node in prepared.graph.graph.nodes])
    assert graphs[0] == graphs[1]


def test_on_an_accelerator_shards_rest_elsewhere_and_are_updated_where_they_rest() -> None:
    with pytest.raises(ConfigError, match="needs ZeRO"):
        emitted(0)
    step = Step(layers("meta"), adamw, 3)
    step.config.memory.offload = zg.Offload(parameters="cpu")
    with pytest.raises(ConfigError, match="parameters of an accelerator need the optimizer"):
        step.prepare(line(2, 0, "ranks"), torch.empty(8, 31, device="meta"), device="meta")


class Blocks(nn.Module):
    """Layers that compute more, for what backward reads of them, than the step of the tests above."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(31, 31, device=device) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).view(2, -1, 31)).flatten(0, 1)
        return x


@functools.cache
def spilling(device: str, link: float | None) -> Prepared:
    """Where the link carries a byte in the time of so many floating-point operations; None for no spilling."""
    step = Step(Blocks(device), adamw, 2)
    step.config.memory.offload = zg.Offload(activations=link is not None)
    with patch.object(offload_activations, "FLOPS_PER_BYTE", link):
        return step.prepare(line(1, 0, "ranks"), torch.empty(8, 31, device=device), device=device)


def test_activations_wait_on_the_cpu_as_far_as_the_link_hides() -> None:
    # A layer computes 2 * 31 * 31 * 8 operations and makes 1024 bytes, as the allocator counts. So at 15 operations a
    # byte takes a little less than a layer: what the first five make is down when the sixth has computed; at 30, two.
    spilled = [carried(spilling("meta", link).graph.graph, CPU) for link in (None, 0.0, 15.0, 30.0, 1e9)]
    assert [len(nodes) for nodes in spilled] == [0, 6, 5, 2, 0]


def test_they_leave_when_they_are_made_and_come_back_one_ahead() -> None:
    graph = spilling("meta", 15.0).graph.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    ups = carried(graph, ACCELERATOR)
    reads = [min(order[user] for user in node.users if user.target is not WAIT_TRANSFER) for node in ups]
    assert reads == sorted(reads)
    for earlier, later in itertools.pairwise(range(len(ups))):
        assert order[ups[later]] < reads[earlier] < reads[later]
    for down in carried(graph, CPU):
        made = down.all_input_nodes[0]
        assert order[down] == order[made] + 1
        assert all(origin(user).phase == "forward" for user in made.users)


def most_activations(graph: fx.Graph) -> int:
    found = [one for one in profile(graph).storages if one.kind == "activations"]
    return max(sum(one.bytes for one in found if one.born <= at <= one.dies) for at in range(len(graph.nodes)))


def within(budget: int | None) -> tuple[int, int, int]:
    """(peak, activations that wait on the CPU, nodes that compute again) of a step that checkpoints as it needs."""
    step = Step(Blocks("meta"), adamw, 2)
    step.config.memory.activation_checkpointing, step.config.memory.memory_budget = "auto", budget
    graph = step.prepare(line(1, 0, "ranks"), torch.empty(512, 31, device="meta"), device="meta").graph.graph
    return profile(graph).peak, len(carried(graph, CPU)), sum("recomputed" in node.meta for node in graph.nodes)


def test_auto_spills_what_is_hidden_before_it_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "FLOPS_PER_BYTE", 30.0)
    most, spilled, again = within(None)
    assert (spilled, again) == (0, 0)
    less, spilled, again = within(most - 1)
    assert spilled
    assert not again
    # All that is hidden waits there already.
    least, still, again = within(less - 1)
    assert still == spilled
    assert again
    assert least < less < most


def test_they_are_not_held_meanwhile() -> None:
    kept, spilled = (most_activations(spilling("meta", link).graph.graph) for link in (None, 0.0))
    # Of six layers' one that is computed, one that is read, one on its way, one ahead; and numbers.
    assert kept >= 6 * 1024
    assert spilled < 5 * 1024


def test_spilling_changes_no_number() -> None:
    x = torch.randn(8, 31, generator=torch.Generator().manual_seed(0))
    found = []
    for link in (None, 15.0):
        prepared = spilling("meta", link)
        state = fed(prepared, Blocks("cpu"))
        inputs = [state.get(node.name, x) for node in placeholders(prepared.graph.graph)]
        with torch.no_grad():
            (loss,) = OnTwoPools(prepared.graph).run(*inputs)
        found.append([loss, *state.values()])
    assert all(map(torch.equal, *found))


def test_on_the_cpu_nothing_is_spilled() -> None:
    assert not spilling("cpu", 0.0).graph.graph.find_nodes(op="call_function", target=TRANSFER)
