"""Loaders whose batches are split between the ranks: the whole batch is that of the script in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from zerograph import data
from zerograph.capture.state_changes import Generator, GeneratorFunctions, comparable, restore_generators
from zerograph.compiler.input_layout import ranks_of_row, rows_on
from zerograph.config import Config
from zerograph.eager.world import world
from zerograph.errors import ConfigError, InputError
from zerograph.ir.mesh import local_start, piece_count
from zerograph.loops import noise
from zerograph.loops.rows import Share, only_stacks, rows_collated, rows_of, tensors_of, with_texts
from zerograph.runtime.job.exchange import broadcast_number
from zerograph.runtime.job.process_group import Job, agree, digest, join
from zerograph.runtime.tensor_hash import hash_bits


class RowsLoader:
    """Iterate over this rank's rows of each batch of a loader. Other attributes are the loader's.

    Ranks that hold the same rows, such as those that split each sequence, get the same.

    The batches are those that the loader yields in one process. Of a ``DataLoader`` of a map-style dataset with torch's
    own ``default_collate`` a rank reads its samples only, unless reading them draws random numbers, which depend on all
    samples before. Another ``collate_fn`` may pad to the longest sample of a batch or draw random numbers: every rank
    reads and collates the whole batch. So does every rank for any other iterable, whose batches must be equal on all
    ranks. A loader with a ``DistributedSampler`` yields this rank's batches already.
    """

    def __init__(self, loader: Iterable[Any], config: Config) -> None:
        self._loader, self._config = loader, config
        # Reads this rank's part of each batch. It is kept if its workers are.
        self._reading: DataLoader[Any] | None = None
        self._passes, self._taken, self._thread = 0, 0, threading.get_ident()
        # The states of the random generators at the start of the running pass; the next pass is the rest of it.
        self._at_start: Sequence[torch.Tensor] | None = None
        self._resumed = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A script's isinstance() tells a DataLoader from others.
        return type(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's part of each batch: of those that are left, if a position was loaded.

        Raises:
            RankMismatchError: the ranks' batches differ.
        """
        return _Pass(self)

    def _begun(self, job: Job, first: int) -> tuple[Iterator[Any], Callable[[int, Any], Any] | None, Reader | None]:
        """Begin a pass from the batch of this number on.

        Returns:
            The batches, those before too unless a reader leaves them out; what returns this rank's part of the batch of
            a number, None if the batches are parts; and the reader, of whose failures the ranks know.
        """
        loader: Any = self._loader
        if self._reads_samples(job):
            batches, reader = self._of_samples(loader, first)
            return batches, lambda _, part: part.agreed(job), reader
        if job.size == 1:
            return iter(loader), None, None
        if self._is_of_rank():
            self._check_sampler(distributed_sampler(loader), job)  # type: ignore[arg-type]
            return iter(data.batches(loader, timeout=self._config.checks.timeout)), None, None
        share = self._share(job)

        def part_of(number: int, batch: Any) -> Any:
            agree_on_batch(job, number, "shapes and values", [_facts(one) for one in tensors_of(batch)])
            return rows_of(batch, share)

        return iter(loader), part_of, None

    def _reads_samples(self, job: Job) -> bool:
        """Return whether this rank reads its samples of each batch only."""
        loader = self._loader
        if job.size == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        if type(loader).__iter__ is not DataLoader.__iter__:
            # It may change the batches, or end a pass by itself.
            return False
        return loader.batch_sampler is not None and not self._is_of_rank()

    def _is_of_rank(self) -> bool:
        """Return whether the loader yields this rank's batches already."""
        return isinstance(self._loader, DataLoader) and distributed_sampler(self._loader) is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Such as the length of sequences in the next epoch.
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __getitem__(self, index: Any) -> Any:
        """Return this rank's part of one batch of a list, or a loader of several."""
        batches: Any = self._loader
        if isinstance(index, slice):
            return type(self)(batches[index], self._config)
        return next(iter(type(self)([batches[index]], self._config)))

    def _job(self) -> Job:
        return join(self._config.checks.timeout, self._config.mesh.placement, ranks_of_row(self._config))

    def _share(self, job: Job) -> Share:
        """Return which part of each batch is this rank's."""
        sbp = rows_on(self._config, job.mesh)
        parts = piece_count(sbp, job.mesh)
        return Share(local_start((parts,), sbp, job.mesh)[0], parts, self._config.virtual_ranks)

    def _check_sampler(self, sampler: DistributedSampler[Any], job: Job) -> None:
        share = self._share(job)
        if share.parts < job.size and (sampler.rank, sampler.num_replicas) != (share.part, share.parts):
            raise InputError(
                f"the DistributedSampler of a prepared loader has num_replicas={sampler.num_replicas}, "
                f"rank={sampler.rank}, but the {job.size} ranks hold {share.parts} part(s) of each batch, and this "
                f"rank part {share.part}: ranks that split a sequence must read the same rows\n"
                f"Give it num_replicas={share.parts}, rank={share.part}, or leave the sampler out: a prepared loader "
                "splits the batches itself."
            )

    def reading(self, collate: Callable[[Part], Any]) -> DataLoader[Any]:
        """Return a loader of what a function makes of this rank's part of each batch."""
        whole: Any = self._loader
        job, batches = self._job(), whole.batch_sampler
        share = self._share(job)
        if isinstance(whole.dataset, IterableDataset):
            make = functools.partial(_part_of_whole, whole.collate_fn, share, collate)
            return with_others(whole, collate_fn=make)
        return with_others(
            whole,
            dataset=Reader(whole, share, job),
            batch_sampler=batches if isinstance(batches, Samples) else Samples(batches),
            collate_fn=collate,
            worker_init_fn=functools.partial(_begin_worker, whole.worker_init_fn),
            # Those of one process, in which ranks agree.
            in_order=True,
        )

    def _of_samples(self, loader: DataLoader[Any], first: int) -> tuple[Iterator[Any], Reader]:
        """Read this rank's samples of each batch from a first one on, in the order of rank 0's random numbers."""
        if self._reading is None or not loader.persistent_workers:
            self._reading = self.reading(Part._make)
        local: Any = self._reading
        local.batch_sampler.first = first
        batches = iter(local)
        for _ in range(first):
            # Samplers draw their order, and workers note what they have not read.
            next(batches)
        return batches, local.dataset


class SplitLoader(RowsLoader):
    """A :class:`RowsLoader` with a position.

    :meth:`state_dict` is the position in the running pass, which is the same on any number of ranks.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position: how many batches of the pass were yielded, and the generators' states at its start.

        An iterable with a ``state_dict()`` of its own that is no ``DataLoader`` returns that.
        """
        if self._has_own_position():
            state: dict[str, Any] = self._loader.state_dict()  # type: ignore[attr-defined]
            return state
        now = [one.get_state() for one in data.generators_of(self._loader)]
        return {"passes": self._passes - (self._taken > 0), "batches": self._taken, "generators": self._at_start or now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position: the next iteration yields the rest of the pass.

        It reads the batches again that were yielded, and drops them; of a map-style dataset, on several ranks, it does
        not read them. Load the checkpoint first, which has the state of torch's generator.

        Raises:
            ConfigError: the position is of a loader with other random generators.
        """
        if self._has_own_position():
            self._loader.load_state_dict(state)  # type: ignore[attr-defined]
            return
        if len(state["generators"]) != len(data.generators_of(self._loader)):
            raise ConfigError("the position is of a loader with other random generators")
        self._passes, self._taken, self._resumed = state["passes"], state["batches"], state["batches"] > 0
        if self._resumed:
            self._at_start = state["generators"]
        else:
            data.restore_generators(self._loader, state["generators"], but_default=True)

    def _has_own_position(self) -> bool:
        return not isinstance(self._loader, DataLoader) and data.is_stateful(self._loader)


class _Pass:
    """One pass over a loader, which counts what it yields. After an error it goes on, if the loader's does."""

    def __init__(self, owner: RowsLoader) -> None:
        self._owner, self._job, resumed = owner, owner._job(), owner._resumed
        if self._job.size > 1 and not owner._is_of_rank():
            same_generators(owner._loader, self._job)
        here = noise.states()
        if resumed:
            data.restore_generators(owner._loader, owner._at_start or ())
        else:
            owner._taken, owner._at_start = 0, [one.get_state() for one in data.generators_of(owner._loader)]
        owner._resumed, owner._passes = False, owner._passes + 1
        self._batches, self._part_of, self._reader = owner._begun(self._job, owner._taken)
        self._number = owner._taken if self._reader is not None else 0
        with contextlib.suppress(StopIteration):
            while self._number < owner._taken:
                self._read()
        if resumed:
            # It continues where it is: the checkpoint has its state.
            noise.restore(here)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._owner._thread != threading.get_ident() and self._job.size > 1:
            raise InputError(
                "a thread reads a prepared loader that was prepared in another one: what ranks exchange for each batch "
                "would mix with what the loop exchanges\nRead it in the loop's thread. DataLoader(num_workers=1) reads "
                "ahead in a process."
            )
        try:
            batch = self._read()
        except StopIteration:
            self._owner._taken, self._owner._at_start = 0, None
            raise
        self._owner._taken += 1
        return batch

    def _read(self) -> Any:
        """Return this rank's part of the next batch. A collective if the loader's batches are those of all ranks."""
        number, self._number = self._number, self._number + 1
        if self._part_of is None:
            return next(self._batches)
        try:
            batch = next(self._batches)
        except BaseException as error:
            if self._reader is not None and self._reader._has_failed:
                raise
            if isinstance(error, StopIteration):
                # Another rank may have a batch, and wait.
                agree_on_batch(self._job, number, "none:", "the loader has ended")
            else:
                # The other ranks have read theirs, and wait.
                agree_on_batch(self._job, number, "", None, error)
            raise
        return self._part_of(number, batch)


def whole_batches(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """Return a loader of whole batches, each of as many batches of a framework's loader as there are ranks.

    An iterable dataset may make batches itself, which are whole ones.

    Raises:
        InputError: the samples of a loader make no batches.
    """
    if loader.batch_sampler is None:
        if isinstance(loader.dataset, IterableDataset):
            return loader
        raise InputError(
            "a DataLoader with batch_size=None has no batches to split between the ranks: give it a batch_size"
        )
    samples, init = Samples(loader.batch_sampler, ranks), loader.worker_init_fn
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        # A framework would let the workers of each rank draw other numbers.
        init = functools.partial(init, rank=0)
    size = None if loader.batch_size is None else loader.batch_size * ranks
    return with_others(loader, batch_size=size, batch_sampler=samples, worker_init_fn=init)


def with_others(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other attributes, which a loader lets no one set, and workers of its own."""
    other = copy.copy(loader)
    vars(other).update(attributes, _iterator=None)
    return other


def distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the sampler of a loader, or of its batch sampler, if it draws this rank's samples already."""
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return next((one for one in samplers if isinstance(one, DistributedSampler)), None)


class _Indices(list[Any]):
    """The samples of a whole batch, and its number.

    Attributes:
        number: the number of the batch in the pass.
        is_before: the batch is before the position where the pass goes on: it is not read.
    """

    number: int
    is_before: bool


class Samples(BatchSampler):
    """The samples of whole batches.

    Attributes:
        first: number of the first batch to read.

    Args:
        batches: the batch sampler.
        joined: how many of its batches in a row make a whole one.
    """

    def __init__(self, batches: Any, joined: int = 1) -> None:
        self.batch_sampler, self.drop_last = batches, bool(getattr(batches, "drop_last", False))
        self.sampler = getattr(batches, "sampler", batches)
        self.batch_size = (getattr(batches, "batch_size", None) or 1) * joined
        self._joined, self.first = joined, 0

    def __iter__(self) -> Iterator[list[Any]]:
        # Lists, since a batch sampler may yield the same one again. A generator, since islice() would begin anew.
        batches = (list(one) for one in self.batch_sampler)
        for number in itertools.count():
            parts = list(itertools.islice(batches, self._joined))
            if not parts or (len(parts) < self._joined and self.drop_last):
                return
            samples = _Indices(itertools.chain(*parts))
            samples.number, samples.is_before = number, number < self.first
            yield samples

    def __len__(self) -> int:
        whole, more = divmod(len(self.batch_sampler), self._joined)
        return whole + (more > 0 and not self.drop_last)


class Part(NamedTuple):
    """The part of a batch that a rank has read.

    Attributes:
        rows: the part.
        facts: the samples of the whole batch; of an iterable dataset shapes and hashes of its tensors.
        draws: a worker has found that random numbers are drawn.
        is_agreed: the ranks have compared the samples.
    """

    rows: Any
    facts: Any
    draws: bool = False
    is_agreed: bool = False

    def agreed(self, job: Job) -> Any:
        """Return the rows if the ranks have read parts of the same batch. A collective, unless they have agreed."""
        if isinstance(self.facts, _Indices):
            if not self.is_agreed:
                _agree_on_samples(job, self.facts, self.draws)
        else:
            agree_on_batch(job, None, "shapes and values", self.facts)
        return self.rows


class Reader(Dataset[Any]):
    """Read and collate one part of each batch, in the loader's process or in one of its workers.

    If the collator only stacks samples, it reads those of its part. Random numbers of samples are those of one process,
    which depend on all samples before: once reading has moved a generator, it reads all samples. The first batch shows
    it mostly, of which it reads all samples. Else a worker reads from its start what it has left out. In the loader's
    process the ranks tell each other when they have read a batch, and read it once more if it was moved on one of them:
    a framework may read ahead.

    Other attributes are the dataset's, since frameworks show the dataset of a loader.

    Args:
        loader: has the dataset and the collator.
        share: the part.
        job: the ranks. A worker exchanges nothing with others.
    """

    def __init__(self, loader: DataLoader[Any], share: Share, job: Job) -> None:
        self._dataset, self._share, self._job = loader.dataset, share, job
        self._only_stacks = share.parts > 1 and only_stacks(loader.collate_fn)
        self._collate = loader.collate_fn
        # It reads all samples of each batch from now on.
        self._reads_all = not self._only_stacks or not _reads_each_alone(loader.dataset)
        # Their samples draw nothing, but a collator may.
        is_plain = type(loader.dataset) is torch.utils.data.TensorDataset or noise.is_plain(loader.dataset)
        self._is_watching = share.parts > 1 and not (is_plain and self._only_stacks)
        self._generators: list[GeneratorFunctions] | None = None
        # Their states before the first batch.
        self._at_start: list[Generator] = []
        # The batches that a worker has not read, or in part only.
        self._missed: list[list[Any]] = []
        # The ranks know that one of them could not read the last batch.
        self._has_failed = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_job": None}

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, samples: _Indices) -> Part:
        """Return this part of a batch. A collective in the loader's process."""
        if samples.is_before:
            self._missed.append(samples)
            return Part(None, samples, is_agreed=True)
        if get_worker_info() is not None:
            return self._read_in_worker(samples)
        return Part(self._read_with_others(samples), samples, is_agreed=True)

    def _read_with_others(self, samples: _Indices) -> Any:
        self._has_failed, reads_all, before = False, self._reads_all, list[Generator]()
        rows, has_moved, problem = None, False, None
        try:
            if self._is_watching and not reads_all:
                reads_all, before = self._watched()
            rows = self._read(samples, reads_all)
            has_moved = not self._reads_all and any(one.has_moved() for one in before)
        except BaseException as error:
            problem = error
        try:
            if _agree_on_samples(self._job, samples, has_moved, problem):
                self._reads_all = True
                if not reads_all:
                    restore_generators(before)
                    rows = self._read(samples, True)
        except BaseException:
            self._has_failed = True
            if before and not self._reads_all:
                restore_generators(before)
            raise
        return rows

    def _read_in_worker(self, samples: _Indices) -> Part:
        if not self._is_watching:
            return Part(self._read(samples, self._reads_all), samples)
        reads_all, before = self._watched()
        was_known, rows = self._reads_all, self._read(samples, reads_all)
        if not any(one.has_moved() for one in before):
            self._missed += [] if reads_all else [samples]
            return Part(rows, samples)
        self._is_watching, self._reads_all = False, True
        if self._missed or not reads_all:
            restore_generators(self._at_start)
            for missed in self._missed:
                self._read(missed, True)
            rows = self._read(samples, True)
            self._missed.clear()
        return Part(rows, samples, draws=not was_known)

    def _watched(self) -> tuple[bool, list[Generator]]:
        """Return whether to read all samples of the next batch, and the generators before it."""
        if self._generators is not None:
            return self._reads_all, list(map(Generator, self._generators))
        self._generators, has_iterators = noise.generators_of(self._dataset)
        self._at_start = list(map(Generator, self._generators))
        self._reads_all |= has_iterators
        return True, self._at_start

    def _read(self, samples: list[Any], reads_all: bool) -> Any:
        if not self._only_stacks:
            return rows_collated(self._collate, self._share, self._fetched(samples))
        mine = self._share.rows(len(samples))
        if reads_all:
            found = self._fetched(samples)
            own = found[mine] or found[:1]
        else:
            own = self._fetched(samples[mine] or samples[:1])
        batch = with_texts(self._collate(own))
        # A part without rows is like another one.
        return batch if samples[mine] else rows_of(batch, Share(1, 2))

    def _fetched(self, samples: list[Any]) -> Any:
        at_once = getattr(self._dataset, "__getitems__", None)
        return [self._dataset[one] for one in samples] if at_once is None else at_once(samples)


def _part_of_whole(collate: Callable[[Any], Any], share: Share, make: Callable[[Part], Any], samples: Any) -> Any:
    """Make something of this rank's part of a batch of an iterable dataset, which every rank reads whole."""
    batch, count = collate(samples), len(samples) if isinstance(samples, list) else 0
    if share.parts == 1:
        return make(Part(batch, []))
    return make(Part(rows_of(batch, share, count), [_facts(one) for one in tensors_of(batch)]))


def _reads_each_alone(dataset: Any) -> bool:
    """Return whether a sample of a dataset does not depend on those that are read with it."""
    if type(dataset) is torch.utils.data.Subset:
        return _reads_each_alone(dataset.dataset)
    # That of Hugging Face's datasets transforms them together if the script has given it a transform.
    is_known = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] != "custom"
    return is_known or not hasattr(dataset, "__getitems__")


def _begin_worker(init: Callable[[int], Any] | None, worker: int) -> None:
    """Show a loader's worker the script's own dataset, and call the script's own ``worker_init_fn``."""
    info: Any = get_worker_info()
    # Past __setattr__, which refuses.
    object.__setattr__(info, "dataset", info.dataset._dataset)
    if init is not None:
        init(worker)


def same_generators(loader: Any, job: Job) -> None:
    """Let samplers and datasets draw the same numbers on all ranks: those of rank 0."""
    for generator in data.generators_of(loader):
        own = digest(generator.get_state().tolist()) % 2**62
        if _differ(job, own):
            generator.manual_seed(broadcast_number(job, generator.initial_seed() % 2**62 ^ own))
    # A script may have seeded one of them.
    seeds: tuple[Callable[[int], None], ...] = (random.seed, numpy.random.seed)
    for state, seed in zip(noise.states()[1:], seeds, strict=True):
        own = digest(comparable(state)) % 2**32
        if _differ(job, own):
            seed(broadcast_number(job, own))


def _differ(job: Job, number: int) -> bool:
    return len({one[0] for one in agree(job, "a prepared loader", 0, dict, None, (number,))}) > 1


def _agree_on_samples(job: Job, samples: _Indices, draws: bool, problem: BaseException | None = None) -> bool:
    """Raise as :func:`agree_on_batch` does. Return, with a warning, whether a rank draws random numbers for samples."""
    if not agree_on_batch(job, samples.number, "samples", list(samples), problem, draws):
        return False
    world().warn(
        "the dataset of a prepared loader draws random numbers or counts for its samples: every rank reads all samples "
        "of each batch, so that they are those of one process\nTo have each rank read its own samples only, draw by a "
        "generator that is seeded with the sample's index, or in the loop, for whole batches."
    )
    return True


def agree_on_batch(
    job: Job, number: int | None, what: str, facts: Any, problem: BaseException | None = None, flag: bool = False
) -> bool:
    """Raise unless the facts about a batch are equal on all ranks, and none has a problem; return if a flag is set."""
    doing = "a batch of a prepared loader" if number is None else f"batch {number + 1} of a prepared loader"
    flags = agree(
        job, doing, digest((what, facts)), lambda: {"the batch": f"{what} {facts}"[:200]}, problem, (int(flag),)
    )
    return any(one for (one,) in flags)


def _facts(values: torch.Tensor | numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
    if not isinstance(values, torch.Tensor):
        return values.shape, digest(values.tolist())
    return tuple(values.shape), int(hash_bits(values.to_dense()))
