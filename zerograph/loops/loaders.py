"""Loaders whose batches are split between the ranks: the whole batch is that of the script in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zerograph import data
from zerograph._torch import pytree
from zerograph.compiler.input_layout import ranks_of_row, rows_on
from zerograph.config import Config
from zerograph.errors import InputError
from zerograph.ir.mesh import local_start, piece_count
from zerograph.runtime.job.exchange import broadcast_number
from zerograph.runtime.job.process_group import Job, agree, digest, join


class SplitLoader:
    """Iterate over this rank's rows of each batch of a loader. Other attributes are the loader's.

    Ranks that hold the same rows, such as those that split each sequence, get the same.

    The batches are those that the loader yields in one process. A ``DataLoader`` of a map-style dataset reads only this
    rank's samples. Of any other iterable every rank reads the whole batch, which must be equal on all ranks. A loader
    with a ``DistributedSampler`` yields this rank's batches already.
    """

    def __init__(self, loader: Iterable[Any], config: Config) -> None:
        self._loader, self._config = loader, config
        # Reads this rank's samples. It is kept if its workers are.
        self._reading: tuple[DataLoader[Any], _Part] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's part of each batch.

        Raises:
            RankMismatchError: the ranks' batches differ.
            InputError: a batch has fewer rows than there are ranks, and a rank had none before.
        """
        loader, job = self._loader, self._job()
        if job.size == 1:
            yield from loader
        elif isinstance(loader, DataLoader) and (sampler := _distributed_sampler(loader)) is not None:
            self._check_sampler(sampler, job)
            yield from data.batches(loader, timeout=self._config.timeout)
        elif isinstance(loader, DataLoader) and _splits_samples(loader):
            yield from self._of_samples(loader)
        else:
            yield from self._of_batches(loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _job(self) -> Job:
        return join(self._config.timeout, self._config.placement, ranks_of_row(self._config))

    def _parts(self, job: Job) -> tuple[int, int]:
        """Return which part of each batch is this rank's, and the number of parts."""
        sbp = rows_on(self._config, job.mesh)
        parts = piece_count(sbp, job.mesh)
        return local_start((parts,), sbp, job.mesh)[0], parts

    def _check_sampler(self, sampler: DistributedSampler[Any], job: Job) -> None:
        part, parts = self._parts(job)
        if parts < job.size and (sampler.rank, sampler.num_replicas) != (part, parts):
            raise InputError(
                f"the DistributedSampler of a prepared loader has num_replicas={sampler.num_replicas}, "
                f"rank={sampler.rank}, but the {job.size} ranks hold {parts} part(s) of each batch, and this rank part "
                f"{part}: ranks that split a sequence must read the same rows\nGive it num_replicas={parts}, "
                f"rank={part}, or leave the sampler out: a prepared loader splits the batches itself."
            )

    def _of_samples(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Read this rank's samples of each batch, in the order of rank 0's random numbers."""
        job = self._job()
        _same_generators(loader, job)
        if self._reading is None or not loader.persistent_workers:
            mine = _Part(loader.batch_sampler, *self._parts(job))  # type: ignore[arg-type]
            options = reading_options(loader)
            self._reading = (
                DataLoader(loader.dataset, batch_sampler=mine, collate_fn=loader.collate_fn, **options),
                mine,
            )
        local, mine = self._reading
        for number, batch in enumerate(local):
            indices, count = mine.read.pop(number)
            agree_on_batch(job, number, "samples", indices)
            yield batch if count else _rows(batch, slice(0, 0))

    def _of_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        job = self._job()
        part, parts = self._parts(job)
        for number, batch in enumerate(loader):
            facts = [(tuple(t.shape), float(t.double().sum())) for t in _tensors(batch)]
            agree_on_batch(job, number, "shapes and sums", facts)
            count = next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 0)
            yield _rows(batch, bounds(count, part, parts))


def reading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say how it reads; not its dataset, batches, collation and ``in_order``."""
    return {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
            *("multiprocessing_context", "generator", "persistent_workers"),
        )
    }


def _distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the sampler of a loader, or of its batch sampler, if it draws this rank's samples already."""
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return next((one for one in samplers if isinstance(one, DistributedSampler)), None)


def _splits_samples(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


class _Part:
    """The samples of each batch that one rank reads; a rank without any reads one, to know what a batch is like."""

    def __init__(self, batches: Iterable[Sequence[Any]], part: int, parts: int) -> None:
        self._batches, self._part, self._parts = batches, part, parts
        self.read: dict[int, tuple[Any, int]] = {}

    def __iter__(self) -> Iterator[list[Any]]:
        self.read.clear()
        for number, whole in enumerate(self._batches):
            indices = list(whole)
            mine = indices[bounds(len(indices), self._part, self._parts)]
            self.read[number] = (indices, len(mine))
            yield mine or indices[:1]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def bounds(count: int, part: int, parts: int) -> slice:
    """Return the rows of a part: contiguous, and as many as of any other, or one more."""
    least, more = divmod(count, parts)
    start = part * least + min(part, more)
    return slice(start, start + least + (part < more))


def _same_generators(loader: DataLoader[Any], job: Job) -> None:
    """Let samplers draw the same order on all ranks: that of rank 0."""
    for generator in data.generators_of(loader):
        own = digest(generator.get_state().tolist()) % 2**62
        if len({one[0] for one in agree(job, "a prepared loader", 0, dict, None, (own,))}) > 1:
            generator.manual_seed(broadcast_number(job, generator.initial_seed() % 2**62 ^ own))


def agree_on_batch(job: Job, number: int, what: str, facts: Any) -> None:
    """Raise unless the facts about a batch are equal on all ranks."""
    agree(job, f"batch {number + 1} of a prepared loader", digest(facts), lambda: {what: f"{facts}"[:200]})


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _rows(batch: Any, rows: slice) -> Any:
    def part(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if not leaf.dim() else leaf[rows].clone()
        if isinstance(leaf, (bool, int, float, type(None), torch.dtype)):
            return leaf
        raise InputError(
            f"a prepared loader yields a {type(leaf).__name__}, of which zerograph does not know the ranks' parts\n"
            "Yield tensors and numbers in lists, tuples and dicts."
        )

    return pytree.tree_map(part, batch)
