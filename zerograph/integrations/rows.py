"""Loaders of a framework whose batches are per process: each rank's rows of the batches that one process would read.

One process reads batches of ``ranks`` times as many samples. Every rank collates the whole batch and keeps its rows;
with a collator that only stacks samples, a rank reads its own samples, unless reading draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zerograph.errors import InputError
from zerograph.loops import noise
from zerograph.loops.loaders import agree_on_batch, reading_options
from zerograph.loops.rows import RowsOf, Stacked, bounds, only_stacks
from zerograph.runtime.job.process_group import Job


class WholeBatches(BatchSampler):
    """The samples of each whole batch, or this rank's samples of it.

    Args:
        sampler: the order of the samples.
        batch_size: of the whole batch.
        drop_last: leave out a last, smaller batch.
        job: the ranks. They must draw the same samples.
        own: yield this rank's samples only.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, job: Job, own: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._job, self._own = job, own

    def __iter__(self) -> Iterator[list[Any]]:
        for number, samples in enumerate(super().__iter__()):
            yield _part(self._job, number, samples, self._own)


class JoinedBatches(BatchSampler):
    """As :class:`WholeBatches`, for a batch sampler of the user's: ``ranks`` batches in a row are a whole batch."""

    def __init__(self, batches: Any, ranks: int, job: Job) -> None:
        self.batch_sampler, self.drop_last = batches, bool(getattr(batches, "drop_last", False))
        self.sampler = getattr(batches, "sampler", batches)
        self.batch_size = (getattr(batches, "batch_size", None) or 1) * ranks
        self._ranks, self._job = ranks, job

    def __iter__(self) -> Iterator[list[Any]]:
        joined: list[list[Any]] = []
        number = 0
        for batch in self.batch_sampler:
            joined.append(list(batch))
            if len(joined) == self._ranks:
                yield _part(self._job, number, [one for part in joined for one in part], own=False)
                joined, number = [], number + 1
        if joined and not self.drop_last:
            yield _part(self._job, number, [one for part in joined for one in part], own=False)

    def __len__(self) -> int:
        whole, more = divmod(len(self.batch_sampler), self._ranks)
        return whole + (more > 0 and not self.drop_last)


def global_loader(loader: DataLoader[Any], job: Job, *, split: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's rows of whole batches.

    Args:
        loader: a loader whose batches are those of one rank.
        job: the ranks.
        split: the loader's batches are whole already.
    """
    ranks = 1 if split else job.size
    arguments = {**reading_options(loader), "in_order": loader.in_order}
    collate = RowsOf(loader.collate_fn, job.rank, job.size)
    if isinstance(loader.dataset, IterableDataset):
        size = None if loader.batch_size is None else loader.batch_size * ranks
        return DataLoader(loader.dataset, size, collate_fn=collate, drop_last=loader.drop_last, **arguments)
    batches: Any = loader.batch_sampler
    if batches is None:
        raise InputError(
            "a DataLoader with batch_size=None has no batches to split between the ranks: give it a batch_size"
        )
    if type(batches) is not BatchSampler:
        return DataLoader(
            loader.dataset, batch_sampler=JoinedBatches(batches, ranks, job), collate_fn=collate, **arguments
        )
    size = batches.batch_size * ranks
    stacks = only_stacks(loader.collate_fn) and _has_rows_for_all(loader, batches, size, job.size)
    own = stacks and not noise.draws(loader.dataset)
    sampler = WholeBatches(batches.sampler, size, batches.drop_last, job, own)
    return DataLoader(
        loader.dataset, batch_sampler=sampler, collate_fn=Stacked(loader.collate_fn) if own else collate, **arguments
    )


def _part(job: Job, number: int, samples: Sequence[Any], own: bool) -> list[Any]:
    """Return the samples to read of a whole batch, which must be the same on all ranks."""
    samples = list(samples)
    agree_on_batch(job, number, "samples", samples)
    return samples[bounds(len(samples), job.rank, job.size)] if own else samples


def _has_rows_for_all(loader: DataLoader[Any], batches: BatchSampler, size: int, ranks: int) -> bool:
    """Return whether no rank is without a sample of the last batch."""
    try:
        last = len(batches.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        return False
    return size >= ranks and (batches.drop_last or last == 0 or last >= ranks)
