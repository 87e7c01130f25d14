"""Steps that are almost only host work, through ``zg.prepare`` beside plain PyTorch and FSDP2; and single operators."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zerograph as zg
from benchmarks.measure.job import seconds
from tests.pool import Pool

STEPS_HEADER = ["ranks", "stage", "beside", "its step, ms", "zg.prepare, ms", "ratio", "goal"]
# Ranks, stage, and what runs beside. Stage 2 keeps whole parameters between forward and backward.
STEPS = [(1, 2, "plain PyTorch"), (2, 2, "FSDP2"), (2, 3, "FSDP2")]
OPERATORS_HEADER = ["operator", "plain tensors, us", "DTensor, us", "global tensors, us"]
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "x + x": lambda x: x + x,
    "x * 2": lambda x: x * 2,
    "relu": torch.relu,
    "softmax(1)": lambda x: x.softmax(1),
    "sum(1)": lambda x: x.sum(1),
    "products of columns": lambda x: x.unsqueeze(2) * x.unsqueeze(1),
    "view": lambda x: x.view(-1, 4, 4),
    "sum": lambda x: x.sum(),
}
CALLS, STEPS_AT_ONCE = 200, 10


def compare(rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return rows of cells about steps, and about operators."""
    pool = Pool(hash_apart=False, patience=1200.0)
    try:
        steps = []
        for ranks, stage, beside in STEPS:
            first, second, ratio = pool.run(ranks, _step_times, stage, beside, rounds)[0]
            goal = "1.5" if ranks == 1 else "1"
            steps.append(
                [str(ranks), str(stage), beside, f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{ratio:.2f}", goal]
            )
        times = pool.run(2, _operator_times, rounds)[0]
    finally:
        pool.close()
    return steps, [[name, *(f"{value * 1e6:.1f}" for value in row)] for name, row in zip(OPERATORS, times, strict=True)]


def _perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _loop(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_times(stage: int, beside: str, rounds: int) -> tuple[float, float, float]:
    """Return the median seconds of either step, and the median ratio."""
    warnings.simplefilter("ignore")
    other, ours = _perceptron(), _perceptron()
    if beside == "FSDP2":
        fully_shard(other, mesh=init_device_mesh("cpu", (zg.world_size(),)), reshard_after_forward=stage == 3)
    config = zg.Config(backend="eager")
    prepared = zg.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3), stage=stage, config=config)
    loops = _loop(other, torch.optim.AdamW(other.parameters(), lr=1e-3)), _loop(*prepared)
    pairs = []
    for number in range(rounds + 2):
        first, second = (seconds(functools.partial(_several, one)) / STEPS_AT_ONCE for one in loops)
        if number >= 2:
            pairs.append((first, second))
    first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first, second, statistics.median(two / one for one, two in pairs)


def _several(step: Callable[[], None]) -> None:
    """Run several steps: the barriers around them take as long as one."""
    for _ in range(STEPS_AT_ONCE):
        step()


def _operator_times(rounds: int) -> list[list[float]]:
    """Return the median seconds of a call of each operator, on plain, distributed and global tensors."""
    plain = torch.randn(8, 16)
    distributed = distribute_tensor(plain, init_device_mesh("cpu", (zg.world_size(),)), [Shard(0)])
    tensors = plain, distributed, zg.global_tensor(plain.chunk(zg.world_size())[zg.rank()], zg.sbp.split(0))
    rows = []
    for operator in OPERATORS.values():
        for tensor in tensors:
            operator(tensor)
        times = [[_per_call(operator, tensor) for tensor in tensors] for _ in range(rounds)]
        rows.append([statistics.median(column) for column in zip(*times, strict=True)])
    return rows


def _per_call(operator: Callable[[Tensor], Tensor], tensor: Tensor) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        operator(tensor)
    return (time.perf_counter() - began) / CALLS
