"""Micro-batches of unequal size: parts that the number of micro-batches does not divide, unequal on ranks, or empty."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.compiler.test_any_batch import as_one_device, data, own_of_any_size, trained
from tests.equivalence.test_accumulation import Outputs
from tests.harness import LossStep, needs_compiler, sliced
from tests.models import TrainStep, adam_step, adamw, make, train_plainly, update_by
from tests.pool import Pool
from zerograph.runtime.backends import pieces

# Rows of each rank in each step: equal, not divisible, unequal, fewer than micro-batches, none.
ROWS = {
    1: [(4,), (4,), (5,), (3,), (7,), (1,), (2,)],
    2: [(4, 4), (3, 3), (2, 4), (0, 5), (4, 1), (1, 0), (7, 2)],
    3: [(3, 3, 3), (5, 0, 4), (0, 0, 1), (1, 4, 2)],
}


@sliced(
    "name, ranks, case, dynamic",
    [("mlp", 3, (2, 2), "auto")],
    [("gpt_of_one_block", 1, (0, 3), "auto"), ("gpt_of_one_block", 3, (3, 3), True)],
)
def test_unequal_micro_batches_train_as_one_device_on_the_whole(
    pool: Pool, name: str, ranks: int, case: tuple[int, int], dynamic: Any
) -> None:
    results = [result for (result,) in pool.run(ranks, trained, name, [case], dynamic, ROWS)]
    as_one_device(name, ROWS[ranks], results, 1 if dynamic is True else 3)


# Stages and micro-batches.
@sliced("cases", [((2, 2), (3, 2))], [((0, 3), (1, 3))])
def test_stages_train_as_one_device_and_agree_bitwise_as_they_do_on_equal_micro_batches(
    pool: Pool, cases: Sequence[tuple[int, int]]
) -> None:
    for one, other in pool.run(2, trained, "mlp", cases, True, ROWS):
        as_one_device("mlp", ROWS[2], [one, other], 1)
        torch.testing.assert_close(one[:2], other[:2], rtol=0, atol=0)


class Everything(nn.Module):
    """Convolutions after a batch norm of the inputs, dropout, noise and class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.first = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Linear(8, 5)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("positive", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.norm(self.first(self.inputs(x)))), 0.3, training=True).mean((2, 3))
        self.positive += (x > 0).sum()
        return self.last(hidden + 0.1 * torch.randn_like(hidden))


def images(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, 3, 6, 6, generator=generator).double(), torch.randint(5, (rows,), generator=generator)
    y[1:3] = -100
    return x, y


# The same numbers of rows in all, spread in several ways.
SPREADS = {1: [(9,), (7,), (8,)], 2: [(9, 0), (2, 5), (1, 7)], 4: [(3, 0, 5, 1), (0, 0, 7, 0), (2, 2, 1, 3)]}


Results = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


def everything(cases: Sequence[tuple[int, int]], grid: bool = False) -> list[Results]:
    """Train on batches of the same rows in all, however many ranks there are; one graph, so captured once.

    Args:
        cases: ZeRO stages and numbers of micro-batches.
        grid: the ranks are a grid, which splits rows along both dimensions.
    """
    torch.manual_seed(0)
    model = Everything().double()
    step, ranks = Outputs(model, adamw(model), seed=3), zg.world_size()
    if grid:
        step.config.mesh.placement = zg.placement("cpu", ranks=[[0, 1], [2, 3]])
    initial, found = step.state_dict(), []
    for stage, micro_batches in cases:
        step.config.zero.stage = stage
        step.config.gradient_accumulation_steps = micro_batches
        step.load_state_dict(initial)
        results = []
        for rows in SPREADS[ranks]:
            x, y = images(sum(rows))
            results.append(step(own_of_any_size(rows, x), own_of_any_size(rows, y)))
        found.append((results, step.state_dict()["modules"]["model"]))
    return found


@pytest.fixture(scope="module")
def whole() -> Results:
    """Results of one rank, which computes each batch at once."""
    return everything([(0, 1)])[0]


@sliced("ranks, cases, grid", [(2, [(1, 3)], False)], [(1, [(0, 2)], False), (4, [(3, 2)], True)])
def test_draws_counts_statistics_and_outputs_are_those_of_the_whole(
    pool: Pool, whole: Results, ranks: int, cases: list[tuple[int, int]], grid: bool
) -> None:
    """Whatever the ranks, the grid and the micro-batches; outputs are this rank's rows in order."""
    expected, state = whole
    of_ranks = [everything(cases)] if ranks == 1 else pool.run(ranks, everything, cases, grid)
    for found in zip(*of_ranks, strict=True):
        for outputs, parameters in found:
            torch.testing.assert_close(parameters, state, rtol=1e-9, atol=1e-11)
            for number, one in enumerate(expected):
                for name in ("loss", "norm", "right", "sq"):
                    torch.testing.assert_close(outputs[number][name], one[name], rtol=1e-11, atol=1e-11)
        for number, one in enumerate(expected):
            rows = [outputs[number]["logits"] for outputs, _ in found]
            assert tuple(map(len, rows)) == SPREADS[ranks][number]
            torch.testing.assert_close(torch.cat(rows), one["logits"], rtol=1e-10, atol=1e-11)


PAIRS = [(4, 4), (3, 5), (0, 3), (2, 1)]


def pairs() -> tuple[list[Tensor], str]:
    """Train on a grid whose first dimension splits the batch, and whose second one splits a layer."""
    model = make("gpt_of_one_block", torch.float64)
    zg.annotate(model.blocks[0].up.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))
    zg.annotate(model.blocks[0].up.bias, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))
    step = TrainStep(model, adamw(model), 2, gradient_accumulation_steps=2, dynamic_shapes=True)
    step.config.mesh.placement = zg.placement("cpu", ranks=[[0, 1], [2, 3]])
    step.config.mesh.input_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
    place = zg.rank() // 2
    batches = data("gpt_of_one_block", PAIRS, torch.float64)
    losses = [step(x.split(list(rows))[place], y.split(list(rows))[place]) for rows, x, y in batches]
    _, x, y = batches[0]
    with pytest.raises(zg.InputError) as raised:
        step(x[: zg.rank() + 1], y[: zg.rank() + 1])
    return losses, str(raised.value)


@pytest.mark.long
def test_a_grid_that_splits_layers_too_has_equal_rows_where_ranks_hold_the_same_part(pool: Pool) -> None:
    model = make("gpt_of_one_block", torch.float64)
    batches = [(x, y) for _, x, y in data("gpt_of_one_block", PAIRS, torch.float64)]
    expected = train_plainly(model, adamw(model), batches)
    for losses, message in pool.run(4, pairs):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        assert "args[0] has 1 rows on rank 0 and 2 on rank 1" in message


def masked(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return (model(x).square().sum(-1) * mask).sum() / mask.sum()


def masked_losses(micro_batches: int, grid: bool) -> tuple[list[Tensor], set[str]]:
    """Return the differences of losses from plain PyTorch's, and the tensors that are gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = LossStep(model, optimizer, 2, masked, gradient_accumulation_steps=micro_batches)
    if grid:
        step.config.mesh.placement = zg.placement("cpu", ranks=[[0, 1]])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    differences = []
    for rows in [(3, 3), (2, 5), (0, 4), (1, 1)]:
        x, mask = torch.randn(sum(rows), 6, dtype=torch.float64), (torch.rand(sum(rows)) < 0.7).double()
        mask[0] = 1
        expected = update_by(optimizer, masked(plain, x, mask))
        differences.append((step(own_of_any_size(rows, x), own_of_any_size(rows, mask)) - expected).abs())
    gathers = [collective.tensors for collective in step.inspect.collectives() if collective.kind == "all-gather"]
    return differences, {name for names in gathers for name in names}


@sliced("micro_batches, grid", [(3, False), (2, True)], [(2, False)])
def test_a_masked_mean_divides_by_the_count_of_the_whole_batch(pool: Pool, micro_batches: int, grid: bool) -> None:
    for differences, gathered in pool.run(2, masked_losses, micro_batches, grid):
        assert max(differences) < 1e-12
        # No rows: a change of SBP along a mesh dimension of one rank moves nothing.
        assert gathered == {"model.0.weight", "model.0.bias"}


def packed(stage: int) -> list[Tensor]:
    step = adam_step("mlp", stage, dtype=torch.float64, gradient_accumulation_steps=2, accumulation_outputs="packed")
    return [
        step(own_of_any_size(rows, x), own_of_any_size(rows, y)) for rows, x, y in data("mlp", ROWS[2], torch.float64)
    ]


def test_packed_losses_have_an_entry_for_each_micro_batch_and_their_mean_is_that_of_the_whole(pool: Pool) -> None:
    model = make("mlp", torch.float64)
    expected = train_plainly(model, adamw(model), [(x, y) for _, x, y in data("mlp", ROWS[2], torch.float64)])
    for losses in pool.run(2, packed, 2):
        assert all(loss.shape == (2,) for loss in losses)
        torch.testing.assert_close([loss.mean() for loss in losses], expected, rtol=1e-10, atol=1e-10)


class Rows(LossStep):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def build(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = self.model(x)
        out.square().mean().backward()
        return out


@pytest.mark.filterwarnings("ignore:.*each size is compiled by itself")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulation_outputs": "packed"}, "config.accumulation_outputs = 'packed'"),
        ({"dynamic_shapes": False}, "dynamic_shapes is False"),
        ({"backend": lambda graph, inputs: graph.forward}, "config.backend is a function"),
    ],
)
def test_rows_that_do_not_divide_are_refused_where_sizes_are_static(options: dict[str, Any], words: str) -> None:
    model = nn.Linear(3, 2)
    step = Rows(model, gradient_accumulation_steps=2, **options)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(zg.InputError, match="does not divide the number of rows") as raised:
        step(torch.randn(5, 3))
    assert words in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(torch.randn(4, 3))
    assert step.steps_done == 1


@pytest.mark.filterwarnings("ignore:.*each size is compiled by itself")
@pytest.mark.parametrize(
    ("batch_norm", "words"), [("local", "'local' needs 2 parts"), ("global", "needs the whole batch")]
)
def test_batch_norm_behind_a_layer_is_refused_for_unequal_micro_batches(batch_norm: str, words: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    step = Rows(model, gradient_accumulation_steps=2, batch_norm=batch_norm)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(zg.InputError, match=words):
        step(torch.randn(5, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
@needs_compiler
def test_inductor_serves_unequal_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 0)
    batches = [(x, y) for _, x, y in data("mlp", [(4,), (5,), (3,), (1,)], torch.float64)]
    model, plain = make("mlp", torch.float64), make("mlp", torch.float64)
    step = TrainStep(model, adamw(model), gradient_accumulation_steps=2, backend="inductor", dynamic_shapes=True)
    losses = [step(x, y) for x, y in batches]
    torch.testing.assert_close(losses, train_plainly(plain, adamw(plain), batches), rtol=1e-10, atol=1e-10)


def test_a_number_that_is_not_finite_is_found_in_its_micro_batch() -> None:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    step = LossStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        0,
        lambda model, x: model(x).log().sum(),
        on_nonfinite="raise",
        gradient_accumulation_steps=2,
    )
    x = torch.ones(5, 3)
    step(x)
    x[4] = -9
    # The search may run more than once.
    for _ in range(2):
        with pytest.raises(zg.NonFiniteError, match=r"in micro-batch 2 of 2\n(.*\n)*.*aten\.log"):
            step(x)
