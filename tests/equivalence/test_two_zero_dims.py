"""ZeRO along both dimensions of a grid: state is split over all ranks, and backward gathers along the first only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.equivalence.test_stages import check
from tests.harness import deviation, each_stage, plain_run, sliced
from tests.models import TrainStep, adam_step, adamw, batches, make
from tests.pool import Pool
from zerograph.ir.alias import WAIT
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import boxing_of
from zerograph.ir.step_graph import gathers_bucket

# Two hosts of two ranks: rows are places on a host, columns are hosts.
GRID = [[0, 2], [1, 3]]
BOTH = (0, 1)
STEPS = 3
MESH = Mesh((2, 2), (0, 0), ("ranks", "hosts"))


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a whole batch on the grid."""
    return tensor.chunk(4)[[0, 2, 1, 3][zg.rank()]]


def train(name: str, stages: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """For each stage losses, the final state and bytes: run on every rank, in fp64. One graph, so captured once."""
    step = adam_step(name, dtype=torch.float64, placement=zg.placement("cpu", ranks=GRID), shard_dims=BOTH, **options)
    results = []
    for _ in each_stage(step, stages):
        losses = [step(own(x), own(y)) for x, y in batches(name, STEPS, 8, torch.float64)]
        results.append((losses, step.state_dict(), step.state_bytes()))
    return results


@sliced(
    "name, stages, options",
    [
        ("mlp", (1,), {}),
        ("mlp", (3,), {"gradient_accumulation_steps": 2, "bucket_size": 256}),
        ("mlp", (3,), {"shard_by": "parameters", "memory_budget": 2**24}),
    ],
    [("mlp", (0, 1, 2, 3), {}), ("gpt_of_one_block", (3,), {"gradient_accumulation_steps": 2, "bucket_size": 2048})],
)
def test_it_computes_what_one_device_computes(
    pool: Pool, name: str, stages: tuple[int, ...], options: dict[str, Any]
) -> None:
    everybody = pool.run(4, train, name, stages, options)
    plain = plain_run(name, STEPS, 8, torch.float64)
    elements = sum(parameter.numel() for parameter in make(name).parameters())
    for index, stage in enumerate(stages):
        for losses, state, nbytes in (results[index] for results in everybody):
            check((losses, state["modules"]["model"]), plain, 1e-12)
            for key, value in state["modules"]["model"].items():
                assert torch.equal(value, everybody[0][0][1]["modules"]["model"][key]), f"stage {stage}: {key}"
            if stage and not options:
                assert nbytes <= 2 * 8 * elements / 4 + 8 * elements + 128


def collectives(stage: int, *, shard_dims: Any = BOTH, **options: Any) -> list[tuple[str, str, int, int]]:
    """Return phase, kind, mesh dimension and bytes sent of what moves parameters and gradients."""
    step = adam_step("mlp", stage, shard_dims=shard_dims, **options)
    prepared = step.prepare(MESH, *(tensor.chunk(4)[0] for tensor in batches("mlp", 1)[0]))
    found = [one for one in prepared.collectives() if one.tensors[0].startswith("model.")]
    return [(one.phase, one.kind, one.mesh_dim, one.bytes) for one in found]


def test_backward_gathers_inside_of_a_host_only() -> None:
    padded = 200  # 198 elements
    whole, once = padded * 4, padded * 4 // 2
    assert collectives(3) == [
        ("forward", "all-gather", 1, once // 2),
        ("forward", "all-gather", 0, whole // 2),
        ("backward", "all-gather", 0, whole // 2),
        ("backward", "reduce-scatter", 0, whole // 2),
        ("backward", "reduce-scatter", 1, once // 2),
    ]


@sliced("options", [{"wire": {"gather": {1: "int8"}}}], [{}, {"wire": "int8"}])
def test_no_gather_of_backward_starts_in_forward(options: dict[str, Any]) -> None:
    step = adam_step("gpt", 3, shard_dims=BOTH, bucket_size=4096, **options)
    prepared = step.prepare(MESH, *(tensor.chunk(4)[0] for tensor in batches("gpt", 1)[0]))
    moved = [one for one in prepared.collectives() if one.kind == "all-gather" and one.tensors[0].startswith("model.")]
    phases = [one.phase for one in moved]
    assert phases == sorted(phases, reverse=True)  # forward before backward
    assert {one.mesh_dim for one in moved if one.phase == "backward"} == {0}
    assert Counter(one.mesh_dim for one in moved)[1] == len({one.tensors for one in moved})


def test_forward_computes_with_a_bucket_while_both_gathers_of_the_next_are_under_way() -> None:
    step = adam_step("mlp", 3, shard_dims=BOTH, bucket_size=64)
    prepared = step.prepare(MESH, *(tensor.chunk(4)[0] for tensor in batches("mlp", 1)[0]))
    nodes = [node for node in prepared.graph.graph.nodes if node.op == "call_function"]
    under_way: set[str] = set()
    at_products: list[set[str]] = []
    for node in nodes:
        if gathers_bucket(node):
            under_way.add(f"{boxing_of(node).tensor.name}, {boxing_of(node).dim}")
        elif node.target is WAIT and gathers_bucket(node.all_input_nodes[0]):
            change = boxing_of(node.all_input_nodes[0])
            under_way.remove(f"{change.tensor.name}, {change.dim}")
        elif node.target is torch.ops.aten.mm.default:
            at_products.append(set(under_way))
    # bucket0 has the first weight. Gathers between hosts, along dimension 1, are a bucket further.
    assert at_products[0] == {"bucket1, 0", "bucket2, 1"}


def move_between_layouts() -> dict[str, Any]:
    """Train on the grid, then on a line, then on the grid again."""
    name, data = "mlp", batches("mlp", STEPS, 8, torch.float64)
    models = [make(name, torch.float64) for _ in range(3)]
    grid: dict[str, Any] = {"placement": zg.placement("cpu", ranks=GRID), "shard_dims": BOTH}
    first = TrainStep(models[0], adamw(models[0]), 3, **grid)
    line = TrainStep(models[1], adamw(models[1]), 2)
    last = TrainStep(models[2], adamw(models[2]), 1, **grid)
    first(*map(own, data[0]))
    line.load_state_dict(first.state_dict())
    line(*map(own, data[1]))
    last.compile(*map(own, data[2]))
    last.load_state_dict(line.state_dict())
    last(*map(own, data[2]))
    return last.state_dict()


@pytest.mark.long
def test_state_moves_to_a_line_and_back(pool: Pool) -> None:
    state = pool.run(4, move_between_layouts)[0]
    for key, value in plain_run("mlp", STEPS, 8, torch.float64).state.items():
        assert deviation(state["modules"]["model"][key], value) <= 1e-12, key


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(zg.PlacementError, match=r"shard_dims = \(0, 1\) no single gather reaches all ranks"):
        collectives(2, wire={"gather": zg.wire("int8", feedback=True)})
    for value in ((), (1, 0), (0, 0), [0, 1]):
        with pytest.raises(zg.ConfigError, match="shard_dims"):
            collectives(3, shard_dims=value)
