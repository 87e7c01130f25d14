"""Loaders that ``zg.prepare`` splits, each rank's part read in one process."""

from __future__ import annotations

import functools
import io
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import zerograph as zg
from tests.loops.scripts import Prepare, seeded, unprepared
from tests.pool import Pool
from zerograph.ir.mesh import line
from zerograph.loops import loaders


def as_ranks(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], ranks: int = 2, passes: int = 1, first: int = 0
) -> list[list[Any]]:
    """Return the batches that each rank gets of a loader, from a first one on, read one rank after the other."""
    monkeypatch.setattr(loaders, "agree_on_batch", lambda *_: None)
    monkeypatch.setattr(loaders, "agree", lambda *_: [[0]])
    read = []
    for rank in range(ranks):
        job = SimpleNamespace(size=ranks, mesh=line(ranks, rank, "ranks"))
        monkeypatch.setattr(loaders, "join", lambda *_, job=job: job)
        torch.manual_seed(0)
        loader = loaders.SplitLoader(make(), zg.Config())
        loader.load_state_dict({**loader.state_dict(), "batches": first})
        read.append([batch for _ in range(passes) for batch in loader])
    return read


def make() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True, num_workers=1, persistent_workers=True)


def two_epochs(loader: Any) -> list[list[int]]:
    torch.manual_seed(0)
    return [batch[0].tolist() for _ in range(2) for batch in loader]


def test_workers_that_stay_read_the_samples_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "agree_on_batch", lambda *_: None)
    monkeypatch.setattr(loaders, "agree", lambda *_: [[0]])
    parts = []
    for rank in range(2):
        job = SimpleNamespace(size=2, mesh=line(2, rank, "ranks"))
        monkeypatch.setattr(loaders, "join", lambda *_, job=job: job)
        parts.append(two_epochs(loaders.SplitLoader(make(), zg.Config())))
    assert [first + second for first, second in zip(*parts, strict=True)] == two_epochs(make())


@pytest.mark.parametrize("in_batch_sampler", [False, True])
def test_batches_of_a_distributed_sampler_are_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch, in_batch_sampler: bool
) -> None:
    monkeypatch.setattr(loaders.data, "batches", lambda loader, **_: iter(loader))
    dataset, read = TensorDataset(torch.arange(10)), list[int]()
    for rank in range(2):
        job = SimpleNamespace(size=2, mesh=line(2, rank, "ranks"))
        monkeypatch.setattr(loaders, "join", lambda *_, job=job: job)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, rank)
        batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if in_batch_sampler else {"sampler": sampler}
        loader: Any = DataLoader(dataset, **batches)
        read += [int(one) for batch in loaders.SplitLoader(loader, zg.Config()) for one in batch[0]]
    assert sorted(read) == list(range(10))


LENGTHS = [2, 5, 1, 3, 7, 4, 1]


def pad_and_mask(samples: list[Tensor]) -> dict[str, Any]:
    """Pad to the longest sample of the batch and drop tokens at random, as collators for language models do."""
    tokens = pad_sequence(samples, batch_first=True)
    return {
        "tokens": tokens,
        "kept": torch.rand(tokens.shape) > 0.3,
        "lengths": numpy.array([len(sample) for sample in samples]),
        "names": [f"sample {len(sample)}" for sample in samples],
        "scale": torch.tensor(2.0),
        "split": "train",
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_keep_their_rows_of_a_batch_that_the_collator_sees_whole(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def reader() -> DataLoader[Any]:
        samples: Any = [torch.arange(1, length + 1) for length in LENGTHS]
        return DataLoader(samples, 3, shuffle=True, collate_fn=pad_and_mask, num_workers=workers)

    torch.manual_seed(0)
    whole = list(reader())
    ranks = as_ranks(monkeypatch, reader)
    for batch, *parts in zip(whole, *ranks, strict=True):
        for name in ("tokens", "kept"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        # What is no tensor is whole.
        for part in parts:
            assert numpy.array_equal(part["lengths"], batch["lengths"])
            assert (part["names"], part["scale"], part["split"]) == (batch["names"], 2, "train")
    # The last batch has one sample: one rank has rows, the others have none.
    assert [len(rank[-1]["tokens"]) for rank in ranks] == [1, 0]


class Edges(nn.Module):
    """A layer of a graph network: it sums over the edges of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        summed: Tensor = torch.zeros_like(nodes).index_add(0, edges[:, 1], nodes[edges[:, 0]])
        return self.linear(nodes + summed)  # type: ignore[no-any-return]


def graph_of(samples: list[Tensor]) -> SimpleNamespace:
    nodes = torch.cat(samples)
    edges = torch.stack([torch.arange(len(nodes) - 1), torch.arange(1, len(nodes))], 1)
    return SimpleNamespace(nodes=nodes, edges=edges, device=object())


def trained_on_graphs(prepare: Prepare) -> list[float]:
    model = seeded(Edges)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs: Any = list(torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 2, 3))
    loader: Any = DataLoader(graphs, 2, collate_fn=graph_of)
    model, optimizer, loader = prepare(model, optimizer, loader)
    losses = []
    for graph in loader:
        loss = model(graph.nodes, graph.edges).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def graphs_on_ranks() -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        losses = trained_on_graphs(functools.partial(zg.prepare, stage=3))
    return losses, [str(one.message) for one in caught if "all rows" in str(one.message)]


def test_a_batch_whose_rows_are_not_known_is_whole_on_every_rank(pool: Pool) -> None:
    expected = trained_on_graphs(unprepared)
    (losses, messages), (others, _) = pool.run(2, graphs_on_ranks)
    assert losses == others == pytest.approx(expected, rel=1e-12)
    assert len(messages) == 1
    assert "its tensors have different numbers of rows" in messages[0]


def test_a_batch_that_is_an_object_has_rows_by_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph(samples: list[Tensor]) -> object:
        return SimpleNamespace(nodes=torch.stack(samples), name="graph")

    dataset: Any = list(torch.arange(8.0).view(8, 1))
    first, second = as_ranks(monkeypatch, lambda: DataLoader(dataset, 4, collate_fn=graph))
    assert [one.nodes.flatten().tolist() for one in first] == [[0, 1], [4, 5]]
    assert [one.nodes.flatten().tolist() for one in second] == [[2, 3], [6, 7]]
    assert first[0].name == second[1].name == "graph"


def names_of(prepare: Prepare) -> list[Any]:
    samples: Any = [{"x": torch.ones(2), "name": f"a\n{number}", "pair": ("b", bytes([number]))} for number in range(9)]
    _, loader = prepare(nn.Linear(2, 1), DataLoader(samples, batch_size=4))
    return [(batch["name"], batch["pair"]) for batch in loader]


def test_strings_of_a_batch_are_those_of_all_ranks(pool: Pool) -> None:
    expected = names_of(unprepared)
    assert pool.run(2, names_of, zg.prepare) == [expected, expected]


class Transform:
    """A transform with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.default_rng(seed)

    def __call__(self) -> float:
        return self._generator.random()


class Augmented(Dataset[Any]):
    """Draws for some samples, from the generators of torch, Python and NumPy and from one of its own."""

    def __init__(self) -> None:
        self.own = Transform(3)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> list[float]:
        if index < 6 or index % 3 == 0:
            return [float(index), 0.0, 0.0, 0.0, 0.0]
        return [float(index), float(torch.rand(())), random.random(), float(numpy.random.rand()), self.own()]


def augmented(workers: int = 0, *, stay: bool = False, collates: bool = False) -> DataLoader[Any]:
    options: Any = {"collate_fn": lambda samples: torch.tensor(samples).unbind(1)} if collates else {}
    if workers:
        options |= {"persistent_workers": stay, "worker_init_fn": change_own}
    return DataLoader(Augmented(), 4, shuffle=True, num_workers=workers, **options)


def change_own(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert type(info.dataset) is Augmented
    info.dataset.own = Transform(info.seed)


class Counting(Dataset[list[float]]):
    """Samples that depend on those read before: such as a counter, the last sample or a file."""

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.positions, self.read = kind, 0, {0: 0, 1: 0}, list[int]()
        self.rest: Any = iter(range(100)) if kind == "iterator" else None
        if kind == "file":
            self.rest = io.StringIO("\n".join(map(str, range(50))))
        self.made: random.Random | None = None
        self.last, self.sums, self.counts, self.kept = torch.zeros(1), numpy.zeros(2), [0, 0], dict[int, float]()
        # These cannot be put back as they were.
        self.constants = [numpy.frombuffer(b"abcd", numpy.uint8), torch.eye(2).to_sparse()]

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> list[float]:
        if self.rest is not None:
            return [index, float(next(self.rest))]
        if self.kind == "last":
            last, self.last = self.last, torch.tensor([1.0 * index])
            return [index, last.item()]
        if self.kind == "tensor":
            self.last += index
            return [index, self.last.item()]
        if self.kind == "array":
            self.sums[index % 2] += index
            return [index, *self.sums]
        if self.kind == "entries of a list":
            self.counts[index % 2] += 1
            return [index, *self.counts]
        if self.kind == "generator that a sample makes":
            self.made = self.made or random.Random(0)
            return [index, self.made.random() if index % 3 else 0.0]
        if self.kind == "noise that is kept":
            return [index, self.kept.setdefault(index // 2, random.random())]
        self.count += self.kind == "counter"
        self.read += [index] if self.kind == "list" else []
        self.positions[index % 2] += self.kind == "positions"
        return [index, self.count, self.positions[index % 2] + len(self.read)]


class Together(Counting):
    """Samples that depend on those read with them."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [[index, sum(indices)] for index in indices]


def counted(prepare: Prepare, kind: str) -> list[Any]:
    random.seed(0)
    samples = Subset(Together(kind), range(11)) if kind == "together" else Counting(kind)
    _, loader = prepare(nn.Linear(2, 1), DataLoader(samples, 4))
    return [[zg.gather(column).tolist() for column in batch] for _ in range(2) for batch in loader]


@pytest.mark.parametrize(
    "kind",
    [
        "counter",
        "positions",
        "list",
        "iterator",
        "file",
        "last",
        "tensor",
        "array",
        "entries of a list",
        "noise that is kept",
        "generator that a sample makes",
        "together",
    ],
)
def test_samples_that_depend_on_those_before_are_those_of_one_process(pool: Pool, kind: str) -> None:
    expected = counted(unprepared, kind)
    assert pool.run(2, counted, zg.prepare, kind) == [expected, expected]


@pytest.mark.parametrize("kind", ["counter", "iterator"])
def test_workers_read_samples_that_depend_on_those_before(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make = functools.partial(DataLoader, Counting(kind), 4, num_workers=2)
    for batch, *parts in zip(list(make()), *as_ranks(monkeypatch, make), strict=True):
        for column, *columns in zip(batch, *parts, strict=True):
            assert torch.equal(column, torch.cat(columns))


def noise_of_samples(prepare: Prepare, collates: bool) -> list[Any]:
    _, loader = prepare(nn.Linear(2, 1), augmented(collates=collates))
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    read: list[Any] = [[zg.gather(column).tolist() for column in batch] for _ in range(2) for batch in loader]
    return [read, torch.rand(3).tolist(), random.random(), numpy.random.rand()]


@pytest.mark.parametrize("collates", [False, True])
def test_noise_of_samples_is_that_of_one_process(pool: Pool, collates: bool) -> None:
    (expected,) = pool.run(1, noise_of_samples, unprepared, collates)
    for seen in pool.run(2, noise_of_samples, zg.prepare, collates):
        assert seen == expected


def unseeded_noise() -> list[Any]:
    random.seed(zg.rank())
    numpy.random.seed(zg.rank())
    _, loader = zg.prepare(nn.Linear(2, 1), [torch.ones(4)])
    list(loader)
    return [random.random(), numpy.random.rand()]


def test_a_pass_gives_all_ranks_the_numbers_of_the_first(pool: Pool) -> None:
    first, second = pool.run(2, unseeded_noise)
    assert first == second


def noise_of_numpy_alone() -> float:
    random.seed(zg.rank())
    numpy.random.seed(0)
    _, loader = zg.prepare(nn.Linear(2, 1), [torch.ones(4)])
    list(loader)
    return float(numpy.random.rand())


def test_a_pass_keeps_a_generator_that_is_equal_on_all_ranks(pool: Pool) -> None:
    expected = numpy.random.RandomState(0).rand()
    assert pool.run(2, noise_of_numpy_alone) == [expected, expected]


@pytest.mark.parametrize(
    ("first", "passes", "stay", "collates"),
    [(0, 2, False, False), (0, 2, True, False), (0, 2, True, True), (3, 1, False, False), (3, 1, False, True)],
)
def test_workers_draw_the_noise_of_one_process_from_any_batch_on(
    monkeypatch: pytest.MonkeyPatch, first: int, passes: int, stay: bool, collates: bool
) -> None:
    make = functools.partial(augmented, 2, stay=stay, collates=collates)
    torch.manual_seed(0)
    loader = make()
    whole = [batch for _ in range(passes) for batch in loader][first:]
    for batch, *parts in zip(whole, *as_ranks(monkeypatch, make, passes=passes, first=first), strict=True):
        for column, *columns in zip(batch, *parts, strict=True):
            assert torch.equal(column, torch.cat(columns))


def with_noise(samples: Any) -> Tensor:
    return torch.stack([one for (one,) in samples]) + torch.rand(())


def test_a_worker_draws_the_noise_of_batches_that_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(DataLoader, TensorDataset(torch.arange(24)), 4, collate_fn=with_noise, num_workers=2)
    torch.manual_seed(0)
    whole = list(make())[3:]
    for batch, *parts in zip(whole, *as_ranks(monkeypatch, make, first=3), strict=True):
        assert torch.equal(batch, torch.cat(parts))


class Damaged(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 11:
            raise OSError("damaged")
        return torch.full((4,), float(index))


def skipping(loader: Any) -> list[list[float]]:
    """Return the first entries of the batches that can be read."""
    iterator, read = iter(loader), []
    while True:
        try:
            read.append(next(iterator)[:, 0].tolist())
        except StopIteration:
            return read
        except OSError:
            continue


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_goes_on_after_a_sample_that_cannot_be_read(workers: int) -> None:
    loader = DataLoader(Damaged(), 8, num_workers=workers)
    assert skipping(loaders.SplitLoader(loader, zg.Config())) == skipping(loader)
    assert skipping(zg.batches(loader)) == skipping(loader)


def damaged_and_permuted(kind: str) -> tuple[str, list[list[float]]]:
    """Read with a sample that one rank cannot read, or batches in another order on rank 1; then go on."""
    if kind == "damaged":
        source: Any = DataLoader(Damaged(), 8)
    elif kind == "shorter":
        source = [torch.zeros(8, 1)] * (3 - zg.rank())
    else:
        source = [torch.arange(8.0).roll(4 * zg.rank() * (number == 1))[:, None] for number in range(3)]
    iterator, said, read = iter(loaders.SplitLoader(source, zg.Config())), "", []
    while True:
        try:
            read.append(next(iterator)[:, 0].tolist())
        except StopIteration:
            return said, read
        except (OSError, zg.RankMismatchError) as error:
            said = f"{type(error).__name__}: {error}"


def test_what_one_rank_cannot_read_is_an_error_on_all_and_the_pass_goes_on(pool: Pool) -> None:
    (said, first), (other, second) = pool.run(2, damaged_and_permuted, "damaged")
    assert "OSError: damaged" in said + other
    assert "failed before batch 2 of a prepared loader" in said + other
    assert [a + b for a, b in zip(first, second, strict=True)] == skipping(DataLoader(Damaged(), 8))


def test_batches_in_another_order_on_one_rank_are_an_error(pool: Pool) -> None:
    for said, read in pool.run(2, damaged_and_permuted, "permuted"):
        assert "ranks differ before batch 2 of a prepared loader, first in the batch" in said
        assert len(read) == 2


def test_a_pass_that_ends_earlier_on_one_rank_is_an_error(pool: Pool) -> None:
    for said, read in pool.run(2, damaged_and_permuted, "shorter"):
        assert "ranks differ before batch 3 of a prepared loader, first in the batch" in said
        assert "rank 1: none: the loader has ended" in said
        assert len(read) == 2


class Windows:
    """Batches of sequences whose length is an attribute."""

    length = 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(24.0).view(2, 3, 4)[:, :, : self.length])


class Doubled(DataLoader[Any]):
    """A loader that changes the batches it has read."""

    def __iter__(self) -> Any:
        return ((2 * x,) for (x,) in super().__iter__())


class Endless:
    """A batch sampler that never ends, as YOLO and timm keep their workers with."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Kept(DataLoader[Any]):
    """A loader that counts the batches of a pass itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


class Numbered:
    """Has its batches by number, and no ``__iter__``."""

    def __getitem__(self, number: int) -> Tensor:
        if number == 2:
            raise IndexError
        return torch.arange(3.0) + number


def read_in_unusual_ways(prepare: Prepare) -> list[Any]:
    dataset, whole = TensorDataset(torch.arange(10.0)), torch.arange(12.0).view(3, 4)
    _, growing, *others = prepare(nn.Linear(1, 1), Windows(), Doubled(dataset, 4), Kept(dataset, 4))
    _, plain, stream, batches = prepare(nn.Linear(1, 1), DataLoader(dataset, 4), (one for one in whole), list(whole))
    read = [*growing]
    growing.length = 4
    read += [*growing, *(x for loader in others for _ in range(2) for (x,) in loader)]
    plain.collate_fn = lambda samples: torch.stack([x for (x,) in samples]) + 1
    read += [*plain, next(stream), *stream, batches[-1], batches[0], *batches[1:]]
    read += [torch.tensor([isinstance(one, DataLoader) for one in (growing, plain, stream, *others)])]
    sparse = DataLoader(dataset, 4, collate_fn=lambda samples: torch.stack([x for (x,) in samples]).to_sparse())
    _, numbered, sparse = prepare(nn.Linear(1, 1), Numbered(), sparse)
    read += [*numbered, *(batch.to_dense() for batch in sparse)]
    return [one.tolist() for one in read]


def read_prepared() -> list[Any]:
    return read_in_unusual_ways(functools.partial(zg.prepare, stage=2))


def test_loaders_are_changed_and_read_as_those_of_the_script(pool: Pool) -> None:
    expected = read_in_unusual_ways(unprepared)
    assert pool.run(2, read_prepared) == [expected, expected]


def read_ahead() -> str:
    _, loader = zg.prepare(nn.Linear(1, 1), [torch.ones(2, 1)])
    with ThreadPoolExecutor(1) as pool, pytest.raises(zg.InputError) as refused:
        pool.submit(next, iter(loader)).result()
    return str(refused.value)


def test_a_thread_of_its_own_that_reads_batches_is_an_error(pool: Pool) -> None:
    # Its exchanges and those of the loop would come in another order on each rank.
    for message in pool.run(2, read_ahead):
        assert "Read it in the loop's thread" in message


def prepared_once_more() -> list[list[float]]:
    """Return the batches of a loader that two calls have prepared, the rest after a position, and as others read it."""
    model = nn.Linear(1, 1)
    model, loader = zg.prepare(model, DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4))
    next(iter(loader))
    position = loader.state_dict()
    model, again = zg.prepare(model, loader, stage=3)
    seen = [zg.gather(x).tolist() for (x,) in again]
    loader.load_state_dict(position)
    model, again = zg.prepare(model, loader)
    seen += [zg.gather(x).tolist() for (x,) in again]
    _, noted = zg.prepare(model, ((x, torch.arange(len(x))) for (x,) in loader))
    return seen + [zg.gather(one).tolist() for batch in noted for one in batch]


def test_a_loader_that_is_prepared_again_has_the_same_batches_and_its_position(pool: Pool) -> None:
    batches = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    noted = [one for batch in batches for one in (batch, [*range(len(batch))])]
    assert pool.run(2, prepared_once_more) == [batches + batches[1:] + noted] * 2
