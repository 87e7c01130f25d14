"""ZeroGraph: what a user subclasses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zerograph import _torch
from zerograph.capture.wrappers import inner_optimizer
from zerograph.compiler.batch import Batch, give_back, read_batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.compiler import Compiler
from zerograph.compiler.layout import Planned
from zerograph.compiler.members import Members, Tree, adopt_global, capture_facts, current, has_global, layout_facts
from zerograph.compiler.recompiles import Recompiles
from zerograph.compiler.standing import Standing, standing_of
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, InputError, PlacementError
from zerograph.inspection import Prepared, logs
from zerograph.inspection import trace as tracing
from zerograph.inspection.inspected import Inspected
from zerograph.inspection.observer import EnvironmentObserver
from zerograph.inspection.trace import Trace
from zerograph.ir import finite_check
from zerograph.ir.mesh import Mesh
from zerograph.ir.step_graph import FOUND_INF, found_inf_optimizer
from zerograph.optim import hyperparameters, refuse_unsupported
from zerograph.optim.step_hooks import guard, refuse_hooks_before, run_hooks_behind
from zerograph.runtime.executor import Executor
from zerograph.runtime.job.process_group import Job, agree, digest, first_ranks, join
from zerograph.runtime.state import Store
from zerograph.state import replicas
from zerograph.state.checkpoint.save import Saver
from zerograph.state.nonfinite import explained
from zerograph.state.sharded_init import is_recording
from zerograph.state.stateful import Stateful, interruptible
from zerograph.state.threads import check_refused, one_thread

_building: ContextVar[str | None] = ContextVar("building", default=None)


def building() -> bool:
    """Whether a ``build()`` is being traced: tensors are then fake, of global shape, and placed later."""
    return _building.get() is not None


class ZeroGraph(Inspected, Stateful):
    """A training step, or a forward pass, as one graph.

    Subclass it: assign modules to attributes in ``__init__`` (after ``super().__init__()``), register optimizers, and
    write ``build()``. Calling the graph compiles it the first time, and runs it.

    Attributes:
        steps_done: updates made so far, without those that all optimizers skipped; 0 for a graph without optimizer.
        steps_skipped: updates left out in this process because a loss or gradient was not finite, see
            ``config.on_nonfinite``; overflows that loss scaling deals with do not count.
    """

    steps_done: int
    steps_skipped: int

    def __init__(self) -> None:
        self.steps_done = 0
        self.steps_skipped = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[LRScheduler | None] = []
        self._compiler = Compiler(self._traced_build, self._optimizers, Config(), EnvironmentObserver())
        self._steps: dict[Hashable, CompiledStep] = {}
        self._digests: dict[Hashable, int] = {}
        self._recompiles = Recompiles()
        self._member_tree: Tree | None = None
        # The step that ran last, by its key and where its parameters lie; and the digest of the key.
        self._ready_before: tuple[Hashable, Hashable, CompiledStep, int] | None = None
        self._standing: Standing | None = None
        self._latest: CompiledStep | None = None
        self._job: Job | None = None
        self._joined: tuple[Any, ...] = ()
        self._seed: int | None = None
        self._passes_done = 0
        self._saver = Saver()

    def __getattr__(self, name: str) -> Any:
        if name in ("_compiler", "_optimizers", "_steps", "_job"):
            raise ConfigError(f"{type(self).__name__}.__init__() must call super().__init__() first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def config(self) -> Config:
        """Its options. A :class:`zerograph.config.Config` that is assigned takes the place of all of them.

        Raises:
            ConfigError: what is assigned is none.
        """
        return self._compiler.config

    @config.setter
    def config(self, config: Config) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"config = {config!r:.60}: give a zerograph.Config, or set options of the one there is")
        self._compiler.config = config

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Define the step: forward, ``loss.backward()`` if it trains, and what to return. It is traced, not run."""
        raise ConfigError(f"{type(self).__name__} has no build(): write one")

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None = None) -> None:
        """Register an optimizer; the graph makes its update after ``build()``, and steps the scheduler after that.

        ``ReduceLROnPlateau`` is stepped with the first 0-d tensor that ``build()`` returns: its value is then read in
        each step, which waits for the device. Hooks of ``optimizer.register_step_post_hook()`` run behind each update
        of the graph, before schedulers are stepped; those before ``step()`` are refused when the graph is called.

        Raises:
            ConfigError: not an optimizer of torch, registered already, or a scheduler that the graph cannot step.
            CaptureError: an optimizer that is no graph: LBFGS, SparseAdam.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"add_optimizer() takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        optimizer = inner_optimizer(optimizer)
        if any(one is optimizer for one in self._optimizers):
            raise ConfigError(f"this {type(optimizer).__name__} is registered already")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(f"lr_scheduler={lr_scheduler!r:.60}: give a scheduler of this optimizer")
        refuse_unsupported(optimizer)
        self._optimizers.append(optimizer)
        self._schedulers.append(lr_scheduler)
        self._compiler.updates.expect(len(self._optimizers) - 1, lr_scheduler)
        self._compiler.reads_metric |= isinstance(lr_scheduler, ReduceLROnPlateau)
        guard(optimizer, building)

    def set_zero_mode(self, mode: str, stage: int | Literal["auto"] = 1) -> None:
        """``"distributed_split"``, or ``"non_distributed"``, with stage 1, 2 or 3; or ``"off"``.

        ``set_zero_mode("distributed_split", stage="auto")``: the fastest that fits ``config.memory_budget``.

        The same as ``config.enable_zero``; see :attr:`zerograph.config.Config.mode`.

        Raises:
            ConfigError: no such mode or stage.
        """
        self.config.enable_zero(mode, stage=stage, shard_min_size=self.config.shard_min_size)

    @interruptible("a step")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on this rank's part of the batch: tensors in any nesting of lists, tuples and dicts.

        Plain tensors are split along dimension 0 (0-d ones are whole), DTensors are what they say. Numbers, strings,
        dtypes and None are constants of the step: for others it is compiled again. Returns what
        ``build()`` returned: split tensors as this rank's part, others whole and equal on all ranks (with several
        micro-batches as ``config.accumulation_outputs`` says).

        Raises:
            ZeroGraphError: on every rank, before any state changes, if something is wrong on any of them.
            ReplicaError: likewise, if ranks differ in what they hold alike, see ``config.check_replicas``.
            NonFiniteError: likewise, if a loss or gradient is not finite and ``config.on_nonfinite`` is ``"raise"``.
            OperatorError: an operator refused its values on this rank, as an embedding an index out of range.
            CommunicationError: another rank does not answer within ``config.timeout`` seconds.
            InputError: among several ranks, another thread is using a graph; in one process alone it is waited for.
        """
        with one_thread("a call of the graph"):
            step, batch = self._ready(args, kwargs)
            self._check_replicas()
            return self._run(step, step.executor, batch)

    def _run(self, step: CompiledStep, executor: Executor, batch: Batch) -> Any:
        numbers = {name: hyperparameters.read(group, path) for name, (group, path) in step.numbers.items()}
        run = batch.tensors, numbers, self._seed_of_step(), self._doing()
        values = executor(*run)
        # What is not finite is not 0 either.
        flags = {name: bool(values.pop()) for name in reversed(step.flags)}
        if flags.get(finite_check.NOT_FINITE.name):
            if self.config.on_nonfinite == "raise":
                raise explained(step, batch.names, *run)
            self._skipped()
        skips = {name: skip for name, skip in flags.items() if name.startswith(FOUND_INF)}
        if self._optimizers and not (skips and all(skips.values())):
            self._step_made(step, values, {found_inf_optimizer(name) for name, skip in skips.items() if skip})
        else:
            # A step that was skipped is none, but the next one draws other numbers.
            self._passes_done += 1
        sbp = [one for one, _ in step.outputs]
        shapes = [shape for _, shape in step.outputs]
        return give_back(values, sbp, shapes, step.captured.returned, step.captured.output_spec, batch.mesh)

    @one_thread("compile()")
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for inputs like these without running: parameters are split, but nothing is updated.

        Raises:
            ZeroGraphError: as calling the graph does.
        """
        self._ready(args, kwargs)

    @one_thread("profile()")
    def profile(self, steps: int, *args: Any, path: str | os.PathLike[str], **kwargs: Any) -> Trace:
        """Make that many steps on these inputs under ``torch.profiler``, and write a trace for Perfetto or Chrome.

        They are steps as any: they update, and count. Nodes run one by one, each under its name in :meth:`text`; what
        Inductor made one function of goes by its first nodes, collectives by tensor and bucket, with an event from
        start to end. Measuring takes time of its own, and the first step is slower than others: make some before.

        Args:
            steps: how many, at least one.
            args, kwargs: as calling the graph takes them.
            path: the file, ``trace.json`` for instance; among several ranks each writes its own, ``trace.rank0.json``.

        Raises:
            ConfigError: on every rank, before anything runs: no such number or folder, or a backend of your own that
                makes one function of the step.
            ZeroGraphError: as calling the graph does.
        """
        job = self._join()

        def check() -> Path:
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ConfigError(f"profile({steps!r}): the number of steps is a whole number from 1 up")
            return tracing.file_of(path, job.rank, job.size)

        step, batch = self._ready(args, kwargs, check)
        # The backend is the same on all ranks, and so is what it makes.
        named = tracing.named(step.executor.function, step.emitted)
        executor = replace(step.executor, function=named, low_overhead=None)
        return tracing.measure(steps, lambda: self._run(step, executor, batch), step, check())

    @one_thread("prepare()", collective=False)
    def prepare(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> Prepared:
        """Prepare what one rank of ``mesh`` would run for inputs like these: everything before the backend.

        No process group is needed, no weight is touched and nothing changes, so modules and inputs may be on the meta
        device, and the mesh larger than the job: ``mesh.line(1024, 0, "ranks")`` is rank 0 of 1024.

        Args:
            args, kwargs: that rank's part of the batch, as calling the graph takes it.
            device: what tensors on the meta device stand for; ``"meta"``: an accelerator that this build of torch need
                not know, with all that is on the CPU. It is traced with the CPU's operators.

        Raises:
            ZeroGraphError: as calling the graph does, but for what only running shows.
        """
        members, batch, key = self._standing_in(mesh, args, kwargs, device)
        found = self._compiler.prepare(mesh, members, batch, key)
        logs.tell(found, type(self).__name__)
        return Prepared(found)

    @one_thread("lay_out()", collective=False)
    def lay_out(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> tuple[Planned, ...]:
        """Return the buckets that :meth:`prepare` would make for the same arguments, at the cost of a capture.

        Raises:
            ZeroGraphError: as :meth:`prepare` does, before any pass.
        """
        return self._compiler.lay_out(mesh, *self._standing_in(mesh, args, kwargs, device))

    def _standing_in(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], device: str
    ) -> tuple[Members, Batch, Hashable]:
        """Members and batch as they are on that mesh and device, and what they are known by."""
        if (
            not isinstance(mesh, Mesh)
            or not mesh.size
            or any(a >= n for a, n in zip(mesh.position, mesh.shape, strict=True))
        ):
            raise PlacementError(
                f"prepare({mesh!r:.80}): give the ranks, and which of them, as zerograph.ir.mesh.line(1024, 0, 'ranks')"
            )
        if device not in ("cpu", "cuda", "meta"):
            raise PlacementError(f"prepare(device={device!r:.60}): choose 'cpu', 'cuda' or 'meta'")
        refuse_hooks_before(self._optimizers)
        members = replace(self._members(), meta=torch.device(device))
        grid = torch.arange(mesh.size).view(mesh.shape).tolist()
        plain = self.config.batch_on(mesh.dims)
        batch = read_batch(args, kwargs, mesh, grid, plain, self._compiler.micro_batches, members.meta)
        known = self._capture_facts(members)
        return members, batch, (tuple(known.values()), batch.key(), members.meta)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object] | None = None
    ) -> tuple[CompiledStep, Batch]:
        """Return the compiled step for these inputs once all ranks agree; what ``check`` raises is raised on all."""
        self._refuse_where_nothing_runs()
        job = self._join()
        job.check_alive()
        if self.config.stage == "auto":
            # The planner knows this class.
            from zerograph.planner.choose import choose

            choose(self, job, self._adopted, args, kwargs, self._doing())
        problem: BaseException | None = None
        batch: Batch | None = None
        members: Members | None = None
        capture_key: Hashable = None
        key: Hashable = None
        step: CompiledStep | None = None
        known: dict[str, Any] = {}
        number, repeated, standing = 0, False, self._standing

        def facts() -> dict[str, str]:
            assert batch is not None
            there = {"the compiled step": "missing" if step is None else "there"}
            shown = self._shown(known or self._capture_facts(self._members()))
            return {**batch.facts(), **shown, **there, **self._counts()}

        try:
            check_refused()
            if check is not None:
                check()
            if standing is not None and not self._compiler.guards():
                batch = standing.batch(job, self._attributes(), self._optimizers, self.config, (args, kwargs))
            if standing is not None and batch is not None:
                self._check_usable(standing.stores)
                step, number = standing.step, standing.number
            else:
                self._standing = None
                members = self._adopted()
                self._check_usable(self._stores(members))
                refuse_hooks_before(self._optimizers)
                plain = self.config.batch_on(job.mesh.dims)
                batch = read_batch(args, kwargs, job.mesh, job.grid, plain, self._compiler.micro_batches)
                self._compiler.updates.lift_changed(self.config)
                known = self._capture_facts(members)
                capture_key = (tuple(known.values()), batch.key())
                key = (capture_key, self.config.key())
                laid_out, before = layout_facts(members), self._ready_before
                repeated = before is not None and before[:2] == (key, laid_out)
                if before is not None and repeated:
                    key, _, step, number = before
                else:
                    step = self._steps.get((key, laid_out))
                    if job.size > 1 and key not in self._digests:
                        self._digests[key] = digest({**batch.facts(), **self._shown(known)})
                    number = self._digests.get(key, 0)
            if step is not None:
                step.check_files()
        except BaseException as error:
            problem = error
        agreed = number
        number ^= step is None
        if self.config.check_replicas:
            number ^= digest(self._counts())  # They say whether replicas are compared now.
        agree(job, self._doing(), number, facts, problem)
        assert batch is not None
        if step is None:
            assert members is not None
            shown = {**dict(batch.constants), **self._shown(known)}
            self._recompiles.note((batch.kind(), self.config.key()), members, shown, self._doing())
            step = self._compiler.compile(job, members, batch, capture_key, self._doing())
            if self._seed is None:
                self._seed = first_ranks(job, (torch.initial_seed() + 2**63) % 2**64 - 2**63)
            # Steps that are bound to buckets which are no more would keep their memory.
            self._steps = {
                k: s for k, s in self._steps.items() if not any(one.is_released for one in s.stores.values())
            }
            left = self._compiler.keys_left(step, batch, known, lambda: self._capture_facts(self._members()))
            self._steps |= {(one, layout_facts(members)): step for one in (key, *left)}
            logs.tell(step, type(self).__name__, job.rank if job.size > 1 else None)
        self._latest = step
        if members is None:
            return step, batch
        if self._ready_before is None or self._ready_before[0] is not key:
            self._ready_before = key, layout_facts(members), step, self._digests.get(key, 0)
        tree = self._member_tree
        if repeated and tree is not None and not self._compiler.guards():
            self._standing = standing_of(
                job,
                self._attributes(),
                tree,
                self._optimizers,
                self.config,
                batch,
                (args, kwargs),
                step,
                agreed,
            )
        return step, batch

    def _refuse_where_nothing_runs(self) -> None:
        """Raise inside a ``build()`` and inside ``sharded_init()``, before anything reads a tensor's value."""
        outer = _building.get()
        if outer is not None:
            raise CaptureError(
                f"{type(self).__name__} was called inside the build() of {outer}: graphs do not nest\n"
                "Call the modules themselves inside build()."
            )
        if is_recording():
            raise InputError(
                f"{type(self).__name__} was called inside sharded_init(): what is made there has no values yet\n"
                "Call it after the block."
            )

    def _counts(self) -> dict[str, str]:
        return {"steps done": str(self.steps_done), "forward passes and skipped steps": str(self._passes_done)}

    def _check_replicas(self) -> None:
        every = self.config.check_replicas
        if not every or (self.steps_done + self._passes_done) % every:
            return
        job, scaler = self._join(), self.config.scaler
        seed = self._seed if self.config.seed is None else self.config.seed
        counts = {**self._counts(), "seed": str(seed)}
        replicas.check(
            job,
            replicas.replicas_of(self._members(), self._optimizers, job.mesh),
            lambda: replicas.host_facts(counts, self._optimizers, self._schedulers, scaler),
            self._doing(),
        )

    def _seed_of_step(self) -> int:
        """Return the seed of a step. The class counts too, so graphs that train in turn draw different numbers."""
        seed = self._seed if self.config.seed is None else self.config.seed
        return digest((seed, type(self).__qualname__, self.steps_done, self._passes_done))

    def _skipped(self) -> None:
        self.steps_skipped += 1
        if self.steps_skipped == 1:
            warnings.warn(
                f"{self._doing()} was skipped: its loss or a gradient is not finite, and nothing was changed\n"
                "step.steps_skipped counts such steps from here on, without a further warning. "
                "config.on_nonfinite = 'raise' says where the first such number is made.",
                stacklevel=3,
            )

    def _step_made(self, step: CompiledStep, values: Sequence[Tensor], skipped: Set[str]) -> None:
        """Count the step, run the hooks after it and step schedulers: not those of optimizers that were ``skipped``."""
        for name, update in step.context.updates.items():
            if update.optimizer not in skipped:
                step.stores[name].fresh = False
        self.steps_done += 1
        updated = [number for number in range(len(self._optimizers)) if f"optimizer{number}" not in skipped]
        for optimizer in (self._optimizers[number] for number in updated):
            _torch.mark_step_called(optimizer)
            run_hooks_behind(optimizer)
        for scheduler in (self._schedulers[number] for number in updated):
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(step.metric(values))
            elif scheduler is not None:
                scheduler.step()

    def _traced_build(self, *args: Any, **kwargs: Any) -> Any:
        token = _building.set(type(self).__name__)
        try:
            return self.build(*args, **kwargs)
        finally:
            _building.reset(token)

    def _join(self) -> Job:
        if self._job is None or self._joined != (self.config.timeout, self.config.placement):
            self._job = join(self.config.timeout, self.config.placement)
            self._joined = self.config.timeout, self.config.placement
        return self._job

    def _attributes(self) -> dict[str, Any]:
        own = ("steps_done", "steps_skipped")
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name not in own}

    def _capture_facts(self, members: Members) -> dict[str, Any]:
        facts = capture_facts(members, self._attributes(), self._optimizers, self._compiler.updates.constants)
        return facts | self._compiler.guards()

    def _members(self) -> Members:
        self._member_tree = current(self._member_tree, self._attributes())
        return self._member_tree.members

    def _adopted(self) -> Members:
        """Return the members, after the graph has taken over those that are global tensors."""
        members = self._members()
        if not has_global(members):
            return members
        adopt_global(members, self._optimizers, self._join())
        return self._members()

    def _check_usable(self, stores: Iterable[Store]) -> None:
        for store in stores:
            if store.is_unsharded:
                raise InputError("the graph was called inside full_parameters(): leave it first")
            store.check_aliases()

    def _compiled(self) -> CompiledStep:
        if self._latest is None:
            raise ConfigError("nothing is compiled yet: call the graph, or compile(*inputs)")
        return self._latest

    def _shown(self, facts: dict[str, Any]) -> dict[str, str]:
        """Facts as text, those of parameters and modules one by one, so that a difference has a short name."""
        shown = {"configuration": self.config.shown()}
        for name, value in facts.items():
            if name in ("parameters", "buffers", "modules"):
                shown |= {f"{name}: {one[0] or 'the graph'}": str(one[1:]) for one in value}
            elif name not in shown:
                shown[name] = str(value)
        return shown

    def _doing(self) -> str:
        return f"step {self.steps_done + 1}" if self._optimizers else "a forward pass"
