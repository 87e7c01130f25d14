"""Parameters that the user splits along both dimensions of a grid: in rows of rows, and in blocks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, deviation, each_stage, sliced
from tests.models import adamw, update_by
from tests.pool import Pool
from zerograph.ir.mesh import Mesh

B, S0, S1 = zg.sbp.broadcast, zg.sbp.split(0), zg.sbp.split(1)
GRID = [[0, 1], [2, 3]]
STEPS = 3


class Model(nn.Module):
    """Two layers, a table between them that nobody splits, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 16), nn.Linear(16, 12), nn.LayerNorm(12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(self.down(self.up(x).relu())), y)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def split(one: Model, dims: int = 2) -> Model:
    """Split along the last two mesh dimensions."""
    first = (B,) * (dims - 2)
    zg.annotate(one.up.weight, sbp=(*first, S0, S0))
    zg.annotate(one.up.bias, sbp=(*first, S0, S0))
    zg.annotate(one.down.weight, sbp=(*first, S0, S1))
    return one


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, dtype=torch.float64, generator=generator),
            torch.randn(8, 12, dtype=torch.float64, generator=generator),
        )
        for _ in range(STEPS)
    ]


def plain() -> tuple[list[Tensor], dict[str, Tensor]]:
    one = model()
    optimizer = adamw(one)
    losses = [update_by(optimizer, one(*batch), clip=0.5) for batch in batches()]
    return [loss.detach() for loss in losses], one.state_dict()


def step_on(ranks: Any, stage: int, *, columns: bool = False, **options: Any) -> LossStep:
    dims = torch.tensor(ranks).dim()
    one = split(model(), dims) if dims > 1 else model()
    if columns:
        zg.annotate(one.down.weight, sbp=(B, S1))
    placement = zg.placement("cpu", ranks=ranks)
    return LossStep(one, adamw(one), stage, placement=placement, shard_min_size=1, clip_grad_norm=0.5, **options)


def part(tensor: Tensor, ranks: Any, input_sbp: Any) -> Tensor:
    """This rank's part of a whole batch."""
    grid = torch.tensor(ranks)
    position = (grid == zg.rank()).nonzero()[0].tolist()
    for sbp, count, index in zip(input_sbp, grid.shape, position, strict=True):
        tensor = tensor.chunk(count)[index] if sbp == S0 else tensor
    return tensor


def train(ranks: Any, stages: tuple[int, ...], input_sbp: Any, folder: Path | None = None, **options: Any) -> list[Any]:
    """For each stage losses, the state, and the SBPs of the parameters; save the last in the middle."""
    step = step_on(ranks, 0, input_sbp=input_sbp, **options)
    results = []
    for stage in each_stage(step, stages):
        losses = []
        for number, batch in enumerate(batches()):
            losses.append(step(*(part(tensor, ranks, input_sbp) for tensor in batch)))
            if folder is not None and stage == stages[-1] and number == 0:
                step.save(folder)
        placed = {name: str(sbp) for name, sbp in step.inspect.placements().items()}
        results.append((losses, step.state_dict()["modules"]["model"], placed))
    return results


def close(losses: list[Tensor], state: dict[str, Tensor]) -> None:
    """Compare with one device."""
    expected, values = plain()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-10, atol=1e-12)
    for name, value in values.items():
        assert deviation(state[name], value) <= 1e-10, name


# That stages agree depends neither on the batch's SBP nor on the dimensions of ZeRO.
@sliced(
    "columns, input_sbp, stages",
    [(False, (S0, S0), (2,)), (True, (S0, B), (3,))],
    itertools.product((False, True), ((S0, B), (S0, S0)), [(0, 1, 2, 3)]),
)
def test_stages_compute_what_one_device_computes_along_one_dimension_and_along_both(
    pool: Pool, columns: bool, input_sbp: Any, stages: tuple[int, ...]
) -> None:
    everybody = pool.run(4, on_grid, stages, input_sbp, columns)
    for number, stage in enumerate(stages):
        for losses, state, placed in (results[number] for results in everybody):
            close(losses, state)
            assert all(map(torch.equal, losses, everybody[0][0][0])), stage
            if stage == 3 or not columns:
                # Where columns are ZeRO's too: ZeRO's and the user's, the user's alone, and ZeRO's alone.
                assert placed["model.down.weight"] == "(S(0), S(1))"
                assert placed["model.up.weight"] == "(S(0), S(0))"
                assert placed["model.norm.weight"] == "(S(0), S(0))" or not columns


def on_grid(stages: tuple[int, ...], input_sbp: Any, columns: bool) -> list[Any]:
    return train(GRID, stages, input_sbp, **({"shard_dims": (0, 1), "columns": True} if columns else {}))


CUBE = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_zero_shards_the_pieces_along_a_third_dimension() -> None:
    one = split(model(), 3)
    step = LossStep(one, adamw(one), 3, shard_min_size=1, input_sbp=(S0, B, B))
    prepared = step.prepare(Mesh((2, 2, 2), (1, 0, 1), ("data", "rows", "columns")), *(t[:4] for t in batches()[0]))
    placed = {name: str(sbp) for name, sbp in prepared.placements().items()}
    assert placed["model.up.weight"] == "(S(0), S(0), S(0))"
    assert placed["model.down.weight"] == "(S(0), S(0), S(1))"
    moved = [one for one in prepared.collectives() if one.tensors[0].startswith(("model.up", "model.down.weight"))]
    # Each rank gathers and reduces its quarter: up.weight and up.bias in one bucket, down.weight in another.
    assert {(one.mesh_dim, one.tensor_bytes) for one in moved} >= {(0, 8 * 28), (0, 8 * 48)}


@pytest.mark.long
def test_eight_ranks_compute_what_one_device_computes() -> None:
    workers = Pool(size=8)
    everybody = workers.run(8, train, CUBE, (1, 2, 3), (S0, B, B))
    workers.close()
    for losses, state, _ in (result for results in everybody for result in results):
        close(losses, state)


def resume(folder: Path, ranks: Any, stage: int, input_sbp: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Load the state after the first batch, and train on the others."""
    step = step_on(ranks, stage, input_sbp=input_sbp)
    step.load(folder)
    losses = [step(*(part(tensor, ranks, input_sbp) for tensor in batch)) for batch in batches()[1:]]
    return losses, step.state_dict()["modules"]["model"]


def save_elsewhere(folder: Path) -> None:
    """Train a first batch on a line, and save."""
    step = step_on([0, 1, 2, 3], 3)
    step(*(part(tensor, [0, 1, 2, 3], (S0,)) for tensor in batches()[0]))
    step.save(folder)


@pytest.mark.long
def test_checkpoints_move_to_and_from_other_layouts(pool: Pool, tmp_path: Path) -> None:
    expected, values = plain()
    pool.run(4, train, GRID, (2,), (S0, B), tmp_path / "blocks")
    pool.run(4, save_elsewhere, tmp_path / "line")
    for folder, ranks, input_sbp in [("blocks", [0, 1], (S0,)), ("line", GRID, (S0, S0))]:
        for losses, state in pool.run(torch.tensor(ranks).numel(), resume, tmp_path / folder, ranks, 3, input_sbp):
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected[1:]), rtol=1e-10, atol=1e-12)
            assert all(deviation(state[name], value) <= 1e-10 for name, value in values.items())
