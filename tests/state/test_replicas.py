"""``config.checks.check_replicas``: what ranks hold alike is compared bit by bit, and a difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares
from tests.pool import Pool
from zerograph.runtime.offload.transfers import write
from zerograph.runtime.state import Store, in_memory, store_of
from zerograph.runtime.tensor_hash import hash_bits


class Step(LossStep):
    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(model, optimizer, loss=mean_of_squares, scheduler=schedule)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizers[0]


def part() -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(3)).chunk(zg.world_size())[zg.rank()]


def store(step: Step) -> Store:
    found = store_of(step.model[0].weight)
    assert found is not None
    return found


def moment(step: Step) -> Tensor:
    """Where the second moment of the first weight's element [1, 2] lies: whole buckets are flat."""
    held = store(step)
    slot = next(one for one in held.layout.slots if one.name == "model.0.weight")
    return in_memory(held.state["exp_avg_sq"])[slot.offset + 7]


def refused(step: Step, error: type[zg.ZeroGraphError] = zg.ReplicaError) -> str:
    with pytest.raises(error) as caught:
        step(part())
    return str(caught.value)


def corrupted() -> dict[str, str]:
    """Return the error for each tensor that rank 1 alone changes; it is restored after each."""
    step = Step()
    step.config.checks.check_replicas = 1
    step(part())
    step(part())
    found = {}
    group = step.optimizer.param_groups[0]
    scheduler = step._schedulers[0]
    assert scheduler is not None
    mine = zg.rank() == 1
    for name, tensor, value in (
        ("parameter", step.model[2].weight.data[1, 0], -0.0),
        ("moment", moment(step), float("nan")),
        ("buffer", step.model[1].running_var[1], 1e30),
        ("count", step.model[1].num_batches_tracked, 7),
    ):
        before = tensor.clone()
        # Of zeros rank 1 has the other one.
        if name == "parameter":
            tensor.fill_(0.0)
        if mine:
            tensor.fill_(value)
        found[name] = refused(step)
        tensor.copy_(before)
    rate, epoch = group["lr"], scheduler.last_epoch
    group["lr"] = rate * (1 + mine)
    found["learning rate"] = refused(step, zg.RankMismatchError)
    group["lr"], scheduler.last_epoch = rate, epoch + mine
    found["scheduler"] = refused(step)
    scheduler.last_epoch = epoch
    step(part())
    assert step.steps_done == 3
    step.steps_done += mine
    with pytest.raises(zg.RankMismatchError) as caught:
        step(part())
    found["steps"] = str(caught.value)
    return found


def test_what_differs_is_named_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, corrupted)
    # Each says which step it was about to make: there, that is what differs.
    assert second.pop("steps") == first["steps"].replace("before step 4", "before step 5")
    assert {**second, "steps": first["steps"]} == first
    for name, wanted in {
        "parameter": [
            "step 3",
            "model.2.weight[1, 0]",
            "rank 0: 0.0 (bits 0x00000000)",
            "rank 1: -0.0 (bits 0x80000000)",
        ],
        "moment": ["model.0.weight.exp_avg_sq[1, 2]", "rank 1: nan"],
        "buffer": ["model.1.running_var[1]"],
        "count": ["model.1.num_batches_tracked:", "rank 0: 2", "rank 1: 7"],
        "learning rate": ["hyperparameters: lr of group 0 of optimizer 0", "rank 1: 0.0162"],
        "scheduler": ["last_epoch of ExponentialLR of AdamW", "rank 0: 2", "rank 1: 3"],
        "steps": ["what they are about to do", "rank 0: step 4", "rank 1: step 5"],
    }.items():
        for words in wanted:
            assert words in first[name], first[name]


def every(steps: int | None) -> list[int]:
    """The steps that noticed that rank 1 has another bit in a buffer."""
    step = Step()
    step.config.checks.check_replicas = steps
    step.compile(part())
    noticed = []
    for number in range(5):
        if number == 1 and zg.rank() == 1:
            step.model[0].bias.data[0] += 1e-3
        try:
            step(part())
        except zg.ReplicaError:
            noticed.append(number)
            break
    return noticed


def test_replicas_are_compared_every_so_many_steps_and_never_unasked(pool: Pool) -> None:
    assert pool.run(2, every, 3) == [[3], [3]]
    assert pool.run(2, every, None) == [[], []]


def copies(folder: str | None) -> list[str]:
    """Two nodes of one rank each: shards are copied between them. A moment in memory, or in a file, is corrupted."""
    step = Step()
    step.set_zero_mode("distributed_split", stage=3)
    step.config.mesh.placement = zg.placement("cpu", ranks=[[0], [1]])
    step.config.checks.check_replicas = 1
    if folder is not None:
        step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))
    step(part())
    step(part())
    held = store(step).state["exp_avg"]
    if zg.rank() == 1:
        tensor = in_memory(held)
        tensor[next(one for one in store(step).layout.slots if one.name == "model.0.weight").offset + 7] += 1
        if not isinstance(held, Tensor):
            write(held, tensor)
    return [refused(step)]


def test_copies_of_shards_are_compared_in_memory_and_in_files(pool: Pool, tmp_path: Path) -> None:
    for folder in (None, str(tmp_path)):
        for (message,) in pool.run(2, copies, folder):
            assert "first in model.0.weight.exp_avg[1, 2]:\n  rank 0: " in message


def shards() -> None:
    step = Step()
    step.set_zero_mode("distributed_split", stage=2)
    step.config.checks.check_replicas = 1
    for _ in range(3):
        step(part())
    held: Any = store(step).flat
    held += zg.rank()
    step(part())
    assert step.steps_done == 4


def test_shards_are_meant_to_differ(pool: Pool) -> None:
    pool.run(2, shards)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_one_bit_changes_a_hash_wherever_it_is(dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    whole = torch.zeros(13 * size, dtype=torch.uint8)
    tensor = whole.view(dtype)
    seen = {int(hash_bits(tensor))}
    for at in range(0, len(whole), 3):
        whole[at] = 1
        seen.add(int(hash_bits(tensor)))
        whole[at] = 0
    assert len(seen) == 1 + len(range(0, len(whole), 3))
    assert int(hash_bits(tensor)) == int(hash_bits(tensor.clone()))


def test_a_hash_tells_zeros_and_nans_apart_and_looks_at_values_only() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    # Both signs at once: their differences are 2^63 each, which would add up to nothing.
    assert int(hash_bits(zeros)) != int(hash_bits(zeros.copysign(torch.tensor([-1.0, -1.0, 1.0, 1.0]))))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert int(hash_bits(quiet)) != int(hash_bits(other))
    table = torch.arange(12.0).view(3, 4)
    assert int(hash_bits(table.t())) == int(hash_bits(table.t().contiguous()))
    assert int(hash_bits(table.view(-1)[1:5])) == int(hash_bits(torch.arange(1.0, 5.0)))
    assert int(hash_bits(torch.empty(0))) == 0
