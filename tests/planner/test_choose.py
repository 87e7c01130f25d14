"""``config.zero.stage = "auto"`` runs what the planner finds: the fastest that fits, with the numbers of any other
stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares, sliced
from tests.planner.test_search import LAYER, Wide
from tests.pool import Pool


def trained(step: Wide) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of three steps, and the parameters after them."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        batch = torch.randn(4, 64, generator=generator)
        losses.append(step(batch.chunk(zg.world_size())[zg.rank()]))
    return losses, list(step.state_dict()["modules"]["model"].values())


def run(budget: int, folder: Path | None, shard_by: str = "elements") -> tuple[Any, Any, dict[str, Any]]:
    plain, auto = Wide(4), Wide(4)
    auto.set_zero_mode("distributed_split", stage="auto")
    auto.config.set(memory_budget=budget, shard_by=shard_by)
    if folder is not None:
        auto.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))
    expected, found = trained(plain), trained(auto)
    about = {
        "stage": auto.config.zero.stage,
        "peak": auto.inspect.memory.peak,
        "owners": len(auto.inspect.owners()),
        "optimizer": auto.config.memory.offload.optimizer is not None,
        "parameters": auto.config.memory.offload.parameters is not None,
        "files": 0 if folder is None else len(os.listdir(folder)),
    }
    # A rank that is done removes its file.
    torch.distributed.barrier()
    return expected, found, about


def test_with_room_nothing_is_offloaded(pool: Pool, tmp_path: Path) -> None:
    for expected, found, about in pool.run(2, run, 10**8, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert not about["optimizer"]
        assert about["files"] == 0


@pytest.mark.long
def test_what_it_chooses_for_little_memory_trains_in_files_with_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    # Little more than a rank's half of four layers and their two moments: without files no stage can, and with the
    # optimizer alone in files none over the exchanges of ranks on one host, which hold gradients longer.
    budget = 33 * LAYER // 4
    for expected, found, about in pool.run(2, run, budget, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert about["stage"] == 3
        assert about["optimizer"]
        assert about["parameters"]
        assert about["files"] == 2
        assert about["peak"] <= budget


def test_shards_of_whole_parameters_stay_so(pool: Pool) -> None:
    # Too little for all state on each rank, enough for that of two layers.
    for expected, found, about in pool.run(2, run, 25 * LAYER // 2, None, "parameters"):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert (about["stage"], about["owners"]) == (1, 8)


def with_rows(budget: int, rows: tuple[int, int]) -> tuple[float, float, int]:
    batch = torch.randn(sum(rows), 64, generator=torch.Generator().manual_seed(1)).split(rows)[zg.rank()]
    plain, auto = Wide(2), Wide(2)
    auto.config.set(stage="auto", memory_budget=budget)
    return plain(batch).item(), auto(batch).item(), auto.inspect.memory.peak


@sliced("rows", [(48, 0)], [(48, 32)])
def test_ranks_with_unequal_rows_choose_alike(pool: Pool, rows: tuple[int, int]) -> None:
    # For the rows of the first rank alone it takes stage 3: for half of all rows stage 1 would do.
    budget = 29 * LAYER // 4
    for expected, found, peak in pool.run(2, with_rows, budget, rows):
        assert found == pytest.approx(expected, rel=1e-6)
        assert peak <= budget


def narrow() -> LossStep:
    torch.manual_seed(0)
    blocks = (one for _ in range(2) for one in (nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
    model = nn.Sequential(nn.Linear(64, 16), *blocks)
    return LossStep(model, torch.optim.AdamW(model.parameters()), loss=mean_of_squares)


def with_room_for_a_step_without_budget() -> tuple[int, int, list[float]]:
    x = torch.zeros(12, 64)
    peaks, losses = [], []
    for budget in (None, 10**9):
        step = narrow()
        step.config.set(stage=1, memory_budget=budget)
        step.compile(x)
        peaks.append(step.inspect.memory.peak)
    for stage, budget in ((0, None), ("auto", sum(peaks) // 2)):
        step = narrow()
        step.config.set(stage=stage, memory_budget=budget)
        losses.append(step(x).item())
    return peaks[0], peaks[1], losses


def test_what_fits_is_judged_by_the_step_with_the_budget(pool: Pool) -> None:
    for whole, within, (expected, found) in pool.run(2, with_room_for_a_step_without_budget):
        assert whole < within
        assert found == pytest.approx(expected, rel=1e-6)


def refused(budget: int | None) -> str:
    step = Wide(4)
    step.config.zero.stage = "auto"
    step.config.memory.memory_budget = budget
    with pytest.raises(zg.ZeroGraphError) as raised:
        trained(step)
    assert step.config.zero.stage == "auto"
    return str(raised.value)


def test_where_nothing_fits_it_says_what_was_tried(pool: Pool) -> None:
    for message in pool.run(2, refused, LAYER):
        assert "nothing that config.zero.stage = 'auto' tried fits into 16.2 KiB" in message
        assert "stage 3: does not fit: " in message
        assert "stored" in message


def test_on_the_cpu_it_needs_a_budget(pool: Pool) -> None:
    for message in pool.run(2, refused, None):
        assert "needs config.memory.memory_budget" in message


def test_where_the_chosen_step_is_not_compiled_the_stage_is_chosen_again() -> None:
    def fails(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        raise ValueError("not today")

    step = Wide(4)
    step.config.set(stage="auto", memory_budget=10**8, backend=fails)
    before = step.config.options()
    with pytest.raises(zg.CaptureError, match="not today"):
        step(torch.ones(2, 64))
    assert step.config.options() == before
    step.config.backend = "eager"
    step(torch.ones(2, 64))
    assert step.config.zero.stage != "auto"


def test_before_the_first_call_nothing_is_chosen() -> None:
    step = Wide(4)
    step.config.zero.stage = "auto"
    assert "to be chosen" in repr(step)
    with pytest.raises(zg.ConfigError, match="the first call of the graph chooses the stage"):
        step.config.policy  # noqa: B018
