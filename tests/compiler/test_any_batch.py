"""Batches of any size over ranks that hold unequal numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, Predict, compilations_of, set_stage, sliced, sum_of_squares
from tests.models import MODELS, TrainStep, adam_step, adamw, make, train_plainly, update_by
from tests.pool import Pool

# Rows of each rank in each step; the first two are equal, as in the steps before the last of an epoch.
ROWS = {
    1: [(3,), (3,), (4,), (2,), (5,)],
    2: [(3, 3), (3, 3), (2, 4), (0, 5), (4, 0), (1, 1), (5, 2)],
    3: [(2, 2, 2), (3, 0, 4), (0, 0, 3), (1, 4, 2)],
}
LENGTHS = (12, 7, 9, 4, 11, 3, 8)


def data(name: str, spreads: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[tuple[Any, Tensor, Tensor]]:
    """Return the rows of each rank and the whole batch of each step."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for rows, length in zip(spreads, LENGTHS, strict=False):
        x, y = MODELS[name][1](generator, sum(rows), dtype)
        if name.startswith("gpt"):
            x, y = x[:, :length].contiguous(), y[:, :length].contiguous()
        steps.append((rows, x, y))
    return steps


def own(rows: tuple[int, ...], tensor: Tensor) -> Tensor:
    return tensor.split(list(rows))[zg.rank()]


def own_of_any_size(rows: tuple[int, ...], tensor: Tensor) -> Tensor:
    """Return this rank's rows, marked: the step is compiled for any number of them at once, and nothing else."""
    part = own(rows, tensor)
    zg.mark_dynamic(part, 0)
    return part


Trained = tuple[list[Tensor], dict[str, Tensor], int]


def trained(
    name: str,
    cases: Sequence[tuple[int, int]],
    dynamic: Any = "auto",
    rows: dict[int, list[tuple[int, ...]]] = ROWS,
) -> list[Trained]:
    """Train in fp64 on batches of all sizes; one graph, so captured once.

    Args:
        cases: ZeRO stages and numbers of micro-batches.
        dynamic: ``True`` compiles for all sizes at once, ``"rows"`` for all numbers of rows, ``"auto"`` for the first
            sizes alone before that.

    Returns:
        For each: losses, parameters, and how many steps were compiled for it.
    """
    step = adam_step(name, dtype=torch.float64, dynamic_shapes="auto" if dynamic == "rows" else dynamic)
    take = own_of_any_size if dynamic == "rows" else own
    initial, results = step.state_dict(), []
    batches = data(name, rows[zg.world_size()], torch.float64)
    for stage, count in cases:
        before = compilations_of(step)
        set_stage(step, stage)
        step.config.gradient_accumulation_steps = count
        step.load_state_dict(initial)
        losses = [step(take(part, x), take(part, y)) for part, x, y in batches]
        results.append((losses, step.state_dict()["modules"]["model"], compilations_of(step) - before))
    return results


def as_one_device(name: str, spreads: Sequence[tuple[int, ...]], results: Sequence[Trained], most: int) -> None:
    """Check losses and parameters against plain PyTorch on whole batches, and the number of compilations."""
    model = make(name, torch.float64)
    expected = train_plainly(model, adamw(model), [(x, y) for _, x, y in data(name, spreads, torch.float64)])
    for losses, parameters, compilations in results:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(parameters, model.state_dict(), rtol=1e-6, atol=1e-8)
        assert compilations <= most


@sliced(
    "name, ranks, stage, dynamic",
    [("mlp", 1, 0, "auto"), ("mlp", 3, 1, "auto"), ("gpt_tied_of_one_block", 2, 3, True)],
    [("gpt_tied_of_one_block", 3, 3, True)],
)
def test_ragged_batches_train_as_one_device_on_the_concatenation(
    pool: Pool, name: str, ranks: int, stage: int, dynamic: Any
) -> None:
    results = [result for (result,) in pool.run(ranks, trained, name, [(stage, 1)], dynamic)]
    # One for the first sizes, one for each set of dimensions that became dynamic.
    as_one_device(name, ROWS[ranks], results, 1 if dynamic is True else 3)


@sliced(
    "name, dynamic, stages",
    [("conv", "rows", (0, 3))],
    [("conv", "rows", range(4)), ("gpt_of_one_block", True, range(4))],
)
def test_stages_train_as_one_device_and_agree_bitwise_on_ragged_batches(
    pool: Pool, name: str, dynamic: Any, stages: Sequence[int]
) -> None:
    for first, *others in pool.run(2, trained, name, [(stage, 1) for stage in stages], dynamic):
        as_one_device(name, ROWS[2], [first, *others], 1)
        for other in others:
            torch.testing.assert_close(other[:2], first[:2], rtol=0, atol=0)


def test_a_size_that_build_returns_is_that_of_the_call() -> None:
    step = Predict(nn.Linear(3, 2), lambda model, x: (model(x), x.shape[0], {"half": x.shape[0] / 2}))
    for rows in (4, 5, 7, 5):
        _, count, others = step(torch.randn(rows, 3))
        assert (type(count), count, others) == (int, rows, {"half": rows / 2})
    assert compilations_of(step) == 2


def rows_come_back() -> list[Tensor]:
    torch.manual_seed(3)
    step = Predict(nn.Linear(3, 2), lambda model, x: (model(x), x.sum(), x @ x.t()))
    outputs = []
    for rows in ROWS[zg.world_size()]:
        x = torch.arange(3.0 * sum(rows)).view(-1, 3) / 10
        outputs += [*step(own(rows, x)), own(rows, step.model(x).detach()), x.sum(), own(rows, x @ x.t())]
    return outputs


@pytest.mark.parametrize("ranks", [2, 3])
def test_split_outputs_are_the_ranks_own_rows_and_others_of_the_whole_batch(pool: Pool, ranks: int) -> None:
    for outputs in pool.run(ranks, rows_come_back):
        for at in range(0, len(outputs), 6):
            torch.testing.assert_close(outputs[at : at + 3], outputs[at + 3 : at + 6])


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """All pairs of samples of the whole batch."""
    a, b = F.normalize(model(x)), F.normalize(model(y))
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(a.shape[0]))


def pairs_trained(stage: int, train: Callable[..., Any] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), stage, contrastive)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    differences = []
    for rows in [(3, 3), (2, 5), (0, 4), (6, 1)]:
        x, y = torch.randn(2, sum(rows), 6, dtype=torch.float64)
        loss = update_by(optimizer, contrastive(plain, x, y))
        differences.append((step(own(rows, x), own(rows, y)) - loss).abs())
    return differences


@sliced("stage", [3], [0])
def test_a_loss_between_all_samples_gathers_unequal_parts(pool: Pool, stage: int) -> None:
    for differences in pool.run(2, pairs_trained, stage):
        assert max(differences) < 1e-12


def squeezed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze().square().sum()


def branching(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() if x.shape[0] == 1 else model(x).square().sum()


def batch_normed(model: nn.Module, x: Tensor) -> Tensor:
    return F.batch_norm(model(x), None, None, training=True).square().sum()


def one_row_in_all(loss: Callable[..., Tensor]) -> tuple[list[str], list[Tensor]]:
    """Return the messages, and the differences from plain PyTorch, of calls of which two have one row."""
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, loss)
    messages, differences = [], []
    for rows in [(0, 1), (2, 3), (1, 0), (3, 1)]:
        x = torch.randn(sum(rows), 3)
        try:
            differences.append((step(own(rows, x)) - loss(plain, x)).abs().detach())
        except zg.InputError as error:
            messages.append(str(error))
    return messages, differences


@sliced("loss", [branching, batch_normed], [squeezed])
def test_one_row_over_several_ranks_is_refused_where_it_is_something_else(
    pool: Pool, loss: Callable[..., Tensor]
) -> None:
    for messages, differences in pool.run(2, one_row_in_all, loss):
        assert len(messages) == 2
        assert all("the whole batch has one row" in message and loss.__name__ not in message for message in messages)
        assert all("test_any_batch.py" in message for message in messages)
        assert len(differences) == 2
        assert max(differences) < 1e-5


def test_one_row_over_several_ranks_trains_where_it_is_nothing_else(pool: Pool) -> None:
    for messages, differences in pool.run(2, one_row_in_all, sum_of_squares):
        assert not messages
        assert max(differences) < 1e-5


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, indices: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.bag(indices, offsets)), targets)


def bags_of_any_size(of_part: bool, grid: list[list[int]] | None) -> list[Tensor]:
    """Return the differences from plain PyTorch; offsets count in a rank's own part, or in the whole batch.

    Ranks of a row of the grid have the same part.
    """
    torch.manual_seed(0)
    model, plain = Bags().double(), Bags().double()
    plain.load_state_dict(model.state_dict())
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), 2)
    number = zg.rank()
    if grid is not None:
        step.config.mesh.placement = zg.placement("cpu", ranks=grid)
        step.config.mesh.input_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
        number //= len(grid[0])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    differences = []
    # The sizes of the bags of each part.
    for sizes in [([2, 3], [1, 4]), ([2, 2, 1], [3]), ([], [4, 1]), ([5], []), ([1, 2], [3, 0, 1])]:
        lengths = torch.tensor([size for part in sizes for size in part])
        indices, targets = torch.randint(11, (int(lengths.sum()),)), torch.randint(3, (len(lengths),))
        offsets = lengths.cumsum(0) - lengths
        loss = update_by(optimizer, plain(indices, offsets, targets))
        bags, rows = (tuple(map(count, sizes)) for count in (len, sum))
        mine = offsets.split(bags)[number] - (sum(rows[:number]) if of_part else 0)
        differences.append((step(indices.split(rows)[number], mine, targets.split(bags)[number]) - loss).abs())
    return differences


@pytest.mark.parametrize(("of_part", "grid"), [(True, None), (False, None), (True, [[0, 1], [2, 3]])])
@pytest.mark.filterwarnings("ignore:no rule says how aten._embedding_bag")
def test_bags_of_unequal_parts_are_those_of_the_whole_batch(
    pool: Pool, of_part: bool, grid: list[list[int]] | None
) -> None:
    for differences in pool.run(2 if grid is None else 4, bags_of_any_size, of_part, grid):
        assert max(differences) < 1e-12


def picked(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    return (model(x)[positions] * (1 + torch.arange(positions.shape[0]))[:, None]).sum()


def positions_of_any_size() -> list[Tensor]:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, picked)
    differences = []
    for rows in [(3, 1), (0, 4), (7, 9)]:
        x, positions = torch.randn(sum(rows), 3), torch.randperm(sum(rows))
        differences.append((step(own(rows, x), own(rows, positions)) - picked(plain, x, positions)).abs().detach())
    return differences


def test_positions_of_a_small_ragged_batch_are_not_taken_for_those_of_a_part(pool: Pool) -> None:
    """The step is traced for more rows than there are."""
    for differences in pool.run(2, positions_of_any_size):
        assert max(differences) < 1e-3


def ignoring(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().sum()


def unused_input() -> list[Tensor]:
    """Return the losses of steps that do not read one of their inputs."""
    model = nn.Linear(3, 2)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, ignoring)
    x = torch.ones(2, 3)
    return [step(own(rows, x[: sum(rows)]), own(rows, x[: sum(rows)])) for rows in [(1, 1), (0, 1), (2, 0)]]


def test_a_rank_without_rows_of_an_input_that_build_does_not_read_runs(pool: Pool) -> None:
    for losses in pool.run(2, unused_input):
        torch.testing.assert_close(losses, [losses[0], losses[0] / 2, losses[0]])


def dropped(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(model(x), 0.5, training=True).square().sum()


def masks() -> list[list[Tensor]]:
    """Losses of the same batches, cut unequally and as one rank has them (a grid of one rank is not to be had here)."""
    losses = []
    for cuts in ([(3, 3), (2, 5), (6, 1)], [(3, 3), (7, 0), (0, 7)]):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, dropped, seed=7)
        torch.manual_seed(5)
        losses.append([step(own(rows, torch.randn(sum(rows), 4, dtype=torch.float64))) for rows in cuts])
    return losses


def test_random_draws_do_not_depend_on_how_rows_are_spread(pool: Pool) -> None:
    for uneven, other in pool.run(2, masks):
        torch.testing.assert_close(uneven, other, rtol=1e-12, atol=1e-12)


def refusals() -> list[str]:
    """Return the messages of calls that all ranks refuse, and train on afterwards."""
    model, rank = make("mlp"), zg.rank()
    messages = []

    def refused(*batch: Tensor) -> None:
        with pytest.raises((zg.InputError, zg.RankMismatchError)) as caught:
            step(*batch)
        messages.append(str(caught.value))

    step = TrainStep(model, adamw(model), 2)
    targets = torch.zeros(3, dtype=torch.long)
    step(torch.ones(3, 7), targets)
    refused(torch.ones(3, 7, dtype=(torch.float32, torch.float64)[rank]), targets)
    refused(torch.ones((3, 7), dtype=torch.float32) if rank else torch.ones(2, 3, 7), targets)
    refused(torch.ones(0, 7), targets[:0])
    refused(torch.ones(3, 7 + rank), targets)
    refused(torch.ones(3, 0), targets)
    marked = torch.ones(3, 7)
    zg.mark_dynamic(marked, 0, max=2)
    refused(marked, targets)
    refused(zg.replicated(marked), targets)
    step(torch.ones(1 + rank, 7), targets[: 1 + rank])
    return messages


def test_what_makes_no_batch_is_refused_on_all_ranks_before_anything_changes(pool: Pool) -> None:
    for dtypes, dims, nothing, widths, empty, limit, whole in pool.run(2, refusals):
        assert "first in input args[0]" in dtypes
        assert "rank 0: 2 dimensions, torch.float32, S(0), of shape (3, 7)" in dtypes
        assert "rank 1: 2 dimensions, torch.float64, S(0), of shape (3, 7)" in dtypes
        assert "rank 0: 3 dimensions, torch.float32, S(0), of shape (2, 3, 7)" in dims
        assert "has no rows on any rank" in nothing
        assert "has shape (3, 7) on rank 0 and (3, 8) on rank 1" in widths
        assert "These inputs have no elements:\n  args[0]: (6, 0)" in empty
        assert "args[0] has size 3 in dimension 0 on rank 0, outside of the limits" in limit
        assert "args[0] is replicated, and dimension 0 of it is marked as dynamic" in whole
