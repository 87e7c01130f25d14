"""State and parameters that rest in files: the same training, in less memory, or an error that names the file."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.harness import covering, optimizer_of, sliced, stores_of
from tests.models import TrainStep, batches, make, part
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool
from tests.scripts import run_apart
from zerograph._torch import pytree
from zerograph.errors import ConfigError, OffloadError

Optimizer = Callable[[Any], torch.optim.Optimizer]


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Its state is made by the first update."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def matrices_by_muon(parameters: Any) -> torch.optim.Optimizer:
    """Its buckets are dealt out."""
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2], lr=0.02)


def train_step(folder: Path | None, optimizer: Optimizer, stage: int, **options: object) -> TrainStep:
    """In many small buckets; with a folder, whatever may rest there does."""
    model = make("mlp")
    step = TrainStep(model, optimizer(model.parameters()), stage, bucket_size=256, **options)
    into_files(step, folder)
    return step


def into_files(step: zg.ZeroGraph, folder: Path | None) -> None:
    files = None if folder is None else zg.OffloadTo("nvme", folder)
    step.config.memory.offload = zg.Offload(optimizer=files, parameters=files if step.config.zero.stage == 3 else None)


def run(step: zg.ZeroGraph, count: int = 3, first: int = 0) -> list[Tensor]:
    return [step(*map(part, batch)) for batch in batches("mlp", first + count)[first:]]


def tensors(state: Any) -> list[Tensor]:
    optimizers = [one["state"] for one in state["optimizers"]]
    return [one for one in pytree.tree_leaves([state["modules"], optimizers]) if isinstance(one, Tensor)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def same_with_and_without(folder: Path, optimizer: Optimizer, stages: list[int], options: dict[str, object]) -> None:
    """At each stage, from the same beginning, and on from a saved state."""
    step = train_step(None, optimizer, stages[0], **options)
    initial = step.state_dict()
    for stage in stages:
        losses, states = [], []
        for place in (None, folder):
            step.config.zero.stage = stage
            into_files(step, place)
            step.load_state_dict(initial)
            before = run(step, 2)
            saved = step.state_dict()
            step.load_state_dict(saved)
            losses.append([*before, *run(step, 2, first=2)])
            states.append(tensors(step.state_dict()))
            assert (len(os.listdir(folder)) > 0) == (place is not None)
        assert equal(*losses)
        assert equal(*states)


@sliced(
    "optimizer, stages, options",
    [
        (fused_adamw, [3], {"amp_dtype": torch.float16, "grad_scaler": zg.GradScaler(init_scale=2.0**40)}),
        (matrices_by_muon, [2], {}),
    ],
    [
        (torch.optim.Adam, [1], {"shard_min_size": 32}),
        (fused_adamw, [0], {"clip_grad_norm": 1.0}),
        (fused_adamw, [3], {"clip_grad_norm": 1.0}),
        (momentum, [2], {}),
        (matrices_by_muon, [3], {}),
    ],
)
def test_training_is_bitwise_the_same(
    pool: Pool, tmp_path: Path, optimizer: Optimizer, stages: list[int], options: dict[str, object]
) -> None:
    pool.run(2, same_with_and_without, tmp_path, optimizer, stages, options)


def predicted_and_seen(folder: Path) -> tuple[zg.Memory, int, int, int]:
    model = make("gpt_of_one_block")
    step = TrainStep(model, fused_adamw(model.parameters()), 3, bucket_size=2**13)
    into_files(step, folder)
    batch = [part(tensor) for tensor in batches("gpt_of_one_block", 1)[0]]
    step(*batch)
    everything = sum(parameter.numel() * 4 for parameter in model.parameters())
    return step.inspect.memory, most_alive_bytes(step, *batch), step.state_bytes(), everything


def test_the_memory_forecast_knows_what_is_in_files(pool: Pool, tmp_path: Path) -> None:
    for memory, seen, at_rest, everything in pool.run(2, predicted_and_seen, tmp_path):
        assert memory.peak == pytest.approx(seen, rel=0.1)
        assert memory.at_rest == pytest.approx(at_rest, abs=2000)
        # Step counts, one for each bucket, and handles.
        assert at_rest < 0.01 * everything


def under_a_budget(folder: Path) -> tuple[int, int, list[Tensor], list[Tensor]]:
    losses, budget = [], 0
    for place in (None, folder):
        model = make("gpt_of_one_block")
        step = TrainStep(model, fused_adamw(model.parameters()), 3, bucket_size=2**13, memory_budget=budget or None)
        into_files(step, place)
        losses.append([step(*map(part, batch)) for batch in batches("gpt_of_one_block", 2)])
        # More than half of what rests in memory is missing then: no schedule makes up for that.
        budget = step.inspect.memory.peak - step.inspect.memory.at_rest // 2
    return int(step.config.memory_bytes or 0), step.inspect.memory.peak, *losses


def test_a_budget_is_kept_that_only_files_can_keep(pool: Pool, tmp_path: Path) -> None:
    for budget, peak, without, within in pool.run(2, under_a_budget, tmp_path):
        assert peak <= budget
        assert equal(without, within)


def refused(step: zg.ZeroGraph) -> tuple[str, bool]:
    """Return the error of the next step on this rank, and True if nothing has changed."""
    before = [store.flat.clone() for store in stores_of(step)]
    with pytest.raises(zg.ZeroGraphError) as raised:
        run(step, 1)
    return str(raised.value), step.steps_done == 1 and equal(before, [store.flat for store in stores_of(step)])


def with_another_folder(folder: Path, others: str) -> tuple[str, bool]:
    step = train_step(folder, fused_adamw, 2)
    run(step, 1)
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", others if zg.rank() else folder / ".."))
    return refused(step)


@pytest.mark.parametrize(
    ("others", "why"), [("/nowhere/at/all", "is no directory"), ("/sys/kernel", "cannot be created: ")]
)
def test_a_folder_that_cannot_be_used_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path, others: str, why: str
) -> None:
    for rank, (message, unchanged) in enumerate(pool.run(2, with_another_folder, tmp_path, others)):
        assert unchanged
        assert why in message
        assert others in message
        assert ("rank 1 failed before" in message) == (rank == 0)


def full(_: int) -> os.statvfs_result:
    return os.statvfs_result([4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255])


def on_a_full_disk(folder: Path) -> tuple[str, bool, list[str]]:
    step = train_step(None, fused_adamw, 2)
    run(step, 1)
    into_files(step, folder)
    with pytest.MonkeyPatch.context() as patch:
        if zg.rank():
            patch.setattr(os, "fstatvfs", full)
        message, unchanged = refused(step)
    run(step, 1)
    return message, unchanged, [name for name in os.listdir(folder) if f"rank{zg.rank()}" in name]


def test_a_full_disk_is_an_error_before_anything_changes(pool: Pool, tmp_path: Path) -> None:
    for message, unchanged, files in pool.run(2, on_a_full_disk, tmp_path):
        assert unchanged
        assert "rank1.state cannot grow by" in message
        assert "No space left on device, 0 bytes are left" in message
        # With the room that it needs the same step runs.
        assert len(files) == 1


def deleted(file: Path) -> None:
    file.unlink()


def truncated(file: Path) -> None:
    os.truncate(file, 4096)


def tampered_with(folder: Path, how: Callable[[Path], None]) -> tuple[str, bool, bool]:
    step = train_step(folder, fused_adamw, 2)
    run(step, 1)
    saved = step.state_dict()
    if zg.rank():
        how(next(file for file in folder.iterdir() if "rank1" in file.name))
    message, unchanged = refused(step)
    # As the message says.
    again = train_step(folder, fused_adamw, 2)
    again.load_state_dict(saved)
    return message, unchanged, equal(tensors(again.state_dict()), tensors(saved)) and bool(run(again, 1))


@pytest.mark.parametrize(("how", "what"), [(deleted, "was deleted"), (truncated, "was truncated to 4,096 of")])
def test_a_file_that_was_tampered_with_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path, how: Callable[[Path], None], what: str
) -> None:
    for message, unchanged, can_go_on in pool.run(2, tampered_with, tmp_path, how):
        assert unchanged
        assert f"rank1.state {what}" in message
        assert can_go_on


@sliced("way, stage", *covering(itertools.product(["load", "load_state_dict", "a new graph of the same"], [2, 3])))
def test_the_remedy_for_a_lost_file_works_while_the_graph_lives(tmp_path: Path, way: str, stage: int) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    step = train_step(folder, fused_adamw, stage)
    run(step, 1)
    step.save(tmp_path / "checkpoint")
    saved = step.state_dict()
    expected = run(step, 1)
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(OffloadError, match=r"was deleted.*\n.*into this graph, with load\(\) or load_state_dict\(\)"):
        run(step, 1)
    again = step
    if way == "a new graph of the same":
        again = TrainStep(step.model, optimizer_of(step), stage, bucket_size=256)
        into_files(again, folder)
    if way == "load":
        again.load(tmp_path / "checkpoint")
    else:
        again.load_state_dict(saved)
    assert equal(tensors(again.state_dict()), tensors(saved))
    assert run(again, 1) == expected


def test_what_is_not_loaded_stays_lost(tmp_path: Path) -> None:
    step = train_step(tmp_path, fused_adamw, 3)
    run(step, 1)
    saved = step.state_dict()
    for file in tmp_path.iterdir():
        file.unlink()
    step.load_state_dict({"modules": saved["modules"]})
    with pytest.raises(OffloadError, match="was deleted"):
        run(step, 1)


def test_parameters_in_files_need_stage_3(tmp_path: Path) -> None:
    step = train_step(None, fused_adamw, 2)
    step.config.memory.offload = zg.Offload(parameters=zg.OffloadTo("nvme", tmp_path))
    with pytest.raises(ConfigError, match="need ZeRO stage 3"):
        run(step, 1)


def test_so_many_bytes_of_parameters_stay_in_memory(tmp_path: Path) -> None:
    held = []
    for most in (0, 700, 2**20):
        step = train_step(tmp_path, fused_adamw, 3)
        to = zg.OffloadTo("nvme", tmp_path, max_in_cpu=most)
        step.config.memory.offload = zg.Offload(optimizer=to, parameters=to)
        run(step, 1)
        assert ("shard and state in files" in str(step)) == (most < 2**20)
        held.append(sum(store.flat.nbytes for store in stores_of(step) if isinstance(store.flat, Tensor)))
    everything = sum(parameter.numel() * 4 for parameter in make("mlp").parameters())
    assert held[0] == 0
    assert 0 < held[1] <= 700
    assert held[2] == everything


def test_files_go_with_the_model_and_the_graph(tmp_path: Path) -> None:
    step = train_step(tmp_path, fused_adamw, 3)
    run(step, 1)
    assert len(os.listdir(tmp_path)) == 1
    del step
    gc.collect()
    assert not os.listdir(tmp_path)


KEPT: list[zg.ZeroGraph] = []


def leave(folder: Path) -> None:
    for name in ("left", "gone"):
        step = train_step(folder / name, fused_adamw, 1)
        files = zg.OffloadTo("nvme", folder / name, keep_files=name == "left")
        step.config.memory.offload = zg.Offload(optimizer=files)
        run(step, 1)
        KEPT.append(step)


def test_files_go_at_exit_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    for name in ("left", "gone"):
        (tmp_path / name).mkdir()
    assert run_apart(leave, tmp_path) == 0
    assert len(os.listdir(tmp_path / "left")) == 1
    assert not os.listdir(tmp_path / "gone")
