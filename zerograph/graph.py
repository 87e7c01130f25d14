"""ZeroGraph: what a user subclasses."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zerograph import _torch, checkpoint, finite, hyperparameters, replicas, state_dict
from zerograph.batch import Batch, give_back, read_batch
from zerograph.checkpoint.save import Saver
from zerograph.compiled import CompiledStep, Prepared
from zerograph.compiler import Compiler
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, InputError, PlacementError, SplitParameterError
from zerograph.inspected import Inspected
from zerograph.inspection import logs
from zerograph.inspection import trace as tracing
from zerograph.inspection.trace import Trace
from zerograph.layout import Planned
from zerograph.members import Members, adopt_global, capture_facts, find_members, has_global, layout_facts
from zerograph.mesh import Mesh
from zerograph.nonfinite import explained
from zerograph.runtime.executor import Executor
from zerograph.runtime.process_group import Job, agree, digest, first_ranks, join
from zerograph.runtime.state import Store, bytes_at_rest, close_whole, holds_state_of, open_whole, store_of
from zerograph.sharded_init import is_recording
from zerograph.step_graph import nbytes, output_nodes
from zerograph.update import refuse_unsupported

_building: ContextVar[str | None] = ContextVar("building", default=None)


def building() -> bool:
    """Whether a ``build()`` is being traced: tensors are then fake, of global shape, and placed later."""
    return _building.get() is not None


class ZeroGraph(Inspected):
    """A training step, or a forward pass, as one graph.

    Subclass it: assign modules to attributes in ``__init__`` (after ``super().__init__()``), register optimizers, and
    write ``build()``. Calling the graph compiles it the first time, and runs it.

    Attributes:
        config: its options, see :class:`zerograph.config.Config`.
        steps_done: updates made so far, without those skipped; 0 for a graph without optimizer.
        steps_skipped: updates left out in this process because a loss or gradient was not finite, see
            ``config.on_nonfinite``; overflows that loss scaling deals with do not count.
    """

    config: Config
    steps_done: int
    steps_skipped: int

    def __init__(self) -> None:
        self.config = Config()
        self.steps_done = 0
        self.steps_skipped = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[LRScheduler | None] = []
        self._compiler = Compiler(self._traced_build, self._optimizers, self.config)
        self._steps: dict[Hashable, CompiledStep] = {}
        self._digests: dict[Hashable, int] = {}
        self._latest: CompiledStep | None = None
        self._job: Job | None = None
        self._joined: tuple[Any, ...] = ()
        # What the random numbers follow from, where config.seed does not say, and forward passes made so far.
        self._seed: int | None = None
        self._passes_done = 0
        self._saver = Saver()

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "_optimizers", "_steps", "_job"):
            raise ConfigError(f"{type(self).__name__}.__init__() must call super().__init__() first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step: forward, ``loss.backward()`` if it trains, and what to return. Traced, never run as it stands."""
        raise ConfigError(f"{type(self).__name__} has no build(): write one")

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None = None) -> None:
        """Register an optimizer; the graph makes its update after ``build()``, and steps the scheduler after that.

        ``ReduceLROnPlateau`` is stepped with the first 0-d tensor that ``build()`` returns: its value is then read in
        each step, which waits for the device.

        Raises:
            ConfigError: not an optimizer of torch, registered already, or a scheduler that the graph cannot step.
            CaptureError: an optimizer that is no graph: LBFGS, SparseAdam.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"add_optimizer() takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if any(one is optimizer for one in self._optimizers):
            raise ConfigError(f"this {type(optimizer).__name__} is registered already")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(f"lr_scheduler={lr_scheduler!r:.60}: give a scheduler of this optimizer")
        refuse_unsupported(optimizer)
        self._optimizers.append(optimizer)
        self._schedulers.append(lr_scheduler)
        self._compiler.reads_metric |= isinstance(lr_scheduler, ReduceLROnPlateau)
        _guard(optimizer)

    def set_zero_mode(self, mode: str, stage: int | Literal["auto"] = 1) -> None:
        """``"distributed_split"``, or ``"non_distributed"``, with stage 1, 2 or 3; or ``"off"``.

        ``set_zero_mode("distributed_split", stage="auto")``: the fastest that fits ``config.memory_budget``.

        The same as ``config.enable_zero``; see :attr:`zerograph.config.Config.mode`.

        Raises:
            ConfigError: no such mode or stage.
        """
        self.config.enable_zero(mode, stage=stage, shard_min_size=self.config.shard_min_size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on this rank's part of the batch: tensors in any nesting of lists, tuples and dicts.

        Plain tensors are split along dimension 0 (0-d ones are whole), DTensors are what they say. Returns what
        ``build()`` returned: split tensors as this rank's part, others whole and equal on all ranks (with several
        micro-batches as ``config.accumulation_outputs`` says).

        Raises:
            ZeroGraphError: on every rank, before any state changes, if something is wrong on any of them.
            ReplicaError: likewise, if ranks differ in what they hold alike, see ``config.check_replicas``.
            NonFiniteError: likewise, if a loss or gradient is not finite and ``config.on_nonfinite`` is ``"raise"``.
            OperatorError: an operator refused its values on this rank, as an embedding an index out of range.
            CommunicationError: another rank does not answer within ``config.timeout`` seconds.
        """
        step, batch = self._ready(args, kwargs)
        self._check_replicas()
        return self._run(step, step.executor, batch)

    def _run(self, step: CompiledStep, executor: Executor, batch: Batch) -> Any:
        numbers = {name: hyperparameters.read(group, path) for name, (group, path) in step.numbers.items()}
        run = batch.tensors, numbers, self._seed_of_step(), self._doing()
        values = executor(*run)
        # What is not finite is not 0 either.
        flags = {name: bool(values.pop()) for name in reversed(step.flags)}
        if flags.get(finite.NOT_FINITE.name):
            if self.config.on_nonfinite == "raise":
                raise explained(step, batch.names, *run)
            self._skipped()
        if self._optimizers and not flags.get("found_inf"):
            self._step_made(step, values)
        else:
            # A step that was skipped is none, but the next one draws other numbers.
            self._passes_done += 1
        sbp = [one for one, _ in step.outputs]
        shapes = [shape for _, shape in step.outputs]
        return give_back(values, sbp, shapes, step.captured.returned, step.captured.output_spec, batch.mesh)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for inputs like these without running: parameters are split, but nothing is updated.

        Raises:
            ZeroGraphError: as calling the graph does.
        """
        self._ready(args, kwargs)

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
        executor = replace(step.executor, function=tracing.named(step.executor.function, step.emitted))
        return tracing.measure(steps, lambda: self._run(step, executor, batch), step, check())

    def prepare(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> Prepared:
        """What one rank of ``mesh`` would run for inputs like these: everything before the backend, and nothing else.

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
        return found

    def lay_out(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> tuple[Planned, ...]:
        """The buckets of what :meth:`prepare` would make for the same arguments: what rests where, at a capture's cost.

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
                f"prepare({mesh!r:.80}): give the ranks, and which of them, as zerograph.mesh.line(1024, 0, 'ranks')"
            )
        if device not in ("cpu", "cuda", "meta"):
            raise PlacementError(f"prepare(device={device!r:.60}): choose 'cpu', 'cuda' or 'meta'")
        members = replace(self._members(), meta=torch.device(device))
        grid = torch.arange(mesh.size).view(mesh.shape).tolist()
        plain = self.config.batch_on(mesh.dims)
        batch = read_batch(args, kwargs, mesh, grid, plain, self._compiler.micro_batches, members.meta)
        known = capture_facts(members, self._attributes(), self._optimizers, self._compiler.updates.constants)
        return members, batch, (tuple(known.values()), batch.key(), members.meta)

    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state that this rank holds in memory between steps, not those in files.

        The memory that stages 1 and 2 gather parameters into is there between steps, too.
        """
        plain = [parameter for parameter in self._members().parameters.values() if store_of(parameter) is None]
        return bytes_at_rest(self._stores()) + sum(map(nbytes, plain))

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, in whole tensors: ``modules`` by attribute, ``optimizers``, ``lr_schedulers``,
        ``grad_scaler``.

        Each of these is what ``state_dict()`` of the plain module, optimizer and scheduler would be; ``random`` is what
        the random numbers of the next step follow from. Every rank must call it, and gets all of it.
        """
        self._check_closed()
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
        problem: Exception | None = None
        whole: dict[str, Tensor] = {}
        facts: dict[str, str] = {}
        try:
            state_dict.check_state(self._optimizers, state)
            if self.config.scaler is not None and state.get("grad_scaler") is not None:
                self.config.scaler.check_state(state["grad_scaler"])
            if "modules" in state:
                whole = state_dict.read_modules(self._adopted(), state["modules"])
            facts = {name: str(state.get(name)) for name in ("steps_done", "random")}
        except Exception as error:
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

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int | None = None) -> None:
        """Write a checkpoint: each rank its part, in parallel. Every rank must call it, with a folder that all share.

        It has what training needs to go on, on any number of ranks and at any stage: parameters, buffers, the
        optimizers' state and hyperparameters, schedulers, loss scale, counts, and the state of torch's random
        generators of each rank. Until all of it is on the disk, what ``path`` held before is what it holds.

        Args:
            path: the folder. With ``keep`` it holds checkpoints, ``step-00000010`` for instance, and a file ``latest``.
            asynchronous: return once everything is copied, and write while training goes on; the next save, or
                :meth:`wait_for_save`, waits for it and raises what went wrong.
            keep: how many checkpoints to keep in ``path``, the newest ones.

        Raises:
            CheckpointError: it cannot be written, on every rank; what was there is still there.
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

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint that :meth:`save` wrote, or from the latest in a folder of them. Every rank calls it.

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
        """
        stores = self._stores(self._adopted())
        opened = [store for store in stores if not store.opened]
        for store in opened:
            open_whole(store)
        try:
            yield
        finally:
            for store in opened:
                close_whole(store)

    def __repr__(self) -> str:
        """The step on a screen: what was traced, what is placed where, what is sent, what is held, warnings."""
        return "\n".join([*self._heading(), *([] if self._latest is None else [self._latest.page()])])

    def describe(self) -> str:
        """The step compiled last in full: every input, output, parameter, collective, warning and pass, a line each.

        Raises:
            ConfigError: nothing compiled yet.
        """
        step = self._compiled()
        return "\n".join([*self._heading(), step.describe()])

    def _heading(self) -> list[str]:
        zero = "to be chosen" if self.config.stage == "auto" else self.config.policy.name
        modules = ", ".join(f"{name}: {type(m).__name__}" for name, m in vars(self).items() if isinstance(m, nn.Module))
        optimizers = ", ".join(type(one).__name__ for one in self._optimizers) or "none"
        # Without updates there is nothing that a stage would say.
        kind = f"ZeRO {zero}, {self.steps_done} steps done" if self._optimizers else "forward graph"
        lines = [
            f"{type(self).__name__}({kind})",
            f"  modules: {modules or 'none'}",
            f"  optimizers: {optimizers}",
        ]
        if self.config.scaler is not None:
            lines.append(f"  loss scale: {self.config.scaler.get_scale():g}")
        if self._latest is None:
            return [*lines, "  not compiled yet: call it, or compile(*inputs)"]
        job = self._latest.executor.job
        size = job.size if job.mesh.dims == 1 else job.grid
        return [*lines, f"  rank {job.rank} of {size}, backend {self._latest.backend}"]

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object] | None = None
    ) -> tuple[CompiledStep, Batch]:
        """The compiled step for these inputs, once all ranks agree on it; what ``check`` raises is raised on all."""
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
        job = self._join()
        job.check_alive()
        if self.config.stage == "auto":
            # The planner knows this class.
            from zerograph.planner.choose import choose

            choose(self, job, self._adopted, args, kwargs, self._doing())
        problem: Exception | None = None
        batch: Batch | None = None
        members: Members | None = None
        capture_key: Hashable = None
        key: Hashable = None
        step: CompiledStep | None = None
        known: dict[str, Any] = {}

        def facts() -> dict[str, str]:
            assert batch is not None
            there = {"the compiled step": "missing" if step is None else "there"}
            return {**batch.facts(), **self._shown(known), **there, **self._counts()}

        try:
            if check is not None:
                check()
            members = self._adopted()
            self._check_usable(members)
            plain = self.config.batch_on(job.mesh.dims)
            batch = read_batch(args, kwargs, job.mesh, job.grid, plain, self._compiler.micro_batches)
            self._compiler.updates.lift_changed(self.config)
            known = capture_facts(members, self._attributes(), self._optimizers, self._compiler.updates.constants)
            capture_key = (tuple(known.values()), batch.key())
            key = (capture_key, self.config.key())
            step = self._steps.get((key, layout_facts(members)))
            if step is not None:
                step.check_files()
            if job.size > 1 and key not in self._digests:
                self._digests[key] = digest({**batch.facts(), **self._shown(known)})
        except Exception as error:
            problem = error
        number = self._digests.get(key, 0) ^ (step is None)
        if self.config.check_replicas:
            # From these each rank knows whether replicas are to be compared now.
            number ^= digest(self._counts())
        agree(job, self._doing(), number, facts, problem)
        assert batch is not None
        assert members is not None
        if step is None:
            step = self._compiler.compile(job, members, batch, capture_key, self._doing())
            if self._seed is None:
                self._seed = first_ranks(job, (torch.initial_seed() + 2**63) % 2**64 - 2**63)
            # Steps that are bound to buckets which are no more would keep their memory.
            self._steps = {k: s for k, s in self._steps.items() if not any(one.dissolved for one in s.stores.values())}
            self._steps[key, layout_facts(members)] = step
            logs.tell(step, type(self).__name__, job.rank if job.size > 1 else None)
        self._latest = step
        return step, batch

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
        """The class counts too: two graphs that train in turn, one step each, do not draw the same numbers."""
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

    def _step_made(self, step: CompiledStep, values: Sequence[Tensor]) -> None:
        for store in step.updated:
            store.fresh = False
        self.steps_done += 1
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            _torch.mark_step_called(optimizer)
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(_metric(step, values))
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
        own = ("config", "steps_done", "steps_skipped")
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name not in own}

    def _members(self) -> Members:
        return find_members(self._attributes())

    def _adopted(self) -> Members:
        """The members, once the graph has taken over those of them that are global tensors."""
        members = self._members()
        if not has_global(members):
            return members
        adopt_global(members, self._optimizers, self._join())
        return self._members()

    def _stores(self, members: Members | None = None) -> list[Store]:
        """The distinct stores of the graph's parameters, in the same order on all ranks."""
        found = dict.fromkeys(map(store_of, (members or self._members()).parameters.values()))
        return [store for store in found if store is not None]

    def _check_usable(self, members: Members) -> None:
        for store in self._stores(members):
            if store.opened:
                raise InputError("the graph was called inside full_parameters(): leave it first")
            store.check_lent()

    def _check_closed(self) -> None:
        if any(store.opened for store in self._stores()):
            raise InputError("state_dict() and load_state_dict() do not work inside full_parameters(): leave it first")

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


def _metric(step: CompiledStep, values: Sequence[Tensor]) -> float:
    """The first 0-d tensor that ``build()`` returns; of one that was packed the mean."""
    traced = output_nodes(step.captured.graph.graph)
    value = next(value for value, node in zip(values, traced, strict=False) if node.meta["val"].dim() == 0)
    return float(value.item() if value.dim() == 0 else value.double().mean().item())


def _guard(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer refuse what would act on state that it no longer holds, or happen twice."""

    def refuse(what: str) -> None:
        if _building.get() is not None:
            raise CaptureError(
                f"build() calls {type(optimizer).__name__}.{what}: leave it out, the graph makes the update itself"
            )
        if holds_state_of(optimizer):
            raise SplitParameterError(
                f"{type(optimizer).__name__}.{what}: the optimizer's state lives in the graph now\n"
                "Call the graph to update; save with its state_dict(), load a plain state with its "
                'load_state_dict({"optimizers": [state]}).'
            )

    optimizer.register_step_pre_hook(lambda *_: refuse("step()"))
    optimizer.register_state_dict_pre_hook(lambda *_: refuse("state_dict()"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()"))
