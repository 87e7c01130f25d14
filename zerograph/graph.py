"""ZeroGraph: what a user subclasses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zerograph import _torch
from zerograph.artifact.file import write_file
from zerograph.base.contexts import given
from zerograph.base.source import warn_user
from zerograph.capture.wrappers import inner_optimizer
from zerograph.compiler.artifacts import artifact_content, read_artifact, requirements
from zerograph.compiler.batch import Batch, arrange_outputs
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.compiler import Compiler
from zerograph.compiler.input_layout import with_rows
from zerograph.compiler.layout import PlannedBucket
from zerograph.compiler.preparation import Target
from zerograph.compiler.step_key import StepRequest
from zerograph.compiler.steps import Steps
from zerograph.compiler.virtual_ranks import inputs_with_all_slices, outputs_of_own_slices
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, InputError
from zerograph.inspection import Prepared, logs, trace as tracing
from zerograph.inspection.environment import EnvironmentObserver
from zerograph.inspection.inspected import Inspected
from zerograph.inspection.trace import Trace
from zerograph.ir import finite_check
from zerograph.ir.buckets import from_whole_vector
from zerograph.ir.mesh import Mesh
from zerograph.ir.step_graph import FOUND_INF, found_inf_optimizer
from zerograph.ir.zero import DEFAULT_STAGE, Mode, Stage, options_of_mode
from zerograph.optim.step_hooks import check_step, guard, run_hooks_after
from zerograph.runtime.executor import Executor
from zerograph.runtime.job.exchange import broadcast_number
from zerograph.runtime.job.process_group import Job, agreeing, digest
from zerograph.runtime.state import abandon
from zerograph.runtime.wire.selection import Transport, named_transport
from zerograph.state import replicas
from zerograph.state.nonfinite_error import nonfinite_error
from zerograph.state.sharded_init import is_constructing
from zerograph.state.stateful import interruptible
from zerograph.state.threads import check_refused, one_thread

_building: ContextVar[str | None] = ContextVar("building", default=None)


def building() -> bool:
    """Return True while a ``build()`` is traced. Its tensors are fake, of global shape, and placed later."""
    return _building.get() is not None


class ZeroGraph(Inspected):
    """A training step, or a forward pass, as one graph.

    Subclass it: assign modules to attributes in ``__init__`` (after ``super().__init__()``), register optimizers, and
    write ``build()``. The first call compiles the graph; every call runs it.

    Attributes:
        steps_done: number of updates so far. An update that all optimizers skipped does not count. A graph without
            optimizer has 0.
        steps_skipped: number of updates that this process skipped because a loss or gradient was not finite, see
            ``config.checks.on_nonfinite``. Overflows that loss scaling handles do not count.
    """

    steps_done: int
    steps_skipped: int

    def __init__(self) -> None:
        self.steps_done = 0
        self.steps_skipped = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[LRScheduler | None] = []
        self._request = StepRequest()
        self._seed: int | None = None
        self._passes_done = 0
        self._position = dict
        self._begin(Config())

    def _begin(self, config: Config) -> None:
        """Begin without a compiled step and without a job."""
        self._compiler = Compiler(
            self._traced_build, self._optimizers, config, EnvironmentObserver(type(self).__name__)
        )
        self._steps = Steps(self._compiler, self._attributes, self._attributes_of_code)
        self._latest: CompiledStep | None = None
        self._job: Job | None = None
        self._joined: tuple[Any, ...] = ()
        self._saver = None

    def _leave_job(self) -> None:
        """Leave a job that has lost ranks: what is compiled for it goes, and the values of sharded state."""
        for store in self._stores():
            abandon(store)
        before = self._compiler
        self._begin(self.config)
        self._compiler.take_captures(before)
        for number, scheduler in enumerate(self._schedulers):
            self._compiler.updates.expect_changes(number, scheduler)

    if not TYPE_CHECKING:  # with it mypy would accept unknown names

        def __getattr__(self, name: str) -> Any:
            if name in ("_compiler", "_optimizers", "_steps", "_job"):
                raise ConfigError(f"{type(self).__name__}.__init__() must call super().__init__() first")
            return super().__getattr__(name)

    @property
    def config(self) -> Config:
        """The graph's options. Assign a :class:`zerograph.config.Config` to replace all of them.

        Raises:
            ConfigError: the assigned value is not a ``Config``.
        """
        return self._compiler.config

    @config.setter
    def config(self, config: Config) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"config = {config!r:.60}: assign a zerograph.Config, or set options of graph.config")
        self._compiler.config = config

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Define the step: forward, ``loss.backward()`` if it trains, and the values to return. Traced, not run."""
        raise ConfigError(f"{type(self).__name__} has no build(): write one")

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None = None) -> None:
        """Register an optimizer. The graph runs its update after ``build()``, and then steps the scheduler.

        ``ReduceLROnPlateau`` is stepped with the first 0-d tensor that ``build()`` returns. Its value is then read in
        each step, which waits for the device. Hooks of ``optimizer.register_step_post_hook()`` run after each update
        of the graph and before schedulers are stepped. Hooks before ``step()`` are refused when the graph is called.

        Raises:
            ConfigError: not a torch optimizer, an optimizer that is registered already, or a scheduler that the graph
                cannot step.
            CaptureError: the optimizer cannot be traced to a graph: LBFGS, SparseAdam.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"add_optimizer() takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        optimizer = inner_optimizer(optimizer)
        if any(registered is optimizer for registered in self._optimizers):
            raise ConfigError(f"this {type(optimizer).__name__} is registered already")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
            inside = getattr(lr_scheduler, "scheduler", None)
            advice = f", the {type(inside).__name__} inside it (.scheduler)" if isinstance(inside, LRScheduler) else ""
            raise ConfigError(f"lr_scheduler={lr_scheduler!r:.60}: pass a scheduler of this optimizer{advice}")
        check_step(optimizer)
        self._optimizers.append(optimizer)
        self._schedulers.append(lr_scheduler)
        self._compiler.updates.expect_changes(len(self._optimizers) - 1, lr_scheduler)
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            self._request = replace(self._request, reads_metric=True)
        guard(optimizer, self, building)

    def set_zero_mode(self, mode: Mode, stage: Stage = DEFAULT_STAGE) -> None:
        """Set ZeRO's mode, ``"distributed_split"``, ``"non_distributed"`` or ``"off"``, and its stage, 1, 2 or 3.

        ``set_zero_mode("distributed_split", stage="auto")`` chooses the fastest stage that fits
        ``config.memory.memory_budget``. These are OneFlow's names of ``config.zero.stage`` and ``shard_by``, see
        :class:`zerograph.config.ZeroOptions`.

        Raises:
            ConfigError: no such mode or stage.
        """
        self.config.set(**options_of_mode(mode, stage))

    @interruptible("a step")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank's part of the batch.

        Args:
            args, kwargs: tensors and constants in any nesting of lists, tuples and dicts. Plain tensors are this rank's
                part along dimension 0; plain 0-d tensors are whole; DTensors keep their placement. Numbers, strings,
                dtypes and None are constants of the step: the step is compiled again for other values.

        Returns:
            The values that ``build()`` returned. A split tensor is this rank's part; any other is whole, and equal on
            all ranks. With several micro-batches, ``config.accumulation_outputs`` sets the form.

        Raises:
            ZeroGraphError: on every rank, before any state changes, if any rank has a problem.
            ReplicaError: likewise, if replicas differ between ranks, see ``config.checks.check_replicas``.
            NonFiniteError: likewise, if a loss or gradient is not finite and ``config.checks.on_nonfinite`` is
                ``"raise"``.
            OperatorError: an operator refused its values on this rank, for instance an embedding index out of range.
            CommunicationError: another rank does not answer within ``config.checks.timeout`` seconds.
            InputError: another thread uses a graph, in a job of several ranks. In a job of one rank the call waits.
        """
        with one_thread("a call of the graph"):
            step, batch = self._ready(args, kwargs)
            self._check_replicas()
            return self._run(step, step.executor, batch)

    def _run(self, step: CompiledStep, executor: Executor, batch: Batch) -> Any:
        inputs = self._run_inputs(step, executor, batch)
        return self._finish(step, batch, inputs, executor(*inputs))

    def _run_inputs(self, step: CompiledStep, executor: Executor, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of an executor's run."""
        seed = self._seed_of_step() if executor.draws else 0
        tensors = batch.tensors
        if self.config.virtual_ranks is not None:
            tensors = tuple(map(from_whole_vector, inputs_with_all_slices(tensors, batch, step.context)))
        return tensors, step.number_values(), seed, self._doing(), step.size_values(batch)

    def _finish(self, step: CompiledStep, batch: Batch, inputs: tuple[Any, ...], values: list[Tensor]) -> Any:
        """Count a run, and return what ``build()`` returned.

        Args:
            inputs: the arguments of the executor's run.
            values: its result.
        """
        # A flag may be NaN or infinite, which counts as set.
        flags = {name: bool(values.pop()) for name in reversed(step.flags)}
        if flags.get(finite_check.NOT_FINITE.name):
            # Also where clip_grad_norm_(error_if_nonfinite=True) checks its norm.
            if self.config.checks.on_nonfinite != "skip":
                raise nonfinite_error(step, batch.names, *inputs)
            self._count_skipped()
        skips = {name: skip for name, skip in flags.items() if name.startswith(FOUND_INF)}
        if self._optimizers and not (skips and all(skips.values())):
            self._finish_step(step, values, {found_inf_optimizer(name) for name, skip in skips.items() if skip})
        else:
            # A skipped step does not count as a step, but the next one must draw other random numbers.
            self._passes_done += 1
        sbps = [sbp for sbp, _ in step.outputs]
        shapes = [shape for _, shape in step.outputs]
        if self.config.virtual_ranks is not None:
            values = outputs_of_own_slices(values, step.outputs, step.context)
        captured, grid = step.captured, self._join().grid
        return arrange_outputs(values, sbps, shapes, step.returned(batch), captured.output_spec, batch.mesh, grid)

    @one_thread("compile()")
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step for inputs like these without running it. Parameters are sharded, but not updated.

        Raises:
            ZeroGraphError: as calling the graph does.
        """
        self._ready(args, kwargs)

    @one_thread("profile()")
    def profile(self, steps: int, *args: Any, path: str | os.PathLike[str], **kwargs: Any) -> Trace:
        """Run ``steps`` steps on these inputs under ``torch.profiler``, and write a trace for Perfetto or Chrome.

        The steps update and count like any others. Nodes run one by one, each under its name in :meth:`text`. A
        function that Inductor compiled is named after its first nodes, a collective after its tensor and bucket, with
        one event from start to end. Profiling itself takes time, and a first step is slow: run some steps before.

        Args:
            steps: number of steps, at least 1.
            args, kwargs: inputs of each step, as for a call of the graph.
            path: the file, for instance ``trace.json``. Of several ranks each writes its own, ``trace.rank0.json``.

        Raises:
            ConfigError: on every rank, before anything runs: ``steps`` is not a number from 1 up, the folder does not
                exist, or a user's backend compiles the step to one function.
            ZeroGraphError: as for a call of the graph.
        """
        job = self._join()

        def check() -> Path:
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ConfigError(f"profile({steps!r}): the number of steps is a whole number from 1 up")
            return tracing.file_of(path, job.rank, job.size)

        step, batch = self._ready(args, kwargs, check)
        # named() may refuse the backend's function; the backend, and so the error, is the same on all ranks.
        named = tracing.named(step.executor.function, step.prepared.emitted)
        executor = replace(step.executor, function=named, low_overhead=None)
        return tracing.measure(steps, lambda: self._run(step, executor, batch), step.prepared, check())

    @one_thread("prepare()", collective=False)
    def prepare(
        self, mesh: Mesh, *args: Any, device: str = "cpu", transport: str | Transport = "torch", **kwargs: Any
    ) -> Prepared:
        """Prepare the step that one rank of ``mesh`` would run for inputs like these: all passes, no backend.

        No process group is needed and no state changes. So modules and inputs may be on the meta device, and the mesh
        may be larger than the job: ``mesh.line(1024, 0, "ranks")`` is rank 0 of 1024.

        Args:
            mesh: the ranks, and the position of the one to prepare for.
            args, kwargs: that rank's part of the batch, as for a call of the graph.
            device: the device that tensors on the meta device stand for. ``"meta"``: an accelerator that this build of
                torch need not support; tensors on the CPU stand for it too. It is traced with the CPU's operators.
            transport: how ranks exchange tensors: ``"torch"`` by torch's collectives, as over NCCL; ``"gloo"`` as over
                gloo between hosts; ``"host"`` as over gloo between ranks of one host that share memory; ``"hosts"`` as
                over gloo between two hosts that have several ranks each, ``"hosts:3"`` between three.

        Raises:
            ZeroGraphError: as for a call of the graph, except for errors of the run itself.
        """
        mesh = with_rows(mesh, self.config)
        members, batch, key = self._steps.inputs_on(mesh, args, kwargs, device, self._request)
        if isinstance(transport, str):
            transport = named_transport(transport, mesh)
        target = Target(mesh, mesh.rank, transport.exchanges, transport.hosts)
        of_graph = members, self._steps.dependencies(members).texts(), self.config, self._request
        step = self._compiler.prepare(target, members, batch, key, requirements(*of_graph, mesh, batch))
        logs.tell(step, type(self).__name__)
        return Prepared(step, members.meta)

    @one_thread("export_compiled()", collective=False)
    def export_compiled(self, path: str | os.PathLike[str], prepared: Prepared | None = None) -> None:
        """Write the step compiled last to a file, for :meth:`load_compiled` of another process on any rank.

        Call it on one rank. The file has graphs and constants, no parameters; only its owner can read it. ``build()``
        is traced again for it: digests of the code that it runs are in the file.

        Args:
            path: the file.
            prepared: write this result of :meth:`prepare` instead.

        Raises:
            ConfigError: nothing is compiled yet.
            ArtifactError: a part of the step cannot be written to a file, or the file cannot be written.
        """
        step = self._compiled().prepared if prepared is None else prepared
        members = self._members()
        if prepared is not None:
            members = replace(members, meta=prepared.device)
        write_file(path, artifact_content(step, self._compiler.recording_of(step, members, self._request)))

    @one_thread("load_compiled()")
    def load_compiled(self, path: str | os.PathLike[str]) -> None:
        """Use the step of a file that :meth:`export_compiled` or ``zerograph compile`` wrote instead of compiling it.

        Every rank calls it before the graph is called. Nothing in the file is executed. The next step that the graph
        compiles must be that of the file; steps for other inputs are compiled as usual after that. Where ranks, buckets
        and options of the file are those of the job, no pass runs; else passes run over the captured graph of the file.

        Raises:
            ArtifactError: on every rank: the file is damaged, or of another model, configuration or version; the
                message lists what differs. The first call of the graph raises it for other inputs.
        """
        with agreeing(self._join(), f"loading {os.fspath(path)}"):
            members = self._adopted()
            facts = self._steps.dependencies(members).texts()
            required = requirements(members, facts, self.config, self._request)
            self._compiler.loaded.add(read_artifact(path, members), required)

    @one_thread("lay_out()", collective=False)
    def lay_out(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> tuple[PlannedBucket, ...]:
        """Return the buckets that :meth:`prepare` would make for the same arguments, at the cost of a capture.

        Raises:
            ZeroGraphError: as for :meth:`prepare`, before any pass.
        """
        mesh = with_rows(mesh, self.config)
        return self._compiler.lay_out(mesh, *self._steps.inputs_on(mesh, args, kwargs, device, self._request))

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object] | None = None
    ) -> tuple[CompiledStep, Batch]:
        """Return the step for these inputs once all ranks agree on it; compile it if there is none.

        Args:
            check: a further check of the call; an error that it raises on one rank is raised on all.
        """
        self._refuse_where_nothing_runs()
        job = self._join()
        job.check_alive()
        before = self.config.options() if self.config.zero.stage == "auto" else {}
        if before:
            # Imported here because few programs need the planner.
            from zerograph.planner.search import choose

            choose(self, job, self._adopted, args, kwargs, self._doing())

        def checks() -> None:
            check_refused()
            if check is not None:
                check()
            if self._latest is not None:
                self._latest.check_files()

        compilations = self._compilations
        try:
            step, batch = self._steps.ready(job, (args, kwargs), self._request, self._doing(), self._counts, checks)
        except BaseException:
            self.config.set(**before)
            raise
        self._latest = step
        self._share_seed(job)
        if self._compilations > compilations:
            self._on_compiled(step, job)
        return step, batch

    def _share_seed(self, job: Job) -> None:
        if self._seed is None:
            self._seed = broadcast_number(job, (torch.initial_seed() + 2**63) % 2**64 - 2**63)

    @property
    def _compilations(self) -> int:
        return self._steps.compilations

    def _on_compiled(self, step: CompiledStep, job: Job) -> None:
        """Log a step that was just compiled."""
        logs.tell(step.prepared, type(self).__name__, job.rank if job.size > 1 else None)

    def _refuse_where_nothing_runs(self) -> None:
        """Raise inside ``build()`` and inside ``sharded_init()``, before anything reads a tensor's value."""
        outer = _building.get()
        if outer is not None:
            raise CaptureError(
                f"{type(self).__name__} was called inside the build() of {outer}: graphs do not nest\n"
                "Call the modules themselves inside build()."
            )
        if is_constructing():
            raise InputError(
                f"{type(self).__name__} was called inside sharded_init(): tensors are only parts there\n"
                "Call it after the block."
            )

    def _counts(self) -> dict[str, str]:
        return {"steps done": str(self.steps_done), "forward passes and skipped steps": str(self._passes_done)}

    def _check_replicas(self) -> None:
        """Compare what ranks hold as replicas, every ``config.checks.check_replicas`` calls."""
        interval = self.config.checks.check_replicas
        if not interval or (self.steps_done + self._passes_done) % interval:
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
        """Return the seed of the next step. It depends on the class too: graphs that alternate draw other numbers."""
        seed = self._seed if self.config.seed is None else self.config.seed
        return digest((seed, type(self).__qualname__, self.steps_done, self._passes_done))

    def _count_skipped(self) -> None:
        self.steps_skipped += 1
        if self.steps_skipped == 1:
            warn_user(
                f"{self._doing()} was skipped: its loss or a gradient is not finite, and nothing was changed\n"
                "step.steps_skipped counts such steps from here on, without a further warning. "
                "config.checks.on_nonfinite = 'raise' names the operator that computes the first such number."
            )

    def _finish_step(self, step: CompiledStep, values: Sequence[Tensor], skipped: Set[str]) -> None:
        """Count the step, run its hooks and step its schedulers.

        Args:
            values: the step's outputs, without flags.
            skipped: names of the optimizers that skipped their update: their hooks and schedulers do not run.
        """
        for name, update in step.context.updates.items():
            if update.optimizer not in skipped:
                step.stores[name].fresh = False
        self.steps_done += 1
        updated = [number for number in range(len(self._optimizers)) if f"optimizer{number}" not in skipped]
        for number in updated:
            optimizer = self._optimizers[number]
            self._compiler.updates.advance(number)
            _torch.mark_step_called(optimizer)
            run_hooks_after(optimizer)
        for scheduler in (self._schedulers[number] for number in updated):
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(step.metric(values))
            elif scheduler is not None:
                scheduler.step()

    def _traced_build(self, *args: Any, **kwargs: Any) -> Any:
        with given(_building, type(self).__name__):
            return self.build(*args, **kwargs)

    def _attributes(self) -> dict[str, Any]:
        own = ("steps_done", "steps_skipped")
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name not in own}

    def _attributes_of_code(self) -> dict[str, Any]:
        """Return the attributes, with the private ones of the user's class."""
        private = {name: value for name, value in vars(self).items() if name[0] == "_" and name not in _OWN}
        return {**self._attributes(), **private}

    def _doing(self) -> str:
        return f"step {self.steps_done + 1}" if self._optimizers else "a forward pass"


_OWN = frozenset(vars(ZeroGraph()))
