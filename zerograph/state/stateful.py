"""The methods of a graph that return, load, save and restore its training state."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.input_layout import ranks_of_row
from zerograph.compiler.members import Members
from zerograph.compiler.steps import Steps
from zerograph.config import Config
from zerograph.errors import ConfigError, InputError
from zerograph.ir.buckets import Bucket
from zerograph.ir.step_graph import nbytes
from zerograph.runtime.feedback import set_residuals
from zerograph.runtime.job.liveness import on_interrupt
from zerograph.runtime.job.process_group import Job, agree, agreeing, join
from zerograph.runtime.state import Store, reshard, store_of, stored_bytes, stores_of, unshard
from zerograph.state import state_dict
from zerograph.state.checks import check_form, check_state
from zerograph.state.generate import check_call, facts_of, generate
from zerograph.state.stream import Stream, chosen_module
from zerograph.state.threads import one_thread
from zerograph.state.whole_values import WholeValues, check_modifier, loaded_facts

if TYPE_CHECKING:
    # Only methods that save or load need these modules, whose import takes a while.
    from zerograph.runtime.checkpoint.storage import Reader
    from zerograph.state.checkpoint import Parts
    from zerograph.state.checkpoint.save import Saver
    from zerograph.state.checkpoint.written import Call

P = ParamSpec("P")
R = TypeVar("R")


# Stores whose parameters are whole to be read: changes of them are dropped.
_only_read: set[Store] = set()


def interruptible(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that tells the other ranks, which wait for this one, when the method is interrupted.

    Args:
        doing: names the method's work in messages.
    """

    def wrapped(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            def report(interrupt: BaseException) -> None:
                job: Job | None = vars(args[0]).get("_job")
                if job is not None:
                    job.liveness.report_interrupt(interrupt, doing)

            with on_interrupt(report):
                return method(*args, **kwargs)

        return run

    return wrapped


class Stateful:
    """The part of :class:`zerograph.ZeroGraph` that has its training state, reads and writes it."""

    config: Config
    steps_done: int
    _optimizers: list[torch.optim.Optimizer]
    _schedulers: list[LRScheduler | None]
    # The seed of random numbers if config.seed is None, and the number of forward passes and skipped steps.
    _seed: int | None
    _passes_done: int
    _steps: Steps
    # The step that was compiled or run last.
    _latest: CompiledStep | None
    # The job, and the options that it was joined with.
    _job: Job | None
    _joined: tuple[Any, ...]
    # Returns further entries of a checkpoint's document.
    _position: Callable[[], Mapping[str, Any]]
    # Returns the calls of a loop that are graphs, which a checkpoint notes; None if this is no graph of a loop.
    _kinds_of_calls: Callable[[], list[Call] | None] = staticmethod(lambda: None)
    # Takes those of a checkpoint.
    _take_calls: Callable[[list[Call]], object] = staticmethod(lambda _: None)
    # Created by the first save.
    _saver: Saver | None

    def state_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state that this rank has in memory between steps.

        State in files does not count. The gather buffers of stages 1 and 2 do.
        """
        plain = [parameter for parameter in self._members().parameters.values() if store_of(parameter) is None]
        return stored_bytes(self._stores()) + sum(map(nbytes, plain))

    @one_thread("state_dict()")
    @interruptible("reading the state")
    def state_dict(self) -> dict[str, Any]:
        """Return all of the training state, in whole tensors. A collective: every rank calls it and gets all of it.

        Returns:
            ``modules`` by attribute, ``optimizers``, ``lr_schedulers`` and ``grad_scaler``, each as ``state_dict()`` of
            the plain module, optimizer, scheduler and scaler would return it; ``steps_done``; and ``random``, which
            determines the random numbers of the next step.

        Raises:
            RankMismatchError: the other ranks call something else.
        """
        self._check_resharded()
        layouts = [layout for store in self._stores() for layout in (store.layout, *store.layouts.values())]
        self._agree_to_gather("taking a state_dict()", layouts)
        members = self._adopted()
        whole = state_dict.whole_tensors(members)
        optimizers = [state_dict.optimizer_state(optimizer) for optimizer in self._optimizers]
        # Modules and schedulers run code of the user, which may fail on one rank: no exchange follows.
        return {
            "modules": state_dict.modules_state(members, whole),
            "optimizers": optimizers,
            "lr_schedulers": [None if scheduler is None else scheduler.state_dict() for scheduler in self._schedulers],
            "steps_done": self.steps_done,
            "grad_scaler": None if self.config.scaler is None else self.config.scaler.state_dict(),
            "random": {
                "seed": self._seed if self.config.seed is None else self.config.seed,
                "passes": self._passes_done,
            },
        }

    def fingerprint(self) -> dict[str, str]:
        """Return a text for the bits of each tensor of the training state, by name. A collective, as ``state_dict()``.

        Texts are equal for equal bits, whatever the number of ranks and the stage; those of large tensors are hashes.
        ``zerograph compare`` finds the first difference of two runs that wrote them in each step.
        """
        return loaded_facts(self.state_dict())

    @one_thread("load_state_dict()")
    @interruptible("loading a state")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, on any number of ranks. A collective: every rank calls it.

        Random numbers continue too, unless ``config.seed`` sets others. Entries that are left out stay as they are. So
        states of the plain module and optimizer load too, before and after the first call::

            step.load_state_dict({"modules": {"model": torch.load("model.pt")}})
            step.load_state_dict({"modules": {"model": "model.safetensors"}, "optimizers": [torch.load("opt.pt")]})

        Args:
            state: ``"modules"`` needs every module with parameters or buffers; ``"optimizers"`` and
                ``"lr_schedulers"`` one entry for each optimizer. A scheduler whose entry is None stays as it is. The
                state of a module may be a path of safetensors files, or what
                :func:`zerograph.open_safetensors` returns. Then each rank reads only its parts.

        Raises:
            ConfigError: the state does not fit. Nothing is changed, on any rank.
            CheckpointError: a file is missing or damaged. Likewise, unless reading its values fails.
            RankMismatchError: the state does not fit on another rank, or ranks have other values. Nothing is changed.
        """
        self._check_resharded()
        whole: dict[str, Tensor] = {}
        scaler = self.config.scaler
        keeping = state_dict.kept_on_error(self._members(), self._schedulers, scaler)
        with keeping, agreeing(self._join(), "loading a state") as facts:
            state = state_dict.open_files(state)
            check_form(state)
            check_state(self._optimizers, self._schedulers, scaler, state)
            if "modules" in state:
                whole = state_dict.read_modules(self._adopted(), state["modules"])
            if self._join().size > 1:
                facts |= loaded_facts(state)
            state_dict.load_schedulers(self._schedulers, scaler, state)
        if whole:
            state_dict.load_modules(self._adopted(), whole)
        for optimizer, saved in zip(self._optimizers, state.get("optimizers", ()), strict=False):
            state_dict.load_optimizer(optimizer, saved)
        # What earlier codes of gradients lacked belongs to another course of training.
        set_residuals(self._adopted().parameters.values(), {})
        self.steps_done = state.get("steps_done", self.steps_done)
        # States of version 0.1 have no random numbers.
        if "random" in state:
            self._seed, self._passes_done = state["random"]["seed"], state["random"]["passes"]

    @one_thread("save()")
    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int | None = None) -> None:
        """Write a checkpoint, each rank its part in parallel. A collective: every rank calls it, with a shared folder.

        A checkpoint has all that training needs to continue, on any number of ranks and at any stage: parameters,
        buffers, the optimizers' state and hyperparameters, schedulers, loss scale, counts, and the state of torch's
        random generators on each rank. A checkpoint that was in ``path`` stays valid until the new one is complete.

        Args:
            path: the folder of the checkpoint, or its URL in an object store, such as ``s3://bucket/run``. With
                ``keep`` it is a folder of checkpoints, such as ``step-00000010``, with a file ``latest``.
            asynchronous: return once everything is copied, and write in the background. The next save, or
                :meth:`wait_for_save`, waits for the end and raises its error, which is also printed at once. The end of
                the program waits too; ``dist.destroy_process_group()`` breaks the save off.
            keep: number of checkpoints to keep in ``path``: those saved last, in order of saving, not of time stamps.

        Raises:
            CheckpointError: on every rank: the checkpoint cannot be written, another job saves into ``path``, or
                ``path`` is a checkpoint although ``keep`` is set, or a folder of checkpoints although it is not. What
                was in ``path`` is unchanged.
            ConfigError: a scheduler or optimizer has state that a checkpoint cannot hold.
        """
        from zerograph.state.checkpoint import state_of
        from zerograph.state.checkpoint.save import Saver

        self._check_resharded()
        parts = self._parts()
        self._saver = self._saver or Saver()
        self._saver.save(
            self._join(),
            path,
            lambda: state_of(parts, self.config.shown(), self._position()),
            asynchronous=asynchronous,
            keep=keep,
            steps_done=self.steps_done,
        )

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that is written in the background is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    @one_thread("load()")
    @interruptible("loading a checkpoint")
    def load(self, path: str | os.PathLike[str] | Reader) -> None:
        """Load a checkpoint that :meth:`save` wrote. A collective: every rank calls it.

        Each rank reads its parts only of what ZeRO splits. Parameters that no step trains yet are split from then on:
        reading them is an error, except inside ``full_parameters()``.

        Args:
            path: path or URL of a checkpoint, or of a folder of checkpoints: then the one that the file ``latest``
                names. If that is missing, the newest complete checkpoint is loaded, with a warning. A reader of
                zerograph's own serves too.

        Raises:
            CheckpointError: there is no checkpoint, or a file is missing or damaged.
            ConfigError: the checkpoint is of another model or of other optimizers. Nothing is changed, on any rank.
        """
        from zerograph.state.checkpoint import restore

        self._check_resharded()
        self.wait_for_save()
        parts = self._parts()
        counts = restore(self._join(), path, parts)
        self._take_calls(parts.calls or [])
        self.steps_done, self._passes_done, self._seed = counts
        if self._saver is not None:
            self._saver.forget()

    def _parts(self) -> Parts:
        from zerograph.state.checkpoint import Parts

        seed = self._seed if self.config.seed is None else self.config.seed
        counts = (self.steps_done, self._passes_done, seed)
        members, job = self._adopted(), self._join()
        return Parts(members, self._optimizers, self._schedulers, self.config, counts, job, self._kinds_of_calls())

    @contextlib.contextmanager
    def full_parameters(self, *, modifier_rank: int | None = None) -> Iterator[None]:
        """Make the parameters of the graph's modules whole inside the context, for eager use. Keep changes made inside.

        ``optimizer.state`` is whole too, from its first use inside on, and may be changed. A collective: every rank
        enters and leaves it. If the block raises, its changes to split parameters are dropped.

        Args:
            modifier_rank: the rank whose values of parameters and buffers all ranks get at the end, so that only this
                rank need make changes. None: every rank makes the same changes.

        Raises:
            InputError: the parameters are whole already, by :meth:`gathered_parameters`.
            RankMismatchError: the other ranks call something else, or have other values at the end. No change is kept.
        """
        with one_thread("full_parameters()"):
            members = self._adopted()
            sharded = [store for store in self._stores(members) if not store.is_unsharded]
            with agreeing(self._join(), "entering full_parameters()") as facts:
                facts["modifier_rank"] = repr(modifier_rank)
                check_modifier(self._join(), modifier_rank)
                if not _only_read.isdisjoint(self._stores(members)):
                    raise InputError("full_parameters() inside of gathered_parameters() would lose its changes")
            values = WholeValues(self._join(), members, sharded, modifier_rank)
        problem: BaseException | None = None
        try:
            yield
        except BaseException as error:
            problem = error
        with one_thread("the end of full_parameters()"):
            values.end(problem)

    @contextlib.contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Make the parameters of the graph's modules whole inside the context, to read them. A collective.

        Raises:
            RankMismatchError: the other ranks call something else.
        """
        with one_thread("gathering parameters"):
            sharded = [store for store in self._stores(self._adopted()) if not store.is_unsharded]
            self._agree_to_gather("gathering parameters", [store.layout for store in sharded])
            unshard(sharded)
            _only_read.update(sharded)
        try:
            yield
        finally:
            _only_read.difference_update(sharded)
            with one_thread("the end of gathering parameters", collective=False):
                for store in sharded:
                    reshard(store, keep_changes=False)

    def stream(
        self, module: nn.Module | str | None = None, *, dtype: torch.dtype | None = None, original_names: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole value of each tensor of a module, bucket by bucket, to hand to a serving engine.

        Each bucket is gathered when it is reached, so at most two are whole at a time. A collective: every rank calls
        this and consumes all of it, and every rank gets all tensors; ranks that do not need them may drop them. The
        tensors are copies, with all names of tied parameters. No step and no load may run before the end.

        Args:
            module: a module of the graph, or the name of its attribute; may be left out if only one has parameters.
            dtype: cast floating-point tensors to this dtype. None: as they are.
            original_names: of a model of transformers, yield the tensors that ``save_pretrained`` would write, with the
                names that other programs know; experts, for instance, are joined in the model and apart in the files.
                False: those of ``module.state_dict()``, as for other models.

        Raises:
            ConfigError: there is no such module, or there are several and ``module`` is left out.
            InputError: a step, of this graph or of another one, or a load ran before the end.
            RankMismatchError: the other ranks call something else.
        """
        self._check_resharded()
        members = self._adopted()
        with agreeing(self._join(), "streaming") as facts:
            name, chosen = chosen_module(members.root, module)
            plan = Stream(chosen, original_names=original_names)
            facts |= {"the module": name, "dtype": str(dtype), "original_names": str(original_names)}
        return self._streamed(plan, dtype)

    def _streamed(self, plan: Stream, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        steps_done = self.steps_done

        def buckets() -> Iterator[Iterator[tuple[str, Tensor]]]:
            for number, store in enumerate(plan.stores):
                with one_thread("stream()"):
                    moved = plan.has_changed(store) or self.steps_done != steps_done
                    problem = InputError("a step, a load or full_parameters() ran before the end of stream()")
                    agree(self._join(), f"streaming bucket {number}", 0, dict, problem if moved else None)
                    bucket = list(plan.bucket(store))
                yield iter(bucket)
                del bucket
            yield plan.plain()

        for name, tensor in plan.converted(buckets()):
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    @one_thread("generate()")
    @interruptible("generating")
    def generate(self, model: Any, ids: Tensor | Sequence[Any], **options: Any) -> Any:
        """Generate tokens with a model of the graph, between steps. A collective: every rank calls it, with its rows.

        This calls ``model.generate(ids, **options)`` of transformers on each rank, on gathered parameters and in
        evaluation mode. Ranks may have any number of rows, prompts of any length, and end at different times.
        If ``config.memory.memory_budget`` has room for all parameters of the model beside the state, they are gathered
        once, and ranks generate without communication. Otherwise they are gathered block by block in each forward, with
        the next block's bucket on its way meanwhile: slow, but in little memory. Caches of keys and values do not
        count.

        Args:
            model: a module of the graph, such as ``step.model``.
            ids: the prompts of this rank's rows, as for ``model.generate()``. A list of rows of unequal lengths is
                padded, on the left for decoders, with ``pad_token_id``.
            options: further arguments of ``model.generate()``, such as ``max_new_tokens=``, ``attention_mask=``,
                ``generation_config=`` and ``cache_implementation="static"``. Those that are not tensors must be equal
                on all ranks.

        Returns:
            What ``model.generate()`` returns for this rank's rows; ``ids`` itself where there are none. Random draws
            are from the rank's default generator.

        Raises:
            ConfigError: on every rank, before anything changes: the model is not in the graph, has no ``generate()``,
                or nothing is compiled yet and the model was not loaded or constructed in shards.
            RankMismatchError: ranks have different arguments, or another rank has failed.
        """
        self._check_resharded()
        job, members = self._join(), self._adopted()
        with agreeing(job, "generate()") as facts:
            call = check_call(members.root, model, ids, options, compiled=self._latest is not None)
            name = next(name for name, module in members.root.named_modules() if module is model)
            facts |= facts_of(name, options)
        sizes = agree(job, "generate()", 0, dict, sizes=[self.state_bytes() + call.whole_bytes])
        budget = self.config.memory_bytes
        whole = budget is None or max(size for (size,) in sizes) <= budget
        return generate(job, call, whole=whole)

    def _join(self) -> Job:
        wanted = self.config.checks.timeout, self.config.mesh.placement, ranks_of_row(self.config)
        if self._job is None or self._joined != wanted:
            self._job, self._joined = join(*wanted), wanted
        return self._job

    def _members(self) -> Members:
        return self._steps.members()

    def _adopted(self) -> Members:
        """Return the members, after replacing those that are global tensors by plain ones."""
        return self._steps.adopted(self._join)

    def _compiled(self) -> CompiledStep:
        if self._latest is None:
            raise ConfigError("nothing is compiled yet: call the graph, or compile(*inputs)")
        return self._latest

    def _agree_to_gather(self, doing: str, layouts: Iterable[Bucket]) -> None:
        """Check that all ranks are about to gather the buckets, if any is split."""
        if not all(layout.is_whole for layout in layouts):
            agree(self._join(), doing, 0, dict)

    def _check_resharded(self) -> None:
        if any(store.is_unsharded for store in self._stores()):
            raise InputError("state_dict() and load_state_dict() do not work inside full_parameters(): leave it first")

    def _stores(self, members: Members | None = None) -> list[Store]:
        """Return the distinct stores of the graph's parameters, in the same order on all ranks."""
        return stores_of((members or self._members()).parameters.values())
