"""N ranks compute, bit by bit, what plain PyTorch computes with coded parameters and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, set_stage, sliced, sum_of_squares
from tests.models import mlp, part
from tests.pool import Pool
from tests.runtime.test_across_hosts import on_host

STEPS, SAMPLES = 3, 12
BOTH: tuple[Any, ...] = ("bf16", "int8", "int4")


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, 7, generator=generator) for _ in range(STEPS)]


def exact(x: Tensor) -> Tensor:
    return x


def rounded(x: Tensor, code: str) -> Tensor:
    """The values that a code keeps of one parameter, from the definition of the formats."""
    if code == "bf16":
        return x.bfloat16().float()
    limit, scales = {"int8": (127, torch.float32), "int4": (7, torch.bfloat16)}[code]
    blocks = nn.functional.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
    scale = (blocks.abs().amax(1, keepdim=True) / limit).to(scales).float()
    integers = torch.where(scale > 0, blocks * (1 / scale), 0).round().clamp(-limit, limit)
    return (integers * scale).flatten()[: x.numel()].view(x.shape)


def train_plainly(ranks: int, gather: str, reduce: str, hosts: int = 1, inside: str | None = None) -> dict[str, Tensor]:
    """Train on one device: weights are coded for forward, and each rank's gradient is coded before the sum.

    With several ``hosts`` the sums of each host's ranks are coded and summed once more; ``inside`` of a host gradients
    may have another code.
    """
    masters, copy = model(), model()
    update = optimizer(masters)

    def summed(parts: list[Tensor], code: str) -> Tensor:
        total = torch.zeros_like(parts[0])
        for one in parts:
            total += one if code == "exact" else rounded(one, code)
        return total

    for x in inputs():
        for weight, master in zip(copy.parameters(), masters.parameters(), strict=True):
            weight.data = master.detach() if gather == "exact" else rounded(master.detach(), gather)
        gradients = []
        for own in x.chunk(ranks):
            copy.zero_grad()
            sum_of_squares(copy, own).backward()
            gradients.append([weight.grad for weight in copy.parameters() if weight.grad is not None])
        for master, parts in zip(masters.parameters(), zip(*gradients, strict=True), strict=True):
            each = ranks // hosts
            sums = [summed(list(parts[first : first + each]), inside or reduce) for first in range(0, ranks, each)]
            master.grad = sums[0] if hosts == 1 else summed(sums, reduce)
        update.step()
    return {name: value.clone() for name, value in masters.state_dict().items()}


def train(stages: list[int], formats: list[Any], **options: Any) -> list[dict[str, Tensor]]:
    """Return the parameters after training at each stage with each format, in order."""
    results = []
    module = model()
    step = LossStep(module, optimizer(module), loss=sum_of_squares, **options)
    initial = step.state_dict()
    for stage in stages:
        set_stage(step, stage)
        for wire in formats:
            step.config.precision.wire = wire
            step.load_state_dict(initial)
            for x in inputs():
                step(part(x))
            results.append(step.state_dict()["modules"]["model"])
    return results


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs by {(actual[name] - value).abs().max():.3g}"


@sliced(
    "code, stages",
    [("int8", [0, 1, 2, 3]), ("bf16", [2]), ("int4", [3])],
    [("bf16", [0, 1, 3]), ("int4", [0, 1, 2])],
)
def test_coded_gradients_are_summed_in_fp32_at_every_stage(pool: Pool, code: Any, stages: list[int]) -> None:
    for result in pool.run(2, train, stages, [{"reduce": code}])[0]:
        assert_equal(result, train_plainly(2, "exact", code))


@sliced(
    "code, stages",
    [("int8", [1, 2, 3]), ("bf16", [3]), ("int4", [2])],
    [("bf16", [1, 2]), ("int4", [1, 3])],
)
def test_gathered_weights_are_the_coded_ones_at_every_stage(pool: Pool, code: Any, stages: list[int]) -> None:
    for result in pool.run(2, train, stages, [code])[0]:
        assert_equal(result, train_plainly(2, code, code))


@pytest.mark.long
def test_three_ranks_and_a_grid_of_hosts_compute_what_plain_pytorch_does(pool: Pool) -> None:
    for index, result in enumerate(pool.run(3, train, [0, 3], [{"reduce": code} for code in BOTH])[0]):
        assert_equal(result, train_plainly(3, "exact", BOTH[index % len(BOTH)]))
    # On the grid an all-reduce along the first dimension follows the reduce-scatter along the last.
    for index, result in enumerate(pool.run(4, on_a_grid, [2, 3])[0]):
        assert_equal(result, train_plainly(4, "exact", BOTH[index % len(BOTH)], hosts=2))


@pytest.mark.long
def test_two_hosts_code_the_sums_of_their_ranks(pool: Pool) -> None:
    for index, result in enumerate(pool.run(4, on_hosts, [0, 2, 3])[0]):
        assert_equal(result, train_plainly(4, "exact", BOTH[index % len(BOTH)], hosts=2, inside="exact"))


def on_hosts(stages: list[int]) -> list[dict[str, Tensor]]:
    with on_host("aabb"):
        return train(stages, [{"reduce": code} for code in BOTH])


def on_a_grid(stages: list[int]) -> list[dict[str, Tensor]]:
    return train(stages, [{"reduce": code} for code in BOTH], placement=zg.placement("cpu", ranks=[[0, 1], [2, 3]]))
