"""A table of which a batch reads little is never whole: indices and rows travel, and no number changes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.test_any_batch import own
from tests.harness import each_stage, prepare, sliced
from tests.models import TrainStep, part, update_by
from tests.passes.test_traffic import sent
from tests.pool import Pool
from zerograph import Collective
from zerograph.runtime.wire import collectives as wire, selection

ROWS, WIDTH, CLASSES = 2048, 16, 3
PADDING = 300
TABLE = 4 * ROWS * WIDTH


class Bag(nn.Module):
    """Looks tokens up, adds them up and classifies; ``tied`` reads the table a second time, whole."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.tokens(tokens).tanh().sum(1)
        return self.head(found) + ((found @ self.tokens.weight.t()).mean(1, keepdim=True) if self.tied else 0.0)


def make(tied: bool = False, dtype: torch.dtype = torch.float32) -> Bag:
    torch.manual_seed(0)
    return Bag(tied).to(dtype)


def batches(size: int, length: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Each with tokens of every rank's rows, twice the same one, and padding."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(ROWS, (size, length), generator=generator) for _ in range(3)]
    for tokens in made:
        tokens[:, 0], tokens[1, 1:] = 7, PADDING
    return [(tokens, torch.randint(CLASSES, (size,), generator=generator)) for tokens in made]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def step_of(model: nn.Module, stage: int) -> TrainStep:
    """With the table in a bucket of its own."""
    return TrainStep(model, adam(model), stage, bucket_size=TABLE)


def train(
    stages: list[int], tied: bool, size: int, dtype: torch.dtype = torch.float32, amp: torch.dtype | None = None
) -> list[dict[str, Tensor]]:
    """Return losses and the final parameters of each stage. One graph, so captured once."""
    step = step_of(make(tied, dtype), 0)
    step.config.precision.amp_dtype = amp
    found = []
    for _ in each_stage(step, stages):
        losses = torch.stack([step(part(x), part(y)) for x, y in batches(size)])
        found.append({"losses": losses, **step.state_dict()["modules"]["model"]})
    return found


def train_plainly(tied: bool, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = make(tied, dtype)
    update = adam(model)
    losses = [update_by(update, nn.functional.cross_entropy(model(x), y)) for x, y in batches(size)]
    return {"losses": torch.stack(losses), **model.state_dict()}


@sliced("ranks, stages", [(3, [3])], [(2, [0, 3]), (4, [0, 3])])
def test_lookups_in_pieces_train_as_one_device_does(pool: Pool, ranks: int, stages: list[int]) -> None:
    size = 9 if ranks == 3 else 8
    wanted = train_plainly(False, size, torch.float64)
    for found in pool.run(ranks, train, stages, False, size, torch.float64)[0]:
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@sliced(
    "tied, amp, stages",
    [(True, None, [0, 3]), (False, torch.bfloat16, [0, 2])],
    [(False, None, [0, 3]), (False, None, [0, 1])],
)
def test_lookups_in_pieces_change_no_bit(pool: Pool, tied: bool, amp: torch.dtype | None, stages: list[int]) -> None:
    """Tied, the table is gathered and its gradient reduced; untied, both are in pieces: each as the stages agree."""
    off, *others = pool.run(2, train, stages, tied, 8, torch.float32, amp)[0]
    assert all(torch.equal(other[name], value) for other in others for name, value in off.items())


ROWS_OF_RANKS = [(4, 4), (3, 5), (0, 8), (7, 2)]


def train_unequal(stage: int) -> tuple[list[Tensor], dict[str, Tensor], int, int]:
    """Return losses, parameters, and the bytes that an equal batch sends in a symbolic and in a static step."""
    exchanges = {"all-gather": wire.gather_pieces, "reduce-scatter": wire.exchange_pieces}
    with patch.object(selection, "select_exchanges", lambda job: exchanges):
        step = step_of(make(dtype=torch.float64), stage)
        losses = [step(own(rows, x), own(rows, y)) for rows, (x, y) in unequal_batches()]
        state = step.state_dict()["modules"]["model"]
        x, y = batches(8)[0]
        static = step_of(make(dtype=torch.float64), stage)
        static.config.dynamic_shapes = False
        static(part(x), part(y))
        bytes_sent = []
        for one in (step, static):
            with sent() as messages:
                one(part(x), part(y))
            bytes_sent.append(sum(messages))
    return losses, state, bytes_sent[0], bytes_sent[1]


def unequal_batches() -> list[tuple[tuple[int, int], tuple[Tensor, Tensor]]]:
    return [(rows, batches(sum(rows))[0]) for rows in ROWS_OF_RANKS]


def test_unequal_parts_look_rows_up_in_pieces_too(pool: Pool) -> None:
    model = make(dtype=torch.float64)
    update = adam(model)
    expected = [
        update_by(update, nn.functional.cross_entropy(model(batch[0]), batch[1])) for _, batch in unequal_batches()
    ]
    for losses, state, symbolic, static in pool.run_afresh(2, train_unequal, 2):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-10, atol=1e-10)
        assert symbolic == static
        # Less than half of the table.
        assert symbolic < ROWS * WIDTH * 8 / 2


def collectives(stage: int, tied: bool, length: int, amp: torch.dtype | None = None) -> list[Collective]:
    step = step_of(make(tied), stage)
    step.config.precision.amp_dtype = amp
    return prepare(step, *batches(8, length)[0]).collectives()


def moved(planned: list[Collective]) -> float:
    return sum(one.bytes for one in planned if "model.tokens.weight" in one.tensors)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_table_larger_than_the_batch_is_not_gathered(stage: int) -> None:
    planned = collectives(stage, False, 4)
    assert moved(planned) == 0
    tokens = 8 * 4
    # Half of it goes to the other rank: indices there, rows back, and their gradients there.
    rows = [one.bytes for one in planned if one.bytes == tokens * WIDTH * 4 / 2]
    assert len(rows) == 2
    assert [one.bytes for one in planned if one.kind == "all-gather"].count(tokens * 8 / 2) == 1


def test_nor_is_its_compute_copy() -> None:
    planned = collectives(2, False, 4, torch.bfloat16)
    assert moved(planned) == 0
    # Rows come in the compute dtype; the gradients of these, which autocast has in fp32, go in fp32.
    assert sorted(one.bytes for one in planned if one.bytes >= 8 * 4 * WIDTH) == [8 * 4 * WIDTH, 8 * 4 * WIDTH * 2]


def test_data_parallel_gathers_the_sum_rather_than_reducing_it() -> None:
    assert moved(collectives(0, False, 4)) == TABLE / 2


@pytest.mark.parametrize(("tied", "length"), [(True, 4), (False, 256)])
def test_a_table_that_is_read_whole_or_by_many_is_gathered(tied: bool, length: int) -> None:
    assert moved(collectives(2, tied, length)) == TABLE


def look_up_nothing(token: int) -> str:
    step = step_of(make(), 2)
    x, y = batches(8)[0]
    step(part(x), part(y))
    x[0, 2] = token
    try:
        step(part(x), part(y))
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("token", [ROWS, -1])
def test_an_index_that_is_in_no_row_is_an_error_on_every_rank(pool: Pool, token: int) -> None:
    assert all("index out of range" in found for found in pool.run(2, look_up_nothing, token))
