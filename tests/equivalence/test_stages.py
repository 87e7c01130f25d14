"""The stages agree with each other bitwise, and N ranks compute what one device computes on the whole batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import LossStep, PlainRun, deviation, each_stage, joined, plain_run, sliced, sum_of_squares
from tests.models import TrainStep, adam_step, batches, part, train_on, train_plainly
from tests.pool import Pool

STEPS = 10
ALL = (0, 1, 2, 3)


def train(name: str, stages: Sequence[int], dtype: torch.dtype, size: int, options: dict[str, Any]) -> list[Any]:
    """Losses and the final state of the model, for each stage: run on every rank. One graph, so captured once."""
    step = adam_step(name, dtype=dtype, **options)
    return [train_on(step, batches(name, STEPS, size, dtype)) for _ in each_stage(step, stages)]


@functools.cache
def trained(pool: Pool, name: str, stages: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return what each of two ranks returns."""
    return pool.run(2, train, name, stages, dtype, 8, {})


def check(result: tuple[list[Tensor], dict[str, Tensor]], plain: PlainRun, tolerance: float) -> None:
    """Every loss, and all parameters and buffers together, within ``tolerance``.

    Not element by element: Adam's first steps have the size of the learning rate whatever the gradient's, so where a
    gradient cancels to nearly nothing its rounding decides. Plain PyTorch on the same batch in another order
    differs in such elements by as much; fp64 decides.
    """
    losses, state = result
    assert max(map(deviation, losses, plain.losses)) <= tolerance
    assert state.keys() == plain.state.keys()
    assert deviation(joined(state), joined(plain.state)) <= tolerance


# Two blocks: GPT-2 in test_families.
@sliced(
    "name, stages, dtype, tolerance",
    [
        ("mlp", ALL, torch.float32, 1e-6),
        ("conv", (0, 3), torch.float32, 1e-6),
        ("gpt_tied_of_one_block", (0, 3), torch.float32, 1e-6),
        # That the stages agree bitwise does not depend on the dtype.
        ("gpt_of_one_block", (3,), torch.float64, 1e-12),
    ],
    [
        ("gpt", ALL, torch.float32, 1e-6),
        ("conv", ALL, torch.float32, 1e-6),
        ("conv", (0, 3), torch.float64, 1e-12),
        ("gpt_of_one_block", (0, 3), torch.float64, 1e-12),
    ],
)
def test_two_ranks_compute_what_one_device_computes(
    pool: Pool, name: str, stages: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    results, others = trained(pool, name, stages, dtype)
    for index, (stage, (losses, state)) in enumerate(zip(stages, results, strict=True)):
        assert all(map(torch.equal, losses, results[0][0])), (
            f"the losses of stage {stage} are not those of data parallel"
        )
        for key, value in state.items():
            assert torch.equal(value, results[0][1][key]), f"stage {stage} has another {key} than data parallel"
        assert all(map(torch.equal, losses, others[index][0])), f"ranks got different losses at stage {stage}"
    plain = plain_run(name, STEPS, 8, dtype)
    check(results[0], plain, tolerance)
    if dtype == torch.float64:
        for key, value in plain.state.items():
            assert deviation(results[0][1][key], value) <= tolerance, key


@sliced("name, stages", [("mlp", [0, 3])], [("mlp", [0, 1, 2, 3]), ("gpt_tied", [3])])
def test_four_ranks_compute_what_one_device_computes(pool: Pool, name: str, stages: list[int]) -> None:
    results = pool.run(4, train, name, stages, torch.float32, 12, {})
    for result in results[0]:
        check(result, plain_run(name, STEPS, 12), 1e-6)


@torch.library.custom_op("zerograph_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator that has no rule."""
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: doubled(gradient))


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


def train_around_a_missing_rule(stages: list[int]) -> list[list[Tensor]]:
    found = []
    for stage in stages:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 15), Doubled(), torch.nn.Linear(15, 3))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.3), stage)
        with warnings.catch_warnings(action="ignore"):
            found.append([step(part(x), part(y)) for x, y in batches("mlp", 3)])
    return found


def test_whole_and_partial_gradients_share_a_bucket(pool: Pool) -> None:
    """Behind an operator without a rule all is whole, and so are some gradients of a bucket, but not all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 15), Doubled(), torch.nn.Linear(15, 3))
    wanted = train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.3), batches("mlp", 3))
    for losses in pool.run(2, train_around_a_missing_rule, [0, 2])[0]:
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0)


def train_fused(stages: list[int]) -> list[list[Tensor]]:
    """Return the parameters after some steps, for each stage; 42 elements are no whole vectors on either rank."""
    results = []
    for stage in stages:
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = LossStep(model, optimizer, stage, sum_of_squares)
        for x in torch.randn(200, 4, 5) * 0.02:
            step(part(x))
        results.append(list(step.state_dict()["modules"]["model"].values()))
    return results


def test_stages_agree_bitwise_where_a_fused_kernel_ends_within_a_vector(pool: Pool) -> None:
    off, split = pool.run(2, train_fused, [0, 3])[0]
    assert all(map(torch.equal, off, split))
