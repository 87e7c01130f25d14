"""Loaders whose batches are split between the ranks: the whole batch is that of the script in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from zerograph import data
from zerograph.compiler.input_layout import ranks_of_row, rows_on
from zerograph.config import Config
from zerograph.errors import ConfigError, InputError
from zerograph.ir.mesh import local_start, piece_count
from zerograph.loops import noise
from zerograph.loops.rows import RowsOf, Stacked, bounds, only_stacks, rows_of, tensors_of
from zerograph.runtime.job.exchange import broadcast_number
from zerograph.runtime.job.process_group import Job, agree, digest, join
from zerograph.runtime.tensor_hash import hash_bits


class SplitLoader:
    """Iterate over this rank's rows of each batch of a loader. Other attributes are the loader's.

    Ranks that hold the same rows, such as those that split each sequence, get the same.

    The batches are those that the loader yields in one process. Of a ``DataLoader`` of a map-style dataset with torch's
    own ``default_collate`` a rank reads its samples only. Another ``collate_fn`` may pad to the longest sample of a
    batch or draw random numbers: every rank reads and collates the whole batch. So does every rank for any other
    iterable, whose batches must be equal on all ranks. A loader with a ``DistributedSampler`` yields this rank's
    batches already.

    :meth:`state_dict` is the position in the running pass, which is the same on any number of ranks.
    """

    def __init__(self, loader: Iterable[Any], config: Config) -> None:
        self._loader, self._config = loader, config
        # Reads this rank's samples. It is kept if its workers are.
        self._reading: tuple[DataLoader[Any], _Part] | None = None
        self._passes, self._taken = 0, 0
        # The states of the random generators at the start of the running pass; the next pass is the rest of it.
        self._at_start: Sequence[torch.Tensor] | None = None
        self._resumed = False

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's part of each batch: of those that are left, if a position was loaded.

        Raises:
            RankMismatchError: the ranks' batches differ.
        """
        return _Pass(self)

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

    def _begun(self, first: int) -> Iterator[Any]:
        """Begin a pass; return its batches from the one of this number on."""
        loader: Any = self._loader
        job = self._job()
        if self._reads_samples(job):
            # At least one is read before, at which samplers draw their order.
            batches, before = self._of_samples(loader, max(first - 1, 0)), min(first, 1)
        elif job.size == 1:
            batches, before = iter(loader), first
        elif isinstance(loader, DataLoader) and (sampler := _distributed_sampler(loader)) is not None:
            self._check_sampler(sampler, job)
            batches, before = iter(data.batches(loader, timeout=self._config.timeout)), first
        else:
            batches, before = self._of_batches(loader), first
        for _ in range(before):
            next(batches, None)
        return batches

    def _reads_samples(self, job: Job) -> bool:
        """Return whether this rank reads its samples of each batch only."""
        loader = self._loader
        if job.size == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        return loader.batch_sampler is not None and _distributed_sampler(loader) is None

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

    def _of_samples(self, loader: DataLoader[Any], first: int) -> Iterator[Any]:
        """Read this rank's samples of each batch from a first one on, in the order of rank 0's random numbers."""
        job = self._job()
        if self._reading is None or not loader.persistent_workers:
            parts = self._parts(job)
            own = only_stacks(loader.collate_fn)
            mine = _Part(loader.batch_sampler, *(parts if own else (0, 1)))  # type: ignore[arg-type]
            collate = Stacked(loader.collate_fn) if own else RowsOf(loader.collate_fn, *parts)
            options = reading_options(loader)
            if own:
                options["worker_init_fn"] = noise.SeededWorker(parts[0], loader.worker_init_fn)
            self._reading = DataLoader(loader.dataset, batch_sampler=mine, collate_fn=collate, **options), mine
        local, mine = self._reading
        mine.first = first
        # Samples that this process reads. A TensorDataset draws nothing.
        draws = local.num_workers == 0 and mine.parts > 1 and type(loader.dataset) is not TensorDataset
        mine.noise = (torch.initial_seed(), self._passes) if draws else None

        def part_of(number: int, batch: Any) -> Any:
            indices, count = mine.read.pop(number)
            agree_on_batch(job, number, "samples", indices)
            return batch if count else rows_of(batch, 1, 2)

        return _Batches(job, iter(local), part_of, mine.restore, first)

    def _of_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        job = self._job()
        part, parts = self._parts(job)

        def part_of(number: int, batch: Any) -> Any:
            agree_on_batch(job, number, "shapes and values", [_facts(one) for one in tensors_of(batch)])
            return rows_of(batch, part, parts)

        return _Batches(job, iter(loader), part_of)


class _Pass:
    """One pass over a loader, which counts what it yields. After an error it goes on, if the loader's does."""

    def __init__(self, owner: SplitLoader) -> None:
        self._owner, resumed = owner, owner._resumed
        if owner._reads_samples(owner._job()):
            _same_generators(owner._loader, owner._job())  # type: ignore[arg-type]
        default = torch.get_rng_state()
        if resumed:
            data.restore_generators(owner._loader, owner._at_start or ())
        else:
            owner._taken, owner._at_start = 0, [one.get_state() for one in data.generators_of(owner._loader)]
        owner._resumed, owner._passes = False, owner._passes + 1
        self._batches = owner._begun(owner._taken)
        if resumed:
            # It continues where it is: the checkpoint has its state.
            torch.set_rng_state(default)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._owner._taken, self._owner._at_start = 0, None
            raise
        self._owner._taken += 1
        return batch


class _Batches:
    """Iterate over this rank's part of each batch. After an error of the loader the pass goes on, if the loader's does.

    Args:
        job: the ranks.
        batches: the loader's batches.
        part_of: returns this rank's part of the batch of a number.
        after: is called once a batch was read.
        first: number of the first batch.
    """

    def __init__(
        self,
        job: Job,
        batches: Iterator[Any],
        part_of: Callable[[int, Any], Any],
        after: Callable[[], None] = lambda: None,
        first: int = 0,
    ) -> None:
        self._job, self._batches, self._part_of, self._after = job, batches, part_of, after
        self._number = first - 1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._number += 1
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            # The other ranks have read theirs, and wait.
            agree_on_batch(self._job, self._number, "", None, error)
            raise
        finally:
            self._after()
        return self._part_of(self._number, batch)


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


class _Part:
    """The samples of each batch that one rank reads; a rank without any reads one, to know what a batch is like.

    Attributes:
        parts: number of parts.
        first: number of the first batch to read.
        read: the samples of each whole batch that was read, and how many of them the rank has.
        noise: what seeds the random numbers of the samples, besides the batch and the part. None: nothing does.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], part: int, parts: int) -> None:
        self._batches, self._part, self.parts, self.first = batches, part, parts, 0
        self.read: dict[int, tuple[Any, int]] = {}
        self.noise: Any = None
        self._before: tuple[Any, ...] | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        self.read.clear()
        for number, whole in enumerate(self._batches):
            if number < self.first:
                continue
            indices = list(whole)
            mine = indices[bounds(len(indices), self._part, self.parts)]
            self.read[number] = (indices, len(mine))
            if self.noise is not None:
                self._before = noise.states()
                noise.seed(digest((self.noise, number, self._part)))
            yield mine or indices[:1]

    def restore(self) -> None:
        """Restore the generators as they were before the samples of a batch were read."""
        if self._before is not None:
            noise.restore(self._before)
            self._before = None

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _same_generators(loader: DataLoader[Any], job: Job) -> None:
    """Let samplers draw the same order on all ranks: that of rank 0."""
    for generator in data.generators_of(loader):
        own = digest(generator.get_state().tolist()) % 2**62
        if len({one[0] for one in agree(job, "a prepared loader", 0, dict, None, (own,))}) > 1:
            generator.manual_seed(broadcast_number(job, generator.initial_seed() % 2**62 ^ own))


def agree_on_batch(job: Job, number: int, what: str, facts: Any, problem: BaseException | None = None) -> None:
    """Raise unless the facts about a batch are equal on all ranks, and none has a problem."""
    doing = f"batch {number + 1} of a prepared loader"
    agree(job, doing, digest(facts), lambda: {what: f"{facts}"[:200]}, problem)


def _facts(values: torch.Tensor | numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
    if not isinstance(values, torch.Tensor):
        return values.shape, digest(values.tolist())
    return tuple(values.shape), int(hash_bits(values.to_dense()))
