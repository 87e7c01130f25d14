"""With ``config.virtual_ranks`` the bits of a loop do not depend on the number of ranks, at any stage.

Losses, norms, parameters, buffers and the optimizer's state are compared. The last batch of each pass has a number of
rows that the slices do not divide, which every rank computes whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zerograph as zg
from tests.equivalence import test_virtual_ranks as of_virtual_ranks
from tests.equivalence.test_virtual_ranks import Recurrent, Run, assert_equal, dropout, fused, masked_loss, mean_loss
from tests.harness import are_graphs, sliced
from tests.models import MODELS, adamw, batches, part
from tests.pool import Pool, RanksError
from zerograph.runtime.state import text_of

SLICES, BATCH = 4, 8


def text(x: Tensor) -> str:
    return text_of(x.full_tensor() if isinstance(x, zg.GlobalTensor) else x.detach())


def noisy_median_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Draws in the loop, writes to rows in place, reads a value, and sorts."""
    result = model(x)
    result = result + torch.randn_like(result) * 0.1
    weights = torch.ones_like(result[:, 0])
    weights[y > 0] = 0.5
    losses = F.cross_entropy(result, y, reduction="none") * weights
    return losses.mean() + losses.sort().values[: len(x) // 2].sum() * losses.max().item()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("mlp", {"model": dropout}),
    "batch norm": ("conv", {}),
    "perceptron": ("mlp", {}),
    "GPT": ("gpt_tied_of_one_block", {}),
    "GPT in bf16": ("gpt_of_one_block", {"amp_dtype": torch.bfloat16}),
    "recurrent": ("mlp", {"model": Recurrent}),
    "weighted mean": ("mlp", {"loss": masked_loss}),
    # Computes with whole tensors between the call of the model and backward.
    "all pairs": ("mlp", {"loss": of_virtual_ranks.loss_of_pairs}),
    "operators of the loop": ("mlp", {"loss": noisy_median_loss}),
    "fused AdamW": ("mlp", {"optimizer": fused}),
    "accumulation": ("mlp", {"accumulation": 2}),
    "small buckets": ("gpt_of_one_block", {"bucket_size": 2**12}),
    "Inductor": ("conv", {"backend": "inductor"}),
}


def prepared(
    data: str, slices: int, stage: int, options: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    of_config = {name: options[name] for name in options.keys() & {"amp_dtype", "backend", "bucket_size"}}
    config = zg.Config(virtual_ranks=slices, **of_config)
    model = options.get("model", MODELS[data][0])()
    samples = TensorDataset(*map(torch.cat, zip(*batches(data, 3, BATCH), strict=True)))
    loader = DataLoader(torch.utils.data.Subset(samples, range(2 * BATCH + 5)), BATCH)
    return zg.prepare(model, options.get("optimizer", adamw)(model), loader, stage=stage, config=config)


def trained(data: str, slices: int, stages: tuple[int, ...], options: dict[str, Any]) -> list[Run]:
    runs: list[Run] = []
    for stage in stages:
        model, optimizer, loader = prepared(data, slices, stage, options)
        loss_of: Callable[..., Tensor] = options.get("loss", mean_loss)
        run, number = {}, 0
        for _ in range(2):
            for batch in loader:
                number += 1
                loss = loss_of(model, *batch) / options.get("accumulation", 1)
                loss.backward()
                run[f"loss {number}"] = text(loss)
                if number % options.get("accumulation", 1) == 0:
                    run[f"norm {number}"] = text(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                    optimizer.step()
                    optimizer.zero_grad()
        for name, state in optimizer.state_dict()["state"].items():
            run |= {f"state {name} {key}": text_of(torch.as_tensor(value)) for key, value in state.items()}
        with zg.full_parameters(model):
            runs.append(run | {name: text_of(value) for name, value in model.state_dict().items()})
    return runs


@sliced("name", ["dropout"], CASES)
def test_loops_on_any_number_of_ranks_have_the_same_bits(pool: Pool, name: str) -> None:
    data, options = CASES[name]
    (wanted,) = trained(data, SLICES, (0,), options)
    # On three ranks the first has two slices, and the others one.
    every = ((1, (2, 3)), (2, (0, 1, 2, 3)), (3, (0, 2, 3)), (4, (0, 3)))
    stages = ((2, (2,)), (3, (3,))) if name == "dropout" else every
    for ranks, of_ranks in stages:
        for rank, runs in enumerate(pool.run(ranks, trained, data, SLICES, of_ranks, options)):
            for stage, run in zip(of_ranks, runs, strict=True):
                assert_equal(run, wanted, f"stage {stage}, rank {rank} of {ranks}")


def calls_are_graphs(slices: int) -> bool:
    model, optimizer, loader = prepared("mlp", slices, 2, {})
    for _ in range(2):
        for batch in loader:
            mean_loss(model, *batch).backward()
            optimizer.step()
    return all(are_graphs(model))


def test_calls_are_graphs_whether_a_rank_has_one_slice_or_several(pool: Pool) -> None:
    assert calls_are_graphs(4)
    assert pool.run(2, calls_are_graphs, 2) == [True, True]


def rows(data: Tensor) -> zg.GlobalTensor:
    return zg.global_tensor(part(data), zg.sbp.split(0))


def compare_rows_of_unequal_slices() -> None:
    """Compare results of operators on rows with those on whole tensors, where ranks have unequal numbers of slices."""
    zg.prepare(model := nn.Linear(7, 3), adamw(model), config=zg.Config(virtual_ranks=4))
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    own = [whole[:4], whole[4:6], whole[6:]][zg.rank()].clone().requires_grad_()
    x = zg.global_tensor(own, zg.sbp.split(0))
    again = x.to_global(zg.sbp.broadcast).to_global(zg.sbp.split(0))
    tripled = zg.global_tensor(again.to_local() * 3, zg.sbp.split(0))
    (x * tripled * torch.arange(8.0)[:, None]).sum().backward()
    assert own.grad is not None
    plain = whole.clone().requires_grad_()
    (plain * plain * 3 * torch.arange(8.0)[:, None]).sum().backward()
    assert plain.grad is not None
    written = x.detach().clone()
    written[3:6] *= 2
    doubled = whole.clone()
    doubled[3:6] *= 2
    pairs = [
        (x.to_local(), own),
        (again.to_local(), own),
        (own.grad, [plain.grad[:4], plain.grad[4:6], plain.grad[6:]][zg.rank()]),
        (x[2:5], whole[2:5]),
        (x.sort(0).values, whole.sort(0).values),
        (torch.cat([x, x.flip(0)]), torch.cat([whole, whole.flip(0)])),
        (x.T @ x, whole.T @ whole),
        (x.reshape(4, 12)[:, 3], whole.reshape(4, 12)[:, 3]),
        (x.softmax(0).cumsum(0), whole.softmax(0).cumsum(0)),
        (written, doubled),
    ]
    with pytest.raises(zg.PlacementError, match="no DTensor has"):
        x.to_dtensor()
    for one, expected in pairs:
        torch.testing.assert_close(one.full_tensor() if isinstance(one, zg.GlobalTensor) else one, expected)


def test_operators_on_rows_of_unequal_slices_are_those_of_the_whole_batch(pool: Pool) -> None:
    pool.run(3, compare_rows_of_unequal_slices)


def linear(virtual_ranks: int = 4, **options: Any) -> nn.Module:
    model = nn.Linear(7, 3)
    config = zg.Config(virtual_ranks=virtual_ranks, **options)
    prepared: nn.Module = zg.prepare(model, adamw(model), config=config)[0]
    return prepared


def with_plain_labels() -> None:
    x, y = batches("mlp", 1, 8)[0]
    F.cross_entropy(linear()(part(x)), part(y))


def with_few_rows() -> None:
    linear()
    rows(torch.ones(6, 7))


def with_partial_sums() -> None:
    linear()
    zg.global_tensor(torch.ones(3), zg.sbp.partial_sum)


def with_another_number() -> None:
    first, _ = linear(), linear(2)
    first(rows(torch.ones(8, 7)))


def with_fewer_slices_than_ranks() -> None:
    linear(1)


def with_a_compiler() -> None:
    linear(backend="cudagraph")


def with_rows_of_unequal_numbers() -> None:
    linear()(torch.ones(3 + 2 * zg.rank(), 7))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_plain_labels, "with config.virtual_ranks pass the loader"),
        (with_few_rows, "size 6 cannot be split into config.virtual_ranks = 4"),
        (with_partial_sums, "partial sums of ranks depend on the number of ranks"),
        (with_another_number, "this loop has config.virtual_ranks = 4"),
        (with_fewer_slices_than_ranks, "on 2 ranks: every rank must have a slice"),
        (with_a_compiler, "config.backend = 'eager'"),
        (with_rows_of_unequal_numbers, "ranks pass 3, 5 rows"),
    ],
)
def test_what_would_depend_on_the_number_of_ranks_is_refused(
    pool: Pool, function: Callable[[], None], message: str
) -> None:
    with pytest.raises(RanksError, match=message):
        pool.run(2, function)
