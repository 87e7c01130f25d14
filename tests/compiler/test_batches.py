"""Batches until every rank is done train as one device on all of them; gathered outputs are those of one device."""

from __future__ import annotations

import collections
import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import zerograph as zg
from tests.harness import Function, Predict, deviation, joined, sliced
from tests.models import MODELS, adam_step, adamw, make, train_plainly
from tests.pool import Pool

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)


def shares(ranks: int) -> list[range]:
    """Return the samples of each rank: of 11, rank 0 has most."""
    return [range(7), range(7, 11)] if ranks == 2 else [range(7), range(7, 8), range(8, 11)]


def rounds(ranks: int, size: int = 3) -> list[list[int]]:
    """Return the samples of each step, in rank order."""
    parts = [[share[at : at + size] for at in range(0, len(share), size)] for share in shares(ranks)]
    return [[n for part in parts if at < len(part) for n in part[at]] for at in range(max(map(len, parts)))]


def samples(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x, y = MODELS["mlp"][1](torch.Generator().manual_seed(5), 11, dtype)
    return x, y


class Stream(IterableDataset[Any]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.tensors, strict=True)


def loader_of(kind: str, *tensors: Tensor) -> Any:
    if kind == "iterable dataset":
        return DataLoader(Stream(*tensors), batch_size=3)
    if kind == "dataset":
        return DataLoader(TensorDataset(*tensors), batch_size=3)
    chunks = [tuple(tensor[at : at + 3] for tensor in tensors) for at in range(0, len(tensors[0]), 3)]
    return (chunk for chunk in chunks) if kind == "generator" else chunks


def epoch(kind: str, stage: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    x, y = (tensor[list(shares(zg.world_size())[zg.rank()])] for tensor in samples())
    step = adam_step("mlp", stage, dtype=torch.float64)
    losses = [step(*batch) for batch in zg.batches(loader_of(kind, x, y))]
    return losses, step.state_dict()["modules"]["model"]


@sliced(
    "ranks, kind, stage",
    [(2, "iterable dataset", 0), (3, "generator", 3)],
    [(2, "list", 2), (2, "dataset", 1)],
)
def test_an_epoch_trains_as_one_device_on_the_batches_of_all_ranks(
    pool: Pool, ranks: int, kind: str, stage: int
) -> None:
    x, y = samples()
    model = make("mlp", torch.float64)
    expected = train_plainly(model, adamw(model), [(x[rows], y[rows]) for rows in rounds(ranks)])
    for losses, state in pool.run(ranks, epoch, kind, stage):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        assert deviation(joined(state), joined(model.state_dict())) < 1e-9


def outputs_of(model: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    logits = model(x)
    right = logits.argmax(1) == y
    return {
        "logits": [logits, logits.bfloat16()],
        "right": (right, right.sum()),
        "weight": model[0].weight * 1,
        "name": "mlp",
    }


def evaluate() -> list[Any]:
    x, y = (tensor[list(shares(zg.world_size())[zg.rank()])] for tensor in samples())
    predict = Predict(make("mlp", torch.float64), outputs_of)
    return [zg.gather(predict(*batch)) for batch in zg.batches(loader_of("list", x, y))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_outputs_of_an_evaluation_are_those_of_one_device_in_order(pool: Pool, ranks: int) -> None:
    x, y = samples()
    model = make("mlp", torch.float64)
    expected = [outputs_of(model, x[rows], y[rows]) for rows in rounds(ranks)]
    assert [output.pop("name") for output in expected] == ["mlp"] * len(expected)
    for outputs in pool.run(ranks, evaluate):
        assert [output.pop("name") for output in outputs] == ["mlp"] * len(expected)
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


def gather_all_dtypes(counts: list[int]) -> dict[str, Any]:
    def rows(dtype: torch.dtype) -> Tensor:
        return torch.arange(sum(counts) * 3).view(-1, 3).remainder(7).sub(1).to(dtype)

    begin = sum(counts[: zg.rank()])
    own = slice(begin, begin + counts[zg.rank()])
    gathered = zg.gather({dtype: [rows(dtype)[own].t().contiguous().t(), rows(dtype)[own, 0]] for dtype in DTYPES})
    return {str(dtype): (gathered[dtype], [rows(dtype), rows(dtype)[:, 0]]) for dtype in DTYPES}


@pytest.mark.parametrize("counts", [[2, 3], [0, 3], [0, 0], [1, 0, 4]])
def test_gather_joins_rows_of_every_dtype(pool: Pool, counts: list[int]) -> None:
    for results in pool.run(len(counts), gather_all_dtypes, counts):
        for gathered, expected in results.values():
            torch.testing.assert_close(gathered, expected, rtol=0, atol=0)


class Tokens(collections.UserDict[str, Any]):
    """As a tokenizer of ``transformers`` returns."""


def nested() -> list[Any]:
    scalar, weights = torch.tensor(2.0), zg.replicated(torch.ones(4))
    batch = {"x": [torch.ones(2, 3), (torch.zeros(2, dtype=torch.bool), 7)], "scalar": scalar, "weights": weights}
    loader = [batch, Tokens(ids=torch.ones(2, 5))]
    seen = []
    for taken in zg.batches([*loader, *loader][: 2 - zg.rank()]):
        seen.append(copy.copy(taken))
        taken.popitem()
    again = []
    for taken in zg.batches(loader if zg.rank() else [*loader, *loader]):
        again.append(taken)
        taken.pop("ids", None)
    assert isinstance(again[-1], Tokens)
    return seen


def test_a_rank_that_has_run_out_yields_its_last_batch_without_rows(pool: Pool) -> None:
    _, (first, second) = pool.run(2, nested)
    assert first["x"][0].shape == (2, 3)
    assert second["x"][0].shape == (0, 3)
    assert second["x"][1][0].shape == (0,)
    assert second["x"][1][0].dtype == torch.bool
    assert second["x"][1][1] == 7
    assert second["scalar"] == 2
    assert second["weights"].shape == (4,)


def marked_batches() -> list[int]:
    """Return the size of each batch; a rank whose marks differ from those of others would be an error."""
    loader = [torch.ones(2, 3) for _ in range(3 - zg.rank())]
    for x in loader:
        zg.mark_dynamic(x, 0, max=4)
        torch._dynamo.mark_dynamic(x, 1)
    rows = rows_graph()
    return [len(rows(x)[0]) for x in zg.batches(loader)]


def test_a_batch_without_rows_keeps_the_marks_of_dynamic_dimensions(pool: Pool) -> None:
    assert pool.run(2, marked_batches) == [[2, 2, 2], [2, 2, 0]]


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        # Augmentation that draws from torch's generator.
        return torch.tensor([number, int(torch.randint(0, 1000, ()))])


class StatefulLoader:
    """Yield numbers, with the state that torchdata's ``StatefulDataLoader`` has: at its end it begins anew."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.at_end = count, 0, False

    def __iter__(self) -> Iterator[Tensor]:
        self.at, self.at_end = 0 if self.at_end else self.at, False
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([[self.at - 1, 0]])
        self.at_end = True

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "at_end": self.at_end}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.at_end = state["at"], bool(state["at_end"])


def resumable(kind: str) -> Any:
    count = 7 if zg.rank() else 3
    if kind == "stateful":
        return StatefulLoader(count)
    generator = torch.Generator().manual_seed(3) if kind == "own generator" else None
    return DataLoader(Numbers(count), batch_size=2, shuffle=True, generator=generator)


def two_passes(kind: str, stop: int | None) -> list[list[int]]:
    """Return what two passes yield; with ``stop`` batches in a first process, and the rest in another."""
    torch.manual_seed(zg.rank())
    seen: list[list[int]] = []
    data = zg.batches(resumable(kind))

    def run() -> bool:
        while data.epoch < 2:
            for batch in data:
                seen.append(batch.flatten().tolist())
                torch.rand(3)
                if len(seen) == stop:
                    return False
        return True

    if not run():
        file, random = io.BytesIO(), torch.get_rng_state()
        torch.save(data.state_dict(), file)
        torch.manual_seed(77)
        data = zg.batches(resumable(kind))
        torch.set_rng_state(random)  # as step.load() does
        file.seek(0)
        data.load_state_dict(torch.load(file, weights_only=True))
        run()
    return seen


def len_of_pass(kind: str) -> int:
    return 7 if kind == "stateful" else 4


def resume_everywhere(kind: str) -> None:
    """Stop and resume after each number of batches."""
    expected = two_passes(kind, None)
    assert len(expected) == 2 * len_of_pass(kind)
    first = expected[: len_of_pass(kind)]
    assert sorted(number for batch in first for number in batch[::2]) == list(range(7 if zg.rank() else 3))
    for stop in range(1, len(expected)):
        assert two_passes(kind, stop) == expected, stop


@pytest.mark.parametrize("kind", ["default generator", "own generator", "stateful"])
def test_a_resumed_pass_yields_the_same_samples(pool: Pool, kind: str) -> None:
    pool.run(2, resume_everywhere, kind)


class Graph:
    """A batch of which nobody knows the rows."""


class Rewinding:
    """A loader that is its own iterator, and begins anew at ``iter()``."""

    def __iter__(self) -> Iterator[Tensor]:
        self.number = 0
        return self

    def __next__(self) -> Tensor:
        self.number += 1
        if self.number > 3:
            raise StopIteration
        return torch.full((1,), self.number)


def batches_of_rewinding() -> list[int]:
    return [int(batch) for batch in itertools.islice(zg.batches(Rewinding()), 5)]


def test_a_loader_that_is_its_own_iterator_yields_each_batch_once(pool: Pool) -> None:
    assert pool.run(2, batches_of_rewinding) == [[1, 2, 3]] * 2


def raising(after: int) -> Iterator[Tensor]:
    for _ in range(after):
        yield torch.ones(2, 2)
    raise ValueError("this file is damaged")


def one_raises() -> Any:
    return raising(1) if zg.rank() else [torch.ones(2, 2)] * 3


def one_has_none() -> Any:
    return [] if zg.rank() else [torch.ones(2, 2)]


def all_have_none() -> Any:
    return []


def one_cannot_be_emptied() -> Any:
    return [Graph()] * (1 if zg.rank() else 2)


def message(loader: Callable[[], Any]) -> tuple[str, str]:
    try:
        for _ in zg.batches(loader()):
            pass
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("loader", "types", "words"),
    [
        (one_raises, ("RankMismatchError", "ValueError"), ("rank 1 failed before batch 2", "this file is damaged")),
        (one_has_none, ("InputError", "InputError"), ("rank(s) 1 of 2 have no batch",)),
        (all_have_none, ("InputError", "InputError"), ("no rank has a batch",)),
        (one_cannot_be_emptied, ("RankMismatchError", "InputError"), ("last batch has a Graph",)),
    ],
)
def test_an_error_of_one_rank_is_one_of_all(
    pool: Pool, loader: Callable[[], Any], types: tuple[str, str], words: tuple[str, ...]
) -> None:
    results = pool.run(2, message, loader)
    assert tuple(name for name, _ in results) == types
    assert all(word in results[0][1] for word in words)


def refused() -> None:
    data = zg.batches([torch.ones(1)])
    state = data.state_dict()
    with pytest.raises(zg.ConfigError, match="of a job of 3 rank"):
        data.load_state_dict({**state, "ranks": 3})
    with pytest.raises(zg.ConfigError, match="another kind of loader than list"):
        data.load_state_dict({"ranks": 2, "epoch": 0, "batches": 1, "loader": {}})
    with pytest.raises(zg.RankMismatchError, match=r"rank 0: .*\b1 dim.*\n.*rank 1: .*\b2 dim"):
        zg.gather(torch.ones(2, 2) if zg.rank() else torch.ones(2))
    with pytest.raises(zg.InputError, match=r"rank 0: \(2, 3\)\n.*rank 1: \(2, 4\)"):
        zg.gather([torch.ones(2, 3 + zg.rank())])
    taken = iter(zg.batches([torch.ones(1)] * 3))
    next(taken)
    with pytest.raises(zg.RankMismatchError, match=r"batch 2 of zg.batches\(\)"):
        zg.gather(torch.ones(1)) if zg.rank() else next(taken)


def test_positions_and_outputs_that_do_not_fit_are_refused(pool: Pool) -> None:
    pool.run(2, refused)


def alone() -> None:
    data = zg.batches([torch.ones(2), torch.ones(1)])
    assert [len(batch) for batch in data] == [2, 1]
    x = torch.ones(2)
    assert zg.gather((x, "a"))[0] is x


def test_one_rank_gets_the_loaders_batches(pool: Pool) -> None:
    pool.run(1, alone)


def rows_graph() -> Function:
    return Function(lambda x: (x * 2, x.sum(0)))


def on_a_grid(ranks: list[list[int]]) -> None:
    rows = rows_graph()
    rows.config.mesh.placement = zg.placement("cpu", ranks)
    rows.config.mesh.input_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
    x = torch.arange(8.0).view(4, 2)
    place = next(at for at, row in enumerate(ranks) if zg.rank() in row)
    doubled, total = zg.gather(rows(x.chunk(2)[place]))
    torch.testing.assert_close(doubled, x * 2)
    torch.testing.assert_close(total, x.sum(0))
    y = zg.to_global(
        torch.full((2, 2), float(zg.rank())), placement=zg.placement("cpu", [0, 1, 2, 3]), sbp=zg.sbp.split(0)
    )
    assert zg.gather(y)[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_gather_reads_each_row_once_on_a_grid(pool: Pool, ranks: list[list[int]]) -> None:
    pool.run(4, on_a_grid, ranks)
