"""Two mesh dimensions: shards within a node and copies between nodes, tensor parallelism beside ZeRO."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.equivalence.test_stages import check
from tests.harness import Predict, deviation, each_stage, plain_run, sliced, told
from tests.models import TrainStep, adamw, batches, make
from tests.pool import Pool
from zerograph.ir.mesh import Mesh

GRID = [[0, 1], [2, 3]]
BOTH = (zg.sbp.split(0), zg.sbp.split(0))
FIRST = (zg.sbp.split(0), zg.sbp.broadcast)
STEPS = 4


def annotate(model: nn.Module) -> None:
    """Megatron's cut of a transformer block's two halves: columns in, rows out."""
    for block in model.get_submodule("blocks").children():
        zg.annotate(block.up.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))
        zg.annotate(block.up.bias, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))
        zg.annotate(block.down.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(1)))


def own(tensor: Tensor, sbp: Any) -> Tensor:
    """This rank's part of a whole batch on the grid."""
    row = zg.rank() // 2
    return tensor.chunk(4)[zg.rank()] if sbp == BOTH else tensor.chunk(2)[row] if sbp == FIRST else tensor


def train(name: str, stages: tuple[int, ...], sbp: Any) -> list[Any]:
    """For each stage losses, the final state, the collectives, SBPs and bytes: run on every rank, in fp64.

    One graph, so captured once.
    """
    dtype = torch.float64
    model = make(name, dtype)
    if sbp == FIRST:
        annotate(model)
    step = TrainStep(model, adamw(model), placement=zg.placement("cpu", ranks=GRID), input_sbp=sbp)
    results = []
    for _ in each_stage(step, stages):
        losses = [step(own(x, sbp), own(y, sbp)) for x, y in batches(name, STEPS, 8, dtype)]
        collectives, placements = step.inspect.collectives(), {k: str(v) for k, v in step.inspect.placements().items()}
        results.append((losses, step.state_dict(), collectives, placements, step.state_bytes()))
    return results


@functools.cache
def trained(pool: Pool, name: str, stages: tuple[int, ...], sbp: Any) -> list[Any]:
    return pool.run(4, train, name, stages, sbp)


HYBRID = ("mlp", (2, 3), BOTH)


@sliced("name, stages, sbp", [HYBRID, ("gpt_of_one_block", (3,), FIRST)], [("conv", (3,), BOTH)])
def test_a_mesh_computes_what_one_device_computes(pool: Pool, name: str, stages: tuple[int, ...], sbp: Any) -> None:
    everybody = trained(pool, name, stages, sbp)
    plain = plain_run(name, STEPS, 8, torch.float64)
    for stage, (losses, state, _, _, _) in zip(stages, everybody[0], strict=True):
        check((losses, state["modules"]["model"]), plain, 1e-12)
        for other in everybody[1:]:
            assert all(map(torch.equal, losses, other[stages.index(stage)][0])), "ranks got different losses"
    for key, value in plain.state.items():
        assert deviation(everybody[0][-1][1]["modules"]["model"][key], value) <= 1e-12, key


def test_hybrid_shards_reduce_within_a_node_and_then_between_nodes(pool: Pool) -> None:
    _, _, collectives, placements, nbytes = trained(pool, *HYBRID)[0][0]
    big = [one for one in collectives if one.tensors[0].startswith("model.")]
    assert Counter((one.kind, one.mesh_dim) for one in big) == {
        ("all-gather", 1): 1,
        ("reduce-scatter", 1): 1,
        ("all-reduce", 0): 1,
    }
    inside = next(one for one in big if one.kind == "reduce-scatter")
    between = next(one for one in big if one.kind == "all-reduce")
    # Only the shard crosses between nodes.
    assert between.tensor_bytes * 2 == inside.tensor_bytes
    assert placements["model.0.weight"] == "(B, S(0))"
    # Two moments, halved, a step count, and room for whole parameters, of which the shard is one half.
    elements = sum(p.numel() for p in make("mlp").parameters())
    assert nbytes == pytest.approx(2 * 8 * elements / 2 + 8 * elements, abs=64)


def test_tensor_parallelism_moves_activations_only_along_its_own_dimension() -> None:
    model = make("gpt")
    annotate(model)
    step = TrainStep(model, adamw(model), 2, input_sbp=FIRST)
    prepared = step.prepare(Mesh((2, 2), (0, 0), ("data", "model")), *(x.chunk(2)[0] for x in batches("gpt", 1)[0]))
    collectives, placements = prepared.collectives(), {name: str(sbp) for name, sbp in prepared.placements().items()}
    activations = [one for one in collectives if not one.tensors[0].startswith("model.") and one.tensor_bytes > 1000]
    # Per block one all-reduce of what the two halves of the MLP sum to, and one of its gradient.
    assert {(one.kind, one.mesh_dim) for one in activations} == {("all-reduce", 1)}
    assert Counter(one.phase for one in activations) == {"forward": 2, "backward": 2}
    # Along the first dimension shards cut through the bucket, along the second the user has split rows or columns.
    assert placements["model.blocks.0.up.weight"] == "(S(0), S(0))"
    assert placements["model.blocks.0.down.weight"] == "(S(0), S(1))"
    weights = [one for one in collectives if one.tensors[0].startswith("model.")]
    assert {one.mesh_dim for one in weights} == {0}


def refusals() -> list[str]:
    """Messages for annotations and meshes that do not fit."""
    found = []

    def attempt(**options: Any) -> None:
        model = make("mlp")
        sbp = options.pop("sbp", None)
        if sbp is not None:
            zg.annotate(model[0].weight, sbp=sbp)
        step = TrainStep(model, adamw(model), 2, **options)
        (x, y), *_ = batches("mlp", 1)
        found.append(told(lambda: step(own(x, BOTH), own(y, BOTH)))[1])

    grid = zg.placement("cpu", ranks=GRID)
    attempt(sbp=(zg.sbp.broadcast, zg.sbp.split(0)))
    attempt(placement=grid, sbp=(zg.sbp.split(1), zg.sbp.split(1)), shard_dims=0)
    attempt(placement=grid, sbp=(zg.sbp.broadcast, zg.sbp.split(1)), shard_dims=0)
    attempt(placement=grid, input_sbp=(zg.sbp.split(0),))
    attempt(placement=grid, shard_dims=2)
    attempt(placement=zg.placement("cpu", ranks=[[1, 0], [2, 3]]))
    return found


def test_what_does_not_fit_the_mesh_is_refused(pool: Pool) -> None:
    found = pool.run(4, refusals)[0]
    words = [
        "but the graph's placement has 1 dimension(s)",
        "model.0.weight of shape (15, 7) is annotated S(1) over 4 ranks",
        "model.0.weight of shape (15, 7) is annotated S(1) over 2 ranks",
        "has 1 SBPs for a placement of 2 dimension(s)",
        "config.zero.shard_dims is 2, but the placement has 2 dimension(s)",
        "in ascending order along each dimension",
    ]
    assert len(found) == len(words)
    for message, wanted in zip(found, words, strict=True):
        assert wanted in message


def move_between_meshes() -> dict[str, Any]:
    """Trained on a line, then with tensor parallelism, then on a line again; looked at from all sides."""
    data = batches("gpt_of_one_block", 3, 8, torch.float64)
    model = make("gpt_of_one_block", torch.float64)
    annotated = make("gpt_of_one_block", torch.float64)
    annotate(annotated)
    grid = {"placement": zg.placement("cpu", ranks=GRID), "input_sbp": FIRST}
    line = TrainStep(model, adamw(model), 3)
    line(data[0][0].chunk(4)[zg.rank()], data[0][1].chunk(4)[zg.rank()])
    square = TrainStep(annotated, adamw(annotated), 2, **grid)
    square.load_state_dict(line.state_dict())
    square(own(data[1][0], FIRST), own(data[1][1], FIRST))
    with square.full_parameters():
        opened = {name: value.detach().clone() for name, value in annotated.state_dict().items()}
        with torch.no_grad():
            eager = annotated(data[2][0])
    predicted = Predict(annotated, **grid)(own(data[2][0], FIRST))
    # Loaded back into graphs that are compiled already: into the shards that are there.
    line.load_state_dict(square.state_dict())
    line(data[2][0].chunk(4)[zg.rank()], data[2][1].chunk(4)[zg.rank()])
    square.load_state_dict(line.state_dict())
    return {"opened": opened, "eager": own(eager, FIRST), "predicted": predicted, "end": square.state_dict()}


def test_state_moves_between_a_line_and_a_mesh(pool: Pool) -> None:
    found = pool.run(4, move_between_meshes)[0]
    second = plain_run("gpt_of_one_block", 2, 8, torch.float64).state
    third = plain_run("gpt_of_one_block", 3, 8, torch.float64).state
    for name, value in second.items():
        assert deviation(found["opened"][name], value) <= 1e-12, name
    torch.testing.assert_close(found["predicted"], found["eager"], rtol=1e-12, atol=1e-12)
    for name, value in third.items():
        assert deviation(found["end"]["modules"]["model"][name], value) <= 1e-12, name
    model = make("gpt_of_one_block", torch.float64)
    optimizer = adamw(model)
    optimizer.load_state_dict(found["end"]["optimizers"][0])
    assert float(optimizer.state[model.head.weight]["step"]) == 3
