"""The state of training: counted, given out whole, taken back, written and read: asked of the graph itself."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.errors import InputError
from zerograph.ir.buckets import Bucket
from zerograph.ir.step_graph import nbytes
from zerograph.runtime.job.process_group import Job, agree, digest
from zerograph.runtime.state import Store, reshard, store_of, stored_bytes, stores_of, unshard
from zerograph.state import checkpoint, state_dict
from zerograph.state.checkpoint.save import Saver
from zerograph.state.threads import one_thread

P = ParamSpec("P")
R = TypeVar("R")


def interruptible(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Tell the other ranks when a method is interrupted in which they wait for this one."""

    def wrapped(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception:
                raise
            except BaseException as error:
                job: Job | None = vars(args[0]).get("_job")
                if job is not None:
                    job.signs.tell_interrupt(error, doing)
                raise

        return run

    return wrapped


class Stateful:
    """The part of :class:`zerograph.ZeroGraph` that keeps what training needs to go on, wherever it is held."""

    config: Config
    steps_done: int
    _optimizers: list[torch.optim.Optimizer]
    _schedulers: list[LRScheduler | None]
    # What the random numbers follow from, where config.seed does not say, and forward passes made so far.
    _seed: int | None
    _passes_done: int
    _saver: Saver

    def _join(self) -> Job:
        raise NotImplementedError

    def _members(self) -> Members:
        raise NotImplementedError

    def _adopted(self) -> Members:
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state that this rank holds in memory between steps, not those in files.

        The memory that stages 1 and 2 gather parameters into is there between steps, too.
        """
        plain = [parameter for parameter in self._members().parameters.values() if store_of(parameter) is None]
        return stored_bytes(self._stores()) + sum(map(nbytes, plain))

    @one_thread("state_dict()")
    @interruptible("reading the state")
    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, in whole tensors: ``modules`` by attribute, ``optimizers``, ``lr_schedulers``,
        ``grad_scaler``.

        Each of these is what ``state_dict()`` of the plain module, optimizer and scheduler would be; ``random`` is what
        the random numbers of the next step follow from. Every rank must call it, and gets all of it.

        Raises:
            RankMismatchError: the other ranks are about to do something else.
        """
        self._check_closed()
        held = [layout for store in self._stores() for layout in (store.layout, *store.layouts.values())]
        self._agree_to_gather("taking a state_dict()", held)
        return {
            "modules": state_dict.modules_state(self._adopted()),
            "optimizers": [state_dict.optimizer_state(optimizer) for optimizer in self._optimizers],
            "lr_schedulers": [None if one is None else one.state_dict() for one in self._schedulers],
            "steps_done": self.steps_done,
            "grad_scaler": None if self.config.scaler is None else self.config.scaler.state_dict(),
            "random": {
                "seed": self._seed if self.config.seed is None else self.config.seed,
                "passes": self._passes_done,
            },
        }

    @one_thread("load_state_dict()")
    @interruptible("loading a state")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, on any number of ranks. Every rank must call it.

        The random numbers go on as well, unless ``config.seed`` asks for others. What is left out stays as it is, so
        states of the plain module and optimizer load too, before and after the first call::

            step.load_state_dict({"modules": {"model": torch.load("model.pt")}})
            step.load_state_dict({"modules": {"model": ...}, "optimizers": [torch.load("optimizer.pt")]})

        Under ``"modules"`` there must be each that has parameters or buffers, under ``"optimizers"`` and
        ``"lr_schedulers"`` one for each optimizer (None for a scheduler: it stays as it is).

        Raises:
            ConfigError: the state does not fit; nothing is changed then, on any rank.
            RankMismatchError: it does not fit on another rank, or ranks have states of other counts.
        """
        self._check_closed()
        problem: BaseException | None = None
        whole: dict[str, Tensor] = {}
        facts: dict[str, str] = {}
        try:
            state_dict.check_state(self._optimizers, self._schedulers, state)
            if self.config.scaler is not None and state.get("grad_scaler") is not None:
                self.config.scaler.check_state(state["grad_scaler"])
            if "modules" in state:
                whole = state_dict.read_modules(self._adopted(), state["modules"])
            facts = {name: str(state.get(name)) for name in ("steps_done", "random")}
        except BaseException as error:
            problem = error
        agree(self._join(), "loading a state", digest(facts), lambda: facts, problem)
        if whole:
            state_dict.load_modules(self._adopted(), whole)
        for optimizer, saved in zip(self._optimizers, state.get("optimizers", ()), strict=False):
            state_dict.load_optimizer(optimizer, saved)
        for scheduler, saved in zip(self._schedulers, state.get("lr_schedulers", ()), strict=False):
            if scheduler is not None and saved is not None:
                scheduler.load_state_dict(saved)
        self.steps_done = state.get("steps_done", self.steps_done)
        if self.config.scaler is not None and state.get("grad_scaler") is not None:
            self.config.scaler.load_state_dict(state["grad_scaler"])
        # States of version 0.1 say nothing of random numbers.
        if "random" in state:
            self._seed, self._passes_done = state["random"]["seed"], state["random"]["passes"]

    @one_thread("save()")
    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int | None = None) -> None:
        """Write a checkpoint: each rank its part, in parallel. Every rank must call it, with a folder that all share.

        It has what training needs to go on, on any number of ranks and at any stage: parameters, buffers, the
        optimizers' state and hyperparameters, schedulers, loss scale, counts, and the state of torch's random
        generators of each rank. Until all of it is on the disk, what ``path`` held before is what it holds.

        Args:
            path: the folder. With ``keep`` it holds checkpoints, ``step-00000010`` for instance, and a file ``latest``.
            asynchronous: return once everything is copied, and write while training goes on; the next save, or
                :meth:`wait_for_save`, waits for it and raises what went wrong.
            keep: how many checkpoints to keep in ``path``, those saved last, whatever the clock says.

        Raises:
            CheckpointError: on every rank: it cannot be written, another job saves into ``path``, or ``path`` is a
                checkpoint and is to hold some, or the other way round. What was there is still there.
            ConfigError: a scheduler or optimizer has state that a checkpoint cannot hold.
        """
        self._check_closed()
        parts = self._parts()
        self._saver.save(
            self._join(),
            path,
            lambda: checkpoint.state_of(parts, self.config.shown()),
            asynchronous=asynchronous,
            keep=keep,
            steps_done=self.steps_done,
        )

    def wait_for_save(self) -> None:
        """Until a checkpoint that is written in the background is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saver.wait()

    @one_thread("load()")
    @interruptible("loading a checkpoint")
    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint that :meth:`save` wrote, or from the latest in a folder of them. Every rank calls it.

        If the file ``latest`` names a checkpoint that is not there, it is the newest whole one, with a warning.

        Compile the graph before, and each rank reads only what it is to hold; else parameters and state are whole until
        it is compiled.

        Raises:
            CheckpointError: there is none, or a file is missing or damaged.
            ConfigError: it is of another model or of other optimizers. Nothing is changed then, on any rank.
        """
        self._check_closed()
        self._saver.wait()
        counts = checkpoint.restore(self._join(), path, self._parts())
        self.steps_done, self._passes_done, self._seed = counts
        self._saver.forget()

    def _parts(self) -> checkpoint.Parts:
        seed = self._seed if self.config.seed is None else self.config.seed
        counts = (self.steps_done, self._passes_done, seed)
        return checkpoint.Parts(
            self._adopted(), self._optimizers, self._schedulers, self.config.scaler, counts, self._join()
        )

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """The graph's modules with whole parameters, to be used eagerly; changes made inside are kept.

        Every rank must enter it, and make the same changes.

        Raises:
            RankMismatchError: the other ranks are about to do something else.
        """
        with one_thread("full_parameters()"):
            stores = self._stores(self._adopted())
            opened = [store for store in stores if not store.is_unsharded]
            self._agree_to_gather("entering full_parameters()", [store.layout for store in opened])
            for store in opened:
                unshard(store)
        try:
            yield
        finally:
            with one_thread("the end of full_parameters()", collective=False):
                for store in opened:
                    reshard(store)

    def _agree_to_gather(self, doing: str, layouts: Iterable[Bucket]) -> None:
        """Raise on every rank if some ranks gather what is split and others do not."""
        if not all(layout.is_whole for layout in layouts):
            agree(self._join(), doing, 0, dict)

    def _check_closed(self) -> None:
        if any(store.is_unsharded for store in self._stores()):
            raise InputError("state_dict() and load_state_dict() do not work inside full_parameters(): leave it first")

    def _check_usable(self, stores: Iterable[Store]) -> None:
        for store in stores:
            if store.is_unsharded:
                raise InputError("the graph was called inside full_parameters(): leave it first")
            store.check_aliases()

    def _stores(self, members: Members | None = None) -> list[Store]:
        """The distinct stores of the graph's parameters, in the same order on all ranks."""
        return stores_of((members or self._members()).parameters.values())
