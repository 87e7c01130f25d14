"""Loaders of a framework whose batches are per process: each rank's rows of the batches that one process would read.

One process reads batches of ``ranks`` times as many samples. Every rank collates the whole batch and keeps its rows;
with a collator that only stacks samples, a rank reads its own samples, unless reading draws random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zerograph.config import Config
from zerograph.errors import InputError
from zerograph.loops import noise
from zerograph.loops.loaders import agree_on_batch, reading_options
from zerograph.loops.rows import RowsOf, Share, Stacked, only_stacks
from zerograph.runtime.job.process_group import Job, join


class WholeBatches(BatchSampler):
    """The samples of whole batches: of ``ranks`` batches in a row of a batch sampler; or this rank's samples of them.

    Args:
        batches: the batch sampler.
        ranks: how many of its batches make a whole one.
        job: the ranks. They must draw the same samples.
        own: yield this share of the samples only.
    """

    def __init__(self, batches: Any, ranks: int, job: Job, own: Share | None) -> None:
        self.batch_sampler, self.drop_last = batches, bool(getattr(batches, "drop_last", False))
        self.sampler = getattr(batches, "sampler", batches)
        self.batch_size = (getattr(batches, "batch_size", None) or 1) * ranks
        self._ranks, self._job, self._own = ranks, job, own

    def __iter__(self) -> Iterator[list[Any]]:
        # A generator: islice() would begin anew where iter() does, as with samplers that Lightning predicts with.
        batches = (one for one in self.batch_sampler)
        for number in itertools.count():
            # A batch sampler may yield the same list again.
            parts = [list(one) for one in itertools.islice(batches, self._ranks)]
            if not parts or (len(parts) < self._ranks and self.drop_last):
                return
            samples = [one for part in parts for one in part]
            agree_on_batch(self._job, number, "samples", samples)
            yield samples if self._own is None else samples[self._own.rows(len(samples))]

    def __len__(self) -> int:
        whole, more = divmod(len(self.batch_sampler), self._ranks)
        return whole + (more > 0 and not self.drop_last)


def global_loader(loader: DataLoader[Any], config: Config, *, split: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's rows of whole batches.

    Args:
        loader: a loader whose batches are those of one rank.
        config: the options of the loop.
        split: the loader's batches are whole already.
    """
    job = join(config.timeout, config.placement)
    ranks, share = 1 if split else job.size, Share(job.rank, job.size, config.virtual_ranks)
    arguments = {**reading_options(loader), "in_order": loader.in_order}
    collate = RowsOf(loader.collate_fn, share)
    if isinstance(loader.dataset, IterableDataset):
        size = None if loader.batch_size is None else loader.batch_size * ranks
        return DataLoader(loader.dataset, size, collate_fn=collate, drop_last=loader.drop_last, **arguments)
    batches: Any = loader.batch_sampler
    if batches is None:
        raise InputError(
            "a DataLoader with batch_size=None has no batches to split between the ranks: give it a batch_size"
        )
    own = False
    if type(batches) is BatchSampler:
        stacks = only_stacks(loader.collate_fn) and _has_rows_for_all(loader, batches, ranks, job.size)
        own = stacks and not noise.draws(loader.dataset)
        # A framework that exchanges the sampler leaves the one of the user's loader.
        batches = BatchSampler(batches.sampler, batches.batch_size, batches.drop_last)
    return DataLoader(
        loader.dataset,
        batch_sampler=WholeBatches(batches, ranks, job, share if own else None),
        collate_fn=Stacked(loader.collate_fn) if own else collate,
        **arguments,
    )


def _has_rows_for_all(loader: DataLoader[Any], batches: BatchSampler, joined: int, ranks: int) -> bool:
    """Return whether no rank is without a sample of the last batch."""
    size = batches.batch_size * joined
    try:
        last = len(batches.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        return False
    return size >= ranks and (batches.drop_last or last == 0 or last >= ranks)
