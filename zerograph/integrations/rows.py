"""Loaders of a framework whose batches are per process: each rank's rows of the batches that one process would read.

One process reads batches of ``ranks`` times as many samples. Collators that pad look at a whole batch, and collators
that draw random numbers draw those of the whole batch. So every rank collates the whole batch and keeps its rows; with
a collator that only stacks samples, a rank reads its own samples.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from zerograph.errors import InputError
from zerograph.loops.loaders import agree_on_batch, bounds, reading_options
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


@dataclass(frozen=True)
class RowsOf:
    """Collate a whole batch, and keep the rows of one rank."""

    collate: Callable[[Any], Any]
    rank: int
    ranks: int

    def __call__(self, samples: Any) -> Any:
        """Return this rank's rows of the batch of these samples."""
        samples = list(samples) if isinstance(samples, Iterable) else samples
        return rows_of(self.collate(samples), self.rank, self.ranks, len(samples) if isinstance(samples, list) else 0)


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
    own = _only_stacks(loader.collate_fn) and _has_rows_for_all(loader, batches, size, job.size)
    sampler = WholeBatches(batches.sampler, size, batches.drop_last, job, own)
    return DataLoader(
        loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn if own else collate, **arguments
    )


def rows_of(batch: Any, rank: int, ranks: int, samples: int = 0) -> Any:
    """Return one rank's rows of a batch.

    Args:
        batch: the batch.
        rank: the rank.
        ranks: number of ranks.
        samples: number of samples of the batch. A tensor may have several rows for each, as pairs of texts have.

    Raises:
        InputError: tensors differ in their first dimension, so that the rows are not known.
    """
    sizes = {len(tensor) for tensor in _tensors(batch) if tensor.dim()}
    several = samples > 0 and all(size % samples == 0 for size in sizes)
    if len(sizes) > 1 and not several:
        raise InputError(
            f"the tensors of a batch have {', '.join(map(str, sorted(sizes)))} rows, of which zerograph does not know "
            "the ranks' parts\nThe first dimension of every tensor of a batch must be the samples."
        )
    count = samples if several else next(iter(sizes), 0)
    rows = bounds(count, rank, ranks)

    def part_of(tensor: Tensor) -> Tensor:
        times = len(tensor) // count if count else 1
        return tensor[rows.start * times : rows.stop * times].clone()

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return part_of(value) if value.dim() else value
        if isinstance(value, Mapping):
            # Such as a BatchEncoding, which holds more than its entries.
            mapping: Any = copy.copy(value)
            if hasattr(mapping, "data") and isinstance(mapping.data, dict):
                mapping.data = dict(mapping.data)
            for key in list(mapping):
                mapping[key] = part(mapping[key])
            return mapping
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(part, value))
        if isinstance(value, (list, tuple)):
            listed = value if any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in value) else None
            return type(value)(
                map(part, value) if listed is not None else value[rows] if len(value) == count else value
            )
        return value

    return part(batch)


def _part(job: Job, number: int, samples: Sequence[Any], own: bool) -> list[Any]:
    """Return the samples to read of a whole batch, which must be the same on all ranks."""
    samples = list(samples)
    agree_on_batch(job, number, "samples", samples)
    return samples[bounds(len(samples), job.rank, job.size)] if own else samples


def _only_stacks(collate: Any) -> bool:
    """Return whether a collator treats each sample alone, whatever the others of the batch are."""
    collate = getattr(collate, "data_collator", collate)
    transformers = sys.modules.get("transformers")
    return collate is default_collate or (
        transformers is not None and collate is getattr(transformers, "default_data_collator", None)
    )


def _has_rows_for_all(loader: DataLoader[Any], batches: BatchSampler, size: int, ranks: int) -> bool:
    """Return whether no rank is without a sample of the last batch."""
    try:
        last = len(batches.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        return False
    return size >= ranks and (batches.drop_last or last == 0 or last >= ranks)


def _tensors(batch: Any) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
