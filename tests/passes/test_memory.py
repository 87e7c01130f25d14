"""The stages' promises about memory, read from the emitted graph and seen in a running process."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import Case, covering, sliced, stores_of
from tests.models import batches, make, part
from tests.peak_memory import gathered_buckets, gradient_buckets, most_alive
from tests.pool import Pool
from zerograph.ir.metadata import origin
from zerograph.ir.step_graph import writes

# Small enough that every layer of the models has several buckets.
BUCKET = 8192


@functools.cache
def lifetimes(name: str, stage: int) -> tuple[int, int, int]:
    """(buckets, most gradient buckets alive, most gathered buckets alive beside those that the layer needs)."""
    graph = Case(name, stage, bucket_size=BUCKET).prepared().graph.graph
    gathers = gathered_buckets(graph)
    idle = 0
    for position, node in enumerate(graph.nodes):
        here = origin(node).module
        needed = {bucket for bucket, span in gathers if position in span and _used_in(graph, span, here)}
        idle = max(idle, sum(position in span and bucket not in needed for bucket, span in gathers))
    count = len({name for name, _ in gradient_buckets(graph)})
    return count, most_alive(gradient_buckets(graph), len(graph.nodes)), idle


def _used_in(graph: Any, span: range, module: str) -> bool:
    """Return True if a node of ``module`` reads what was gathered in ``span``."""
    return any(
        i in span and "parameter" in argument.meta and origin(node).module == module
        for i, node in enumerate(graph.nodes)
        for argument in node.all_input_nodes
    )


@sliced("name, stage", *covering(itertools.product(["conv", "gpt_tied"], [2, 3])))
def test_at_most_two_buckets_of_whole_gradients_are_alive(name: str, stage: int) -> None:
    _, most, _ = lifetimes(name, stage)
    assert 1 <= most <= 2


@pytest.mark.parametrize("name", ["conv", "gpt_tied"])
def test_stage3_holds_two_buckets_of_whole_parameters_beside_the_layers_own(name: str) -> None:
    _, _, idle = lifetimes(name, 3)
    assert idle <= 2


def test_stage1_keeps_whole_gradients_until_backward_ends() -> None:
    count, most, _ = lifetimes("gpt", 1)
    assert most == count > 2


class _Watch(TorchDispatchMode):
    """Counts the storages of gathered buckets that are alive at once while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._refs = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "gather" in str(func) and func.namespace in ("_c10d_functional", "zerograph"):
            self._refs.append(StorageWeakRef(result.untyped_storage()))
        self._refs = [ref for ref in self._refs if not ref.expired()]
        self.most = max(self.most, len(self._refs))
        return result


def gathered_at_once(stage: int) -> tuple[int, int]:
    """(most gathered buckets whose memory was held at once, number of buckets), in a step that really ran."""
    step = Case("gpt", stage, bucket_size=BUCKET).step()
    (x, y), (x2, y2) = batches("gpt", 2)
    step(part(x), part(y))
    with _Watch() as watch:
        step(part(x2), part(y2))
    return watch.most, len({name for name, _ in gathered_buckets(step.inspect.graph.graph)})


def test_a_running_stage3_step_holds_few_gathered_buckets(pool: Pool) -> None:
    most, buckets = pool.run(2, gathered_at_once, 3)[0]
    assert most <= 4 < buckets
    most, _ = pool.run(2, gathered_at_once, 2)[0]
    assert most > 4


def bytes_at_rest(name: str, stage: int, small: int) -> tuple[int, int]:
    """(bytes that the step says it holds, bytes of storage reachable from model and step) after a step."""
    step = Case(name, stage, shard_min_size=small).step()
    (x, y), *_ = batches(name, 1, 12)
    step(part(x), part(y))
    storages = {}
    for store in stores_of(step):
        for tensor in (store.flat, *store.state.values(), *store.parameters):
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return step.state_bytes(), sum(storages.values())


@sliced("ranks, stage", [(2, 1), (2, 3)], [(2, 2), (4, 3)])
def test_a_rank_holds_its_share_of_the_state(pool: Pool, ranks: int, stage: int) -> None:
    sizes = [p.numel() for p in make("mlp").parameters()]
    share = math.ceil(sum(sizes) / ranks)
    # Below stage 3 the other ranks' pieces of parameters have their room beside the shard.
    others = 0 if stage == 3 else ranks - 1
    # fp32 parameter and two moments; one fp64 step count.
    assert pool.run(ranks, bytes_at_rest, "mlp", stage, 0)[0] == (share * (12 + others * 4) + 8,) * 2
    split, whole = sum(n for n in sizes if n >= 16), sum(n for n in sizes if n < 16)
    expected = math.ceil(split / ranks) * (12 + others * 4) + whole * 12 + 2 * 8
    assert pool.run(ranks, bytes_at_rest, "mlp", stage, 16)[0] == (expected,) * 2


def test_data_parallel_holds_the_whole_state(pool: Pool) -> None:
    sizes = [p.numel() for p in make("mlp").parameters()]
    assert pool.run(2, bytes_at_rest, "mlp", 0, 0)[0] == (sum(sizes) * 12 + 8,) * 2


def in_place(stage: int) -> tuple[list[str], list[bool]]:
    """Writes that are still copies, and whether each store's tensors are the same memory after a step."""
    step = Case("gpt_of_one_block", stage).step()
    (x, y), *_ = batches("gpt_of_one_block", 1)
    step.compile(part(x), part(y))
    copies = [state.name for _, state, _ in writes(step.inspect.graph.graph)]
    before = [tensor.data_ptr() for store in stores_of(step) for tensor in (store.flat, *store.state.values())]
    step(part(x), part(y))
    after = [tensor.data_ptr() for store in stores_of(step) for tensor in (store.flat, *store.state.values())]
    return copies, [a == b for a, b in zip(before, after, strict=True)]


@sliced("stage", [2], [0])
def test_updates_are_written_in_place(pool: Pool, stage: int) -> None:
    copies, same = pool.run(2, in_place, stage)[0]
    assert copies == []
    assert all(same)
