"""``config.zero.shard_by = "parameters"``: whole parameters dealt out to the ranks, and the same numbers, bit by
bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.equivalence import test_split_modules as split_modules
from tests.harness import deviation
from tests.models import Gpt, TokenLoss, TrainStep, adam_step, adamw, batches, make, part, update_by
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool
from zerograph.runtime.state import in_memory, store_of

NAME, STEPS = "gpt_tied_of_one_block", 2
WAYS = ("elements", "parameters")


def fused(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def runs(step: TrainStep, stages: tuple[int, ...], name: str = NAME) -> dict[tuple[str, int], Any]:
    """Cut through at the first stage, dealt out at all, from the same beginning; one graph: it is captured once."""
    initial = step.state_dict()
    found: dict[tuple[str, int], Any] = {}
    for way, stage in [(WAYS[0], stages[0]), *((WAYS[1], stage) for stage in stages)]:
        step.config.set(stage=stage, shard_by=way)
        step.load_state_dict(initial)
        losses = [step(part(x), part(y)) for x, y in batches(name, STEPS)]
        state = step.state_dict()
        found[way, stage] = (losses, state["modules"]["model"], state["optimizers"][0]["state"], step.steps_done)
    return found


def same(found: dict[tuple[str, int], Any]) -> None:
    wanted = next(iter(found.values()))
    for key, (losses, model, optimizer, steps) in found.items():
        assert all(map(torch.equal, losses, wanted[0])), key
        assert all(torch.equal(model[name], value) for name, value in wanted[1].items()), key
        for number, entries in wanted[2].items():
            assert all(torch.equal(optimizer[number][name], value) for name, value in entries.items()), (key, number)
        assert steps == wanted[3]


def plainly_and_clipped() -> tuple[dict[tuple[str, int], Any], dict[str, Any]]:
    step = adam_step(NAME, clip_grad_norm=0.5, bucket_size=8192)
    found = runs(step, (1, 2, 3))
    sizes = {name: parameter.numel() for name, parameter in step.model.named_parameters()}
    held = {}
    for name, parameter in step.model.named_parameters():
        store = store_of(parameter)
        assert store is not None
        slot = store.layout.slots[next(i for i, one in enumerate(store.parameters) if one is parameter)]
        # Its values, where they lie on the rank that owns it.
        start = slot.offset - zg.rank() * (store.layout.padded // 2)
        if step.inspect.owners()[f"model.{name}"] == zg.rank():
            held[name] = in_memory(store.flat)[start : start + slot.numel].clone().view(slot.shape)
    return found, {
        "owners": step.inspect.owners(),
        "sizes": sizes,
        "held": held,
        "shown": step.inspect.describe(),
        "bytes": step.state_bytes(),
    }


@pytest.fixture(scope="module")
def trained(pool: Pool) -> list[Any]:
    return pool.run(2, plainly_and_clipped)


def test_dealt_out_or_cut_through_the_numbers_are_the_same_bit_by_bit(trained: list[Any]) -> None:
    for found, _ in trained:
        same(found)


def test_they_are_those_of_one_device(trained: list[Any]) -> None:
    model = make(NAME)
    optimizer = adamw(model)
    for x, y in batches(NAME, STEPS):
        update_by(optimizer, TokenLoss()(model(x), y), clip=0.5)
    state = trained[0][0]["parameters", 3][1]
    for name, value in model.state_dict().items():
        assert deviation(state[name], value) <= 1e-5, name


def test_each_parameter_is_whole_on_one_rank(trained: list[Any]) -> None:
    owners, state = trained[0][1]["owners"], trained[0][0]["parameters", 3][1]
    assert owners == trained[1][1]["owners"]
    # The head is the embedding: the owner is one.
    assert owners["model.head.weight"] == owners["model.tokens.weight"]
    for rank, (_, about) in enumerate(trained):
        assert {f"model.{name}" for name in about["held"]} == {
            name for name, owner in owners.items() if owner == rank and name != "model.head.weight"
        }
        for name, value in about["held"].items():
            assert torch.equal(value, state[name]), name


def test_ranks_get_parameters_of_about_one_size(trained: list[Any]) -> None:
    about = trained[0][1]
    loads = [0, 0]
    for name, numel in about["sizes"].items():
        loads[about["owners"][f"model.{name}"]] += numel
    assert abs(loads[0] - loads[1]) <= 0.1 * sum(loads)
    # Parameters and two moments of the longer shard of each bucket.
    assert about["bytes"] == pytest.approx(3 * 4 * sum(loads) / 2, rel=0.15)


def test_the_printed_step_says_whose_each_parameter_is(trained: list[Any]) -> None:
    shown = trained[0][1]["shown"]
    assert "ZeRO stage 3, whole parameters" in shown
    assert "AdamW, elementwise, whole parameters dealt out to ranks" in shown
    owner = trained[0][1]["owners"]["model.blocks.0.up.weight"]
    assert f"model.blocks.0.up.weight (128, 32)  rank {owner}" in shown


def with_the_rest(folder: Path) -> list[dict[tuple[str, int], Any]]:
    model = make("mlp")
    every = [runs(TrainStep(model, adamw(model), gradient_accumulation_steps=2), (3,), "mlp")]
    model = make("mlp")
    step = TrainStep(model, adamw(model), bucket_size=256, shard_min_size=20)
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))
    every.append(runs(step, (2,), "mlp"))
    model = make("mlp")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step.config.enable_amp(dtype=torch.bfloat16)
    every.append(runs(step, (3,), "mlp"))
    model = make("mlp")
    return [*every, runs(TrainStep(model, fused(model)), (2,), "mlp")]


@pytest.mark.long
def test_so_it_is_with_micro_batches_offload_and_mixed_precision(pool: Pool, tmp_path: Path) -> None:
    *every, with_fused = pool.run(2, with_the_rest, tmp_path)[0]
    for found in every:
        same(found)
    # The kernel rounds the last elements of a shard, fewer than a vector register holds, otherwise than the rest.
    cut, dealt = with_fused.values()
    torch.testing.assert_close(dealt[:2], cut[:2], rtol=1e-5, atol=1e-6)


def predicted() -> list[tuple[int, int]]:
    torch.manual_seed(0)
    model = Gpt(tied=False, width=64)
    step = TrainStep(model, adamw(model), bucket_size=16384)
    (x, y), *_ = batches("gpt", 1)
    found = []
    for stage in (2, 3):
        step.config.set(stage=stage, shard_by="parameters")
        for _ in range(2):
            step(part(x), part(y))
        found.append((step.inspect.memory.peak, most_alive_bytes(step, part(x), part(y))))
    return found


@pytest.mark.long
def test_the_predicted_peak_is_that_of_live_tensors(pool: Pool) -> None:
    for bytes_predicted, seen in pool.run(2, predicted)[0]:
        assert bytes_predicted == pytest.approx(seen, rel=0.1)


def on_a_grid() -> tuple[list[Tensor], dict[str, int]]:
    model, mesh, given = split_modules.placed("grid")
    step = split_modules.LossStep(model, split_modules.adamw(model), 3, split_modules.distance)
    step.config.mesh.placement = mesh
    step.config.set(stage=3, shard_by="parameters")
    return [step(given(x), given(y)) for x, y in split_modules.data()], step.inspect.owners()


def test_what_is_split_along_another_mesh_dimension_is_dealt_out_too(pool: Pool) -> None:
    losses, owners = pool.run(4, on_a_grid)[0]
    torch.testing.assert_close(losses, split_modules.plain()[0], rtol=1e-12, atol=1e-12)
    assert set(owners) == {f"model.{name}" for name, _ in split_modules.Net().named_parameters()}
    assert owners["model.whole.weight"] != owners["model.whole.bias"]
    assert owners["model.split.weight"] != owners["model.split.bias"]
