"""Train on the ranks that are there: after a loss of ranks the others go on from snapshots in their memory.

Every few steps each rank copies its part of a checkpoint into its memory, and another rank, its *buddy*, keeps a copy:
one of another host, where there is one. If ranks are lost, those that are left form a new generation
(``runtime.job.elastic``), load their shards of the newest snapshot of which all parts are there from each other's
memory, and compute the steps since then again.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zerograph import _torch
from zerograph.data import batches, is_stateful
from zerograph.errors import CommunicationError, ConfigError, RankMismatchError
from zerograph.graph import ZeroGraph
from zerograph.loops.loaders import SplitLoader, distributed_sampler, same_generators
from zerograph.loops.loop import Loop
from zerograph.loops.loop_graph import LoopGraph
from zerograph.loops.prepare import loop_of
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.remote import folder_of
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.runtime.job import elastic as generations
from zerograph.runtime.job.channel import hang_up
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.launchers import number_of
from zerograph.runtime.job.process_group import Job, abandon, agree, end_exchanges, new_group
from zerograph.runtime.state import store_of
from zerograph.state.checkpoint import state_of
from zerograph.state.checkpoint.document import decode
from zerograph.state.checkpoint.folder import holds_checkpoints
from zerograph.state.checkpoint.load import open_checkpoint
from zerograph.state.checkpoint.snapshot import packed, snapshot_reader

# The tag of a copy that is sent to its buddy.
_TAG = 47
# Steps to the second snapshot, and the most that snapshots may take of the time.
_FIRST, _SHARE = 10, 0.02
# Failures in a row, without a lost rank and without a further step, that are worth another try.
_MOST_FALSE_ALARMS = 3


class _Label(NamedTuple):
    """A snapshot: the steps done, the generation that took it, and its number of ranks. Later ones are greater."""

    steps: int
    generation: int
    ranks: int


class _MoreRanksError(Exception):
    """More ranks wait to take part."""


def elastic(
    train_step: Callable[[int, Any], object],
    step: ZeroGraph | nn.Module,
    loader: Iterable[Any],
    *,
    epochs: int = 1,
    snapshot_every: int | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    losses_per_hour: float = 1.0,
) -> None:
    """Call ``train_step(number, batch)`` for each batch, on the ranks that are there.

    Under ``zerograph launch --elastic`` a job goes on when ranks are lost, and with more ranks when others come. What
    is computed since the last snapshot is computed again then: ``train_step`` is called again with the same numbers and
    the same whole batches, of which each rank may have other rows. In other jobs this is a loop over the loader.

    Args:
        train_step: runs the graph once: ``lambda number, batch: step(*batch)``. It is called with the number of the
            step, from 1, and with this rank's rows. All that it changes besides the graph's state is its own business.
            Of a prepared module it is the body of the loop, from the call of the model to ``optimizer.zero_grad()``,
            and gets a global tensor, as from a prepared loader.
        step: the graph; or a prepared module, with the optimizers and schedulers that were prepared with it. On the
            CPU.
        loader: yields whole batches, as in a script of one process: a ``DataLoader`` or another iterable. Every rank
            reads its rows of them.
        epochs: how often the loader is read.
        snapshot_every: steps from one snapshot to the next: the most that are computed again. None: by the measured
            times of a snapshot and of a step and ``losses_per_hour``, and at most 2 % of the time.
        checkpoints: a folder of checkpoints. The job begins with the latest in it, if there is one, and goes on from it
            if ranks were lost that held the only copies of a part of the state.
        save_every: steps from one checkpoint to the next, of which two are kept.
        losses_per_hour: how often the job loses ranks, as far as you know. More losses are worth more snapshots.

    Raises:
        ConfigError: an argument, the loader or the graph does not suit an elastic job.
        CommunicationError: ranks are lost, and neither copies of the state in memory nor a checkpoint are left; or too
            few ranks.
    """
    if any(count is not None and count < 1 for count in (epochs, snapshot_every, save_every)):
        raise ConfigError("zg.elastic(): epochs, snapshot_every and save_every are whole numbers from 1 up")
    if not 0 < losses_per_hour < math.inf:
        raise ConfigError(f"zg.elastic(): losses_per_hour={losses_per_hour} is not a number above 0")
    if save_every is not None and checkpoints is None:
        raise ConfigError("zg.elastic(): save_every needs a folder, checkpoints=")
    loop = None
    if isinstance(step, nn.Module):
        loop = loop_of(step)
        if loop is None:
            raise ConfigError(f"zg.elastic() of a {type(step).__name__} that zg.prepare() has not prepared")
        step = loop.graph(*loop.optimizers)
        scheduled = {id(one.optimizer) for one in loop.schedulers}
        for optimizer in loop.optimizers:
            # A scheduler has written it.
            if "initial_lr" in optimizer.param_groups[0] and id(optimizer) not in scheduled:
                raise ConfigError("zg.elastic(): a snapshot needs the scheduler too: pass it to zg.prepare()")
    elif isinstance(step, LoopGraph):
        raise ConfigError("zg.elastic() of zg.step_of(): pass the prepared module, whose loop it then knows")
    _check(step, loader)
    _Loop(train_step, step, loop, loader, epochs, snapshot_every, checkpoints, save_every, losses_per_hour).run()


def _check(step: ZeroGraph, loader: Any) -> None:
    """Check that the loader yields the same batches on any number of ranks, and that the state can be copied.

    Raises:
        ConfigError: it does not, or cannot.
    """
    if isinstance(loader, (batches, SplitLoader)) or (isinstance(loader, DataLoader) and distributed_sampler(loader)):
        raise ConfigError(
            "zg.elastic() takes a loader of whole batches: the loader of zg.batches() or zg.prepare(), or one with a "
            "DistributedSampler, has this rank's rows of a fixed number of ranks\nPass the DataLoader of one process."
        )
    if isinstance(loader, Iterator):
        raise ConfigError(
            "zg.elastic(): an iterator yields each batch once, and batches are read again after a loss of ranks\n"
            "Pass a DataLoader, or an iterable that begins anew each time."
        )
    if not isinstance(loader, DataLoader) and is_stateful(loader):
        raise ConfigError("zg.elastic(): a loader with a state_dict() of its own may depend on the number of ranks")
    config = step.config
    if config.zero.stage == "auto":
        raise ConfigError("zg.elastic(): stage = 'auto' is chosen for one number of ranks: set a stage")
    if config.mesh.placement is not None or max(config.mesh.context_parallel, config.mesh.expert_parallel) > 1:
        raise ConfigError("zg.elastic(): a placement, context_parallel or expert_parallel fixes the number of ranks")
    offload = config.memory.offload
    if any(to is not None and to.device == "nvme" for to in (offload.optimizer, offload.parameters)):
        raise ConfigError("zg.elastic(): state in files (nvme) cannot be shared out again between other ranks")
    if any(parameter.device.type != "cpu" for parameter in step._members().parameters.values()):
        raise ConfigError("zg.elastic(): ranks come and go over gloo, on CPUs: the model is on another device")


@dataclass(eq=False)
class _Loop:
    """A loop of :func:`elastic`; its arguments, and where it is.

    Attributes:
        loop: the loop whose state the graph has; None: the graph is the step.
        steps, epoch: the steps and passes done.
        held: by snapshot the parts that this rank has, by the rank that they are of.
        group: sends snapshots; None on one rank.
        sending: the snapshot that is being sent.
        due: the step after which the next snapshot is taken.
        times: seconds of the last steps.
        sent_in: seconds that sending the last snapshot took.
    """

    train_step: Callable[[int, Any], object]
    step: ZeroGraph
    loop: Loop | None
    whole_batches: Iterable[Any]
    epochs: int
    snapshot_every: int | None
    checkpoints: str | os.PathLike[str] | None
    save_every: int | None
    losses_per_hour: float
    steps: int = 0
    epoch: int = 0
    held: dict[_Label, dict[int, Tensor]] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    sending: Future[None] | None = None
    due: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_FIRST))
    sent_in: float = 0.0
    loader: SplitLoader = field(init=False)

    def run(self) -> None:
        """Train until all ranks have done all steps."""
        self.worker = generations.worker()
        if self.worker is None:
            self._begin()
            return self._train()
        self.worker.hang_up = self._hang_up
        alarms, furthest = 0, -1
        while True:
            try:
                self._enter()
                return self._train()
            except _MoreRanksError:
                why = "more ranks take part"
            except generations.JobLostError:
                raise
            except RuntimeError as error:
                is_loss = isinstance(error, CommunicationError)
                # A rank that has raised an error, which the others have as this one, ends some seconds later.
                waits = 10.0 if isinstance(error, RankMismatchError) else 1.0
                is_broken = self.worker.is_broken(waits * (not is_loss))
                # The failure before was a loss that the launcher had not seen yet.
                alarms *= not self.worker.generation.after_loss
                alarms = 0 if is_broken or self.steps > furthest else alarms + 1
                furthest = max(furthest, self.steps)
                if not is_broken and (not is_loss or alarms >= _MOST_FALSE_ALARMS):
                    raise
                why = f"{error}".splitlines()[0]
            self._leave(why)

    def _hang_up(self) -> None:
        hang_up(self.group)
        end_exchanges()

    def _print(self, text: str) -> None:
        """Print a line on the first rank."""
        if dist.is_initialized() and dist.get_rank() == 0:
            print(f"zerograph: {text}", file=sys.stderr, flush=True)

    def _leave(self, why: str) -> None:
        self._print(f"after step {self.steps}: {why}")
        hang_up(self.group)
        if self.sending is not None:
            # Its thread ends with an error now. It may not keep the others waiting.
            wait([self.sending], timeout=5.0)
        self.sending = self.group = None
        if self.loop is None:
            self.step._leave_job()
        else:
            self.loop.leave_job()
        abandon(f"a step, to form a new generation: {why}")
        # Exceptions refer to the groups, whose threads would go on.
        gc.collect()
        _torch.forget_sources()

    def _enter(self) -> None:
        """Join the next generation and load the newest snapshot.

        Raises:
            JobLostError: the others have finished, and this rank has not.
        """
        worker, virtual = self.worker, self.step.config.virtual_ranks
        assert worker is not None
        while True:
            generation = worker.next_generation(virtual)
            if generation is None:
                if worker.number not in worker.generation.workers[: worker.generation.ranks]:
                    # Spare, or started in place of a lost rank, and not needed any more.
                    raise SystemExit(0)
                raise generations.JobLostError("a rank was lost at the end: the others had finished before this one")
            try:
                worker.enter(len(generation.workers), "exchange")
                snapshot = self._exchange(generation.ranks)
                if len(generation.workers) > generation.ranks:
                    abandon("the exchange of snapshots")
                if generation.workers.index(worker.number) >= generation.ranks:
                    continue
                if not dist.is_initialized():
                    worker.enter(generation.ranks, "training")
            except RuntimeError as error:
                raise CommunicationError(f"a rank was lost while a generation was formed: {error}") from error
            self._begin(snapshot)
            return

    def _exchange(self, ranks: int) -> tuple[_Label, list[list[int]]] | None:
        """Return the newest snapshot of which the ranks have all parts, and of each part the ranks that have it."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, [(label, sorted(parts)) for label, parts in self.held.items()])
        holders: dict[_Label, dict[int, list[int]]] = {}
        for rank, labels in enumerate(everybody[:ranks]):
            for label, origins in labels:
                for origin in origins:
                    holders.setdefault(label, {}).setdefault(origin, []).append(rank)
        whole = [label for label, parts in holders.items() if len(parts) == label.ranks]
        return (max(whole), [ranks for _, ranks in sorted(holders[max(whole)].items())]) if whole else None

    def _begin(self, snapshot: tuple[_Label, list[list[int]]] | None = None) -> None:
        """Load the snapshot, else the latest checkpoint; at the beginning of a job share rank 0's parameters."""
        job = self.step._join()
        self.times.clear()
        if self.worker is not None and job.size > 1:
            self.group = new_group(job.timeout, "gloo")
        if self.loop is None:
            self.loader = SplitLoader(self.whole_batches, self.step.config)
        else:
            self.loader = self.loop.loader(self.whole_batches)
        worker = self.worker
        if snapshot is not None:
            label, holders = snapshot
            reader: Reader | None = snapshot_reader(job, self.held.get(label, {}), holders)
            source = "the snapshot in memory"
        else:
            reader, source = self._checkpoint(), f"the checkpoint in {self.checkpoints}"
        if reader is not None:
            self._load(job, reader)
            generation = f"generation {worker.generation.number}, " if worker is not None else ""
            self._print(f"{generation}{job.size} rank(s): on from step {self.steps}, from {source}")
            return
        if worker is not None and worker.has("began"):
            raise worker.job_lost(
                "ranks are lost with the only copies of a part of the state, and there is no checkpoint\n"
                "Give zg.elastic(checkpoints=folder, save_every=steps), or more ranks."
            )
        self._advise()
        members = self.step._adopted()
        plain = [one.data for one in members.parameters.values() if store_of(one) is None]
        broadcast_from(job, [*plain, *members.buffers.values()])
        if worker is not None:
            # Some have one from an earlier generation, which has not come so far as to keep a snapshot.
            self.step._seed = None
        self.step._share_seed(job)
        if job.size > 1:
            same_generators(self.whole_batches, job)

    def _advise(self) -> None:
        """Say what a start without a checkpoint means where torchrun starts all ranks anew."""
        restarts, most = number_of("TORCHELASTIC_RESTART_COUNT", 0), number_of("TORCHELASTIC_MAX_RESTARTS", 0)
        if self.worker is None and restarts and most:
            self._print(
                f"torchrun has started the ranks anew ({restarts} of {most}), and nothing is saved: on from step 0"
            )
        elif self.worker is None and most and self.save_every is None:
            self._print(
                "torchrun starts all ranks anew when one is lost, and zg.elastic() then goes on from a checkpoint: "
                "give it checkpoints=folder, save_every=steps"
            )

    def _checkpoint(self) -> Reader | None:
        """Return a reader of the latest checkpoint; None if nothing has been saved.

        Raises:
            CheckpointError: a checkpoint is damaged.
        """
        if self.checkpoints is None:
            return None
        folder = folder_of(self.checkpoints)
        if not holds_checkpoints(folder) and not (folder / index.NAME).exists():
            return None
        return open_checkpoint(self.checkpoints)

    def _load(self, job: Job, reader: Reader) -> None:
        if "elastic" not in reader.index.document:
            raise generations.JobLostError(f"zg.elastic() has not saved the checkpoint in {self.checkpoints}")
        self.step.load(reader)
        position = decode(reader.index.document["elastic"])
        self.steps, self.epoch = position["steps"], position["epoch"]
        # Of ranks that are new the first rank's.
        names = [f"generators.{rank}.cpu" for rank in (job.rank, 0)]
        torch.set_rng_state(reader.whole(next(name for name in names if name in reader.index.tensors)))
        for scheduler, state in zip(self._schedulers(), position["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.loader.load_state_dict(position["loader"])

    def _train(self) -> None:
        """Do the steps that are left, and end with all ranks."""
        job = self.step._join()
        self._snapshot(job)
        # After a loss the snapshot before this one is still there.
        if self.worker is not None and not self.worker.has("began"):
            self._wait()
            self.worker.tell("began")
        while self.epoch < self.epochs:
            for batch in self._batches(job):
                start = time.monotonic()
                self.train_step(self.steps + 1, batch)
                self.times.append(time.monotonic() - start)
                self.steps += 1
                if self.loop is not None:
                    self._end_step(self.loop)
                if self.save_every and self.steps % self.save_every == 0:
                    self._save()
            self.epoch += 1
        if self.worker is not None:
            self._wait()
            agree(job, "the end of zg.elastic()", 0, dict)
            self.worker.finish()

    def _end_step(self, loop: Loop) -> None:
        """Check that all state of the loop is in what a snapshot holds.

        Raises:
            ConfigError: gradients are left, or there is a gradient scaler.
        """
        if any(map(loop.has_gradient, loop._watched)):
            raise ConfigError(
                "zg.elastic(): gradients are left after train_step, which a snapshot does not hold\n"
                "Accumulate inside of one call of train_step, and end it with optimizer.zero_grad()."
            )
        if loop.is_scaled:
            raise ConfigError("zg.elastic(): a snapshot does not hold the state of a GradScaler: compute in bf16")
        # Splits parameters that the step has made whole.
        loop.graph()

    def _batches(self, job: Job) -> Iterator[Any]:
        """Yield the batches that are left of the pass; take snapshots between them."""
        iterator = iter(self.loader)
        while True:
            if self.steps >= self.due:
                self._snapshot(job)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def _schedulers(self) -> Sequence[LRScheduler]:
        """Return the schedulers that the loop steps; those of a graph are part of its state."""
        return () if self.loop is None else self.loop.schedulers

    def _position(self) -> dict[str, Any]:
        schedulers = [one.state_dict() for one in self._schedulers()]
        position = {"steps": self.steps, "epoch": self.epoch, "loader": self.loader.state_dict()}
        return {"elastic": {**position, "schedulers": schedulers}}

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.step._position = self._position
        try:
            self.step.save(self.checkpoints, keep=2)
        finally:
            self.step._position = dict

    def _snapshot(self, job: Job) -> None:
        """Copy this rank's part of the state, and begin to send it to the buddy. The next steps need not wait for it.

        Raises:
            _MoreRanksError: more ranks wait.
        """
        worker = self.worker
        if worker is None:
            return
        self._wait()
        start, problem = time.monotonic(), None
        part = torch.empty(0, dtype=torch.uint8)
        try:
            part = packed(*state_of(self.step._parts(), "", self._position()))
        except Exception as error:
            problem = error
        cost, step = time.monotonic() - start + self.sent_in, statistics.median(self.times or [0.0])
        facts = [part.numel(), int(worker.may_grow()), int(cost * 1e6), int(step * 1e6)]
        everybody = agree(job, f"the snapshot of step {self.steps}", self.steps, dict, problem, facts)
        sizes, grow, costs, steps = zip(*everybody, strict=True)
        self.due = self.steps + (self.snapshot_every or _interval(max(costs), max(steps), self.losses_per_hour))
        label = _Label(self.steps, worker.generation.number, job.size)
        self.held[label] = {job.rank: part}
        buddies = _buddies(worker.generation.hosts[: job.size])
        self.sending = Future[None]()
        sent = self.sending, label, sizes, buddies, self.group
        threading.Thread(target=self._send, args=sent, name="zerograph snapshot", daemon=True).start()
        if any(grow):
            self._wait()
            raise _MoreRanksError

    def _send(
        self,
        sending: Future[None],
        label: _Label,
        sizes: Sequence[int],
        buddies: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Exchange parts with the buddies; forget older snapshots once all ranks have this one."""
        try:
            if group is not None:
                start, rank = time.monotonic(), group.rank()
                work = group.send([self.held[label][rank]], buddies[rank], _TAG)
                origins = [origin for origin, buddy in enumerate(buddies) if buddy == rank]
                copies = {origin: torch.empty(sizes[origin], dtype=torch.uint8) for origin in origins}
                for origin, copy in copies.items():
                    group.recv([copy], origin, _TAG).wait()
                work.wait()
                self.held[label].update(copies)
                group.barrier().wait()
                self.sent_in = time.monotonic() - start
            self.held = {label: self.held[label]}
            sending.set_result(None)
        except BaseException as error:
            sending.set_exception(error)

    def _wait(self) -> None:
        """Wait until the last snapshot is with all ranks.

        Raises:
            CommunicationError: a rank was lost meanwhile.
        """
        sending, self.sending = self.sending, None
        if sending is not None:
            try:
                sending.result()
            except RuntimeError as error:
                raise CommunicationError(f"a rank was lost while a snapshot was sent: {error}") from error


def _buddies(hosts: Sequence[str]) -> list[int]:
    """Return the buddy of each rank: a rank of another host, each with as few parts as that allows.

    Ranks of the same host follow each other in a ring. A buddy is as far as the largest host has ranks, or one of the
    few that are not on a host with more than half of them. On a single host each rank counts as a host.

    Args:
        hosts: of each rank.
    """
    places: Sequence[str | int] = hosts if len(set(hosts)) > 1 else range(len(hosts))
    ring = sorted(range(len(places)), key=lambda rank: (places.index(places[rank]), rank))
    most = max(map(places.count, places))
    buddies = [0] * len(places)
    for at, rank in enumerate(ring):
        own = [other for other in ring if places[other] == places[rank]]
        first = ring.index(own[0])
        others = ring[first + len(own) :] + ring[:first]
        buddies[rank] = others[(at - first + most - len(own)) % len(others)] if others else rank
    return buddies


def _interval(cost: int, step: int, losses_per_hour: float) -> int:
    """Return the steps from a snapshot to the next, by Young's formula (J. W. Young, 1974), within the share of time.

    Args:
        cost, step: microseconds of a snapshot and of a step; 0: it is not known yet.
        losses_per_hour: of ranks, by the whole job.
    """
    if not step:
        return _FIRST
    return max(1, round(max(math.sqrt(2e6 * 3600 / losses_per_hour * cost), cost / _SHARE) / step))
