"""The compiler's driver: capture a graph, lay out its parameters, run the passes and the backend, bind the state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from zerograph.artifact.code import recorded
from zerograph.base.contexts import collection_paused
from zerograph.base.progress import tell
from zerograph.base.recording import Recording
from zerograph.base.source import warn_user
from zerograph.capture import accelerator, trace as capturing
from zerograph.capture.captured import Captured
from zerograph.capture.experts import in_groups
from zerograph.capture.named_values import NAMED_VALUES, NamedValues, ValueStates
from zerograph.capture.places import Place, PythonState
from zerograph.capture.some_results import of_results
from zerograph.compiler.artifacts import Artifact, LoadedArtifacts, requirements
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep, PreparedStep, bind_step, fingerprint, graph_lines, numbered
from zerograph.compiler.dependencies import Dependencies
from zerograph.compiler.index_inputs import check_indices, read_outside_regions
from zerograph.compiler.input_layout import rows_on, zero_dims_on
from zerograph.compiler.layout import Layouts, PlannedBucket, Update, keep_gather_buffers, reserve_files
from zerograph.compiler.members import (
    Members,
    Optimizers,
    check_optimizers,
    check_shared_memory,
    parameter_groups,
    repeated_blocks,
)
from zerograph.compiler.memory_search import MemoryCandidate, search_memory
from zerograph.compiler.parameter_placement import expert_groups, expert_sbps
from zerograph.compiler.plain_inputs import NO_COMPARISON, Comparison, check_inputs, compare_inputs, explain_failure
from zerograph.compiler.preparation import Observer, Preparation, Target, prepare_for_sizes
from zerograph.compiler.step_cache import StepSource
from zerograph.compiler.step_key import StepKey, StepRequest
from zerograph.compiler.updates import Updates
from zerograph.compiler.virtual_ranks import check_target, slices_per_rank
from zerograph.config import Config
from zerograph.errors import (
    ArtifactError,
    CaptureError,
    ConfigError,
    PlacementError,
    RankMismatchError,
    ZeroGraphError,
)
from zerograph.ir.annotate import annotation
from zerograph.ir.buckets import default_bytes
from zerograph.ir.mesh import Mesh, piece_count
from zerograph.ir.metadata import meta, origin
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import output_nodes, writes
from zerograph.passes.pipeline import edited
from zerograph.runtime.backends import backends
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.process_group import Job, agree, digest, reporting_failures
from zerograph.runtime.state import Extents, Store, create_store, move, release, store_of, stores_of
from zerograph.runtime.wire import selection

# A step before it was bound, the name of the backend, and what this has compiled.
Kept = tuple[PreparedStep, str, backends.Compiled]


@dataclass
class Compiler:
    """Compiles the steps of one graph. Caches captures and update programs, which take the longest.

    Attributes:
        build: the function to trace.
        optimizers: those of the graph, in order of registration.
        config: the graph's options.
        observer: follows each compilation.
        updates: traces the updates of the optimizers.
        loaded: steps that were read from files.
    """

    build: Callable[..., Any]
    optimizers: Optimizers
    config: Config
    observer: Observer
    updates: Updates = field(init=False)
    loaded: LoadedArtifacts = field(default_factory=LoadedArtifacts)
    _captures: dict[tuple[Hashable, ...], tuple[Captured, float, int]] = field(default_factory=dict)
    # Python state that build() changes, by key.
    _guards: dict[Hashable, Place] = field(default_factory=dict)
    # Values that build() reads by name, the module that holds the graph's then, and the states of all so far.
    _named: tuple[nn.Module, NamedValues] | None = None
    _states: ValueStates = field(default_factory=ValueStates)
    _warned: set[str] = field(default_factory=set)
    _synchronised: bool = False
    # The ranks have traced other graphs: rank 0 traces for all.
    _once: bool = False
    # Prepared and compiled steps by what they were captured for, and by their plan of buckets.
    _kept: dict[Hashable, dict[Hashable, Kept]] = field(default_factory=dict)
    # While a step is compiled: may have the step; else it says whether to record the trace.
    _source: StepSource | None = None

    def __post_init__(self) -> None:
        self.updates = Updates(self.optimizers)

    def compile(
        self,
        job: Job,
        members: Members,
        batch: Batch,
        key: StepKey,
        doing: str,
        dependencies: Dependencies,
        *,
        may_be_cached: bool = True,
        kept: Kept | None = None,
    ) -> CompiledStep:
        """Compile a step for these inputs. A collective: state changes once all ranks have the same graph.

        Code that goes through a set of texts, for instance, does so in another order in each process. If the ranks'
        graphs differ, rank 0 traces for all those whose code and values are the same.

        Args:
            job: the ranks.
            members: the graph's modules and tensors.
            batch: the inputs, on this rank.
            key: selects the step.
            doing: names the step in messages.
            dependencies: what the captured graph depends on besides its inputs.
            may_be_cached: the cache of steps may have the step. It compares with the present state.
            kept: what :meth:`kept` has returned.

        Raises:
            ZeroGraphError: on every rank, whichever rank found the problem.
        """

        def compiled() -> CompiledStep:
            required = requirements(members, dependencies.texts(), self.config, key.request, job.mesh, batch)
            source = StepSource(job, members, batch, required, dependencies, self._once)
            return self._compiled(source, key, doing, may_be_cached=may_be_cached, kept=kept)

        try:
            return compiled()
        except RankMismatchError as error:
            # Without facts a rank has failed, and raises another error. What may not be cached is not sent either.
            if self._once or not error.facts or not may_be_cached or kept is not None:
                raise
            self._once, first = True, error
            self._captures.clear()
        try:
            return compiled()
        except RankMismatchError as again:
            # The ranks have other code or values: the first message says where their graphs differ.
            raise first if again.facts else again from None

    def _compiled(
        self, source: StepSource, key: StepKey, doing: str, *, may_be_cached: bool, kept: Kept | None
    ) -> CompiledStep:
        job, members, batch = source.job, source.members, source.batch
        problem: BaseException | None = None
        prepared: PreparedStep | None = None
        wire = selection.transport_of(job)
        comparison = compare_inputs(job, batch, doing) if key.request.compares_inputs else NO_COMPARISON
        target = Target(job.mesh, job.rank, wire.exchanges, wire.hosts, comparison)
        self.observer.started()
        if may_be_cached and kept is None:
            source.look_up()
        try:
            if kept is None:
                self._source = source
                if source.interrupt is not None:
                    raise source.interrupt
                with job.liveness.busy(f"tracing and rewriting {doing}"):
                    prepared = self.prepare(target, members, batch, key, source.required)
                source.send(prepared)
                with job.liveness.busy(f"compiling {doing} with the backend"):
                    backend, function = self._run_backend(members, prepared.graph)
            else:
                prepared, backend, function = kept
            places = reserve_files(prepared.layout, job.mesh, job.rank)
        except BaseException as error:
            problem = error
            source.decline()
        finally:
            self._source = None
        lines = [] if prepared is None else fingerprint(prepared.layout, prepared.graph)
        agree(job, f"running {doing}", digest(lines), lambda: {**source.code(prepared), **numbered(lines)}, problem)
        assert prepared is not None
        # Not before: whether a step is kept must be the same on all ranks.
        of_plan = self._kept.setdefault((job, key.of_capture(batch), key.config, key.request), {})
        of_plan[_plan_key(prepared.layout)] = prepared, backend, function
        source.keep(prepared)
        with reporting_failures(job, f"laying out parameters for {doing}"):
            stores = self._apply(job, members, prepared.layout, places)
        return bind_step(job, members, prepared, backend, function, stores, self.config)

    def kept(self, job: Job, members: Members, batch: Batch, key: StepKey) -> Kept | None:
        """Return what was compiled for these inputs and for such buckets as the step would have now; else None.

        Another graph may have moved the parameters into other stores since, as two optimizers in turn do.
        """
        of_plan = self._kept.get((job, key.of_capture(batch), key.config, key.request))
        if not of_plan or self.config.memory.memory_budget is not None:
            return None
        layout = self.lay_out(job.mesh, members, batch, key)
        if (found := of_plan.get(_plan_key(layout))) is None:
            return None
        prepared, backend, function = found
        return replace(prepared, layout=keep_gather_buffers(layout, prepared.graph.graph)), backend, function

    def prepare(
        self, target: Target, members: Members, batch: Batch, key: StepKey, required: Mapping[str, str]
    ) -> PreparedStep:
        """Capture, lay out and rewrite a step for one rank. Changes no state and needs no process group.

        Args:
            target: the rank to prepare for.
            members, batch, key: as for :meth:`compile`; tensors may be on the meta device.
            required: the :func:`zerograph.compiler.artifacts.requirements`.

        Raises:
            ZeroGraphError: the step cannot be one graph, or not on this mesh.
        """
        self.observer.started()
        check_optimizers(members, self.optimizers)
        mesh, comparison, request = target.mesh, target.comparison, key.request
        source = self._source
        artifact = self.loaded.find(required, batch) or (None if source is None else source.artifact)
        with explain_failure(batch, comparison):
            captured, seconds = self._capture(members, batch, mesh, key, artifact)
        if source is not None:
            source.traced(captured.recording)
        self._check_memory(members, captured)
        self._check_captured(captured, mesh, batch, comparison, request)
        start = time.perf_counter()
        updates = self.updates.of(members, captured, self.config, None if artifact is None else artifact.programs)
        update_seconds = time.perf_counter() - start
        preparation = Preparation(
            layouts=self._layouts(mesh, members, batch, captured, updates),
            observer=self.observer,
            target=target,
            batch=batch,
            capture_seconds=seconds,
            update_seconds=update_seconds,
            blocks=self._blocks(members) if captured.gradients else (),
            backend=self._resolve_backend(members)[1],
            request=request,
            warn=self._warn,
            requirements=required,
        )
        step = prepare_for_sizes(lambda: self._fit_memory_budget(preparation, artifact), captured.sizes, batch)
        self.observer.prepared(step, target.rank)
        return step

    def recording_of(self, step: PreparedStep, members: Members, request: StepRequest) -> Recording:
        """Return what the trace of a step ran; ``build()`` is traced once more if that was not recorded.

        Raises:
            ArtifactError: the graph is another one now.
        """
        if step.captured.recording is not None:
            return step.captured.recording
        with recorded() as recording:
            traced = self._trace(members, step.batch, step.context.mesh, request)
        if graph_lines(traced.graph.graph) != graph_lines(step.captured.graph.graph):
            raise ArtifactError(
                "build() traces to another graph now than when the step was compiled\n"
                "Compile the step again before you export it."
            )
        return recording

    def _fit_memory_budget(self, preparation: Preparation, artifact: Artifact | None) -> PreparedStep:
        """Prepare the step within the memory budget, if the configuration has one."""
        if artifact is not None and (step := preparation.from_artifact(artifact)) is not None:
            return step
        config, layouts = self.config, preparation.layouts
        members = layouts.members
        specs = members.specs(members.parameters)
        total = sum(specs[name].numel * specs[name].dtype.itemsize for name in layouts.updates)
        may_recompute = config.memory.activation_checkpointing == "auto" and bool(layouts.captured.gradients)
        on_accelerator = any(members.device(parameter).type != "cpu" for parameter in members.parameters.values())
        return search_memory(
            preparation.prepare,
            MemoryCandidate(
                config.zero.bucket_size, min_recompute_bytes=0, offload_activations=config.memory.offload.activations
            ),
            default_bucket_bytes=(
                default_bytes(total)
                if config.memory.memory_budget is not None and config.zero.bucket_size is None
                else None
            ),
            may_recompute=may_recompute,
            may_offload=may_recompute and on_accelerator,
        )

    def _check_captured(
        self, captured: Captured, mesh: Mesh, batch: Batch, comparison: Comparison, request: StepRequest
    ) -> None:
        """Show the capture's warnings; raise if the captured graph cannot run on these inputs or on this mesh."""
        for message in captured.state_changes.warnings:
            self._warn(message)
        check_inputs(batch, read_outside_regions(captured), comparison, self._warn)
        parts = piece_count(rows_on(self.config, mesh), mesh)
        # Slices are cut alike on any number of ranks.
        cuts = self.config.virtual_ranks or self.micro_batches(mesh)
        check_indices(captured, batch, parts, cuts, comparison, self._warn)
        if captured.gradients and not self.optimizers:
            raise CaptureError(
                "build() calls backward(), but no optimizer is registered: nothing would use the gradients\n"
                "Register one with add_optimizer(), or leave backward() out of a graph that only predicts."
            )
        returned = zip(
            output_nodes(captured.graph.graph), meta(captured.graph.graph.output_node())["roles"], strict=True
        )
        has_metric = any(role.kind == "output" and node.meta["val"].dim() == 0 for node, role in returned)
        if request.reads_metric and not has_metric:
            raise CaptureError(
                "ReduceLROnPlateau reads the first 0-d tensor that build() returns, but it returns none\n"
                "Return the loss, or another metric, from build()."
            )
        rows = {dim for sbp in batch.sbp for dim, entry in enumerate(sbp) if entry == Split(0)}
        if captured.regions and mesh.dims > 1 and len(rows) < mesh.dims:
            raise PlacementError(
                "build() has a local region, and along a dimension of the placement ranks have the same rows\n"
                "A region computes with a rank's own rows: pass each rank its rows, split(0) in config.mesh.input_sbp "
                "along all dimensions."
            )

    def guards(self) -> dict[str, Any]:
        """Return the current values of the Python state that traced ``build()`` functions change.

        A compiled step depends on them. The result is a fact by name, empty if there is no such state.
        """
        values = tuple((place.name, place.read()) for place in self._guards.values())
        return {"Python state that build() changes": values} if values else {}

    def reads_same(self) -> bool:
        """Return whether the values that ``build()`` reads by name are the same objects as at the last look."""
        return self._named is None or self._named[1].are_same()

    def named_values(self, members: Members) -> dict[str, str]:
        """Return the state of the values that ``build()`` reads by name as a fact; none as long as it is the first."""
        if self._named is None or self._named[0] is not members.root or not self._named[1].are_same():
            self._named = members.root, self._look(members)
        title = self._states.title_of(self._named[1])
        return {NAMED_VALUES: title} if title else {}

    def _look(self, members: Members) -> NamedValues:
        return NamedValues(PythonState(self.build, members.root, ()))

    def key_after(
        self, step: CompiledStep, batch: Batch, key: StepKey, read: Callable[[], Mapping[str, Any]]
    ) -> StepKey:
        """Return the key of a step for the facts that its trace left, if its graph is valid for them; else the same.

        Args:
            step: the step, just compiled.
            batch: the inputs that it was compiled for.
            key: the key that it was compiled for.
            read: returns the current facts.
        """
        if not step.captured.state_changes.valid_after_trace:
            return key
        now = read()
        if now != {**dict(key.facts), **{name: now[name] for name in ("modules", "attributes of the graph")}}:
            return key
        after = replace(key, facts=tuple(now.items()))
        captures = [(rest, capture) for (of, *rest), capture in self._captures.items() if of == key.of_capture(batch)]
        self._captures |= {(after.of_capture(batch), *rest): capture for rest, capture in captures}
        return after

    def lay_out(self, mesh: Mesh, members: Members, batch: Batch, key: StepKey) -> tuple[PlannedBucket, ...]:
        """Return the buckets of the step that :meth:`prepare` would make. No pass is run."""
        check_optimizers(members, self.optimizers)
        captured, _ = self._capture(members, batch, mesh, key)
        self._check_memory(members, captured)
        updates = self.updates.of(members, captured, self.config)
        return self._layouts(mesh, members, batch, captured, updates).plan()

    def _check_memory(self, members: Members, captured: Captured) -> None:
        graph = captured.graph
        constants = [
            (f"a tensor that {origin(node).source or 'the step'} reads", getattr(graph, str(node.target)))
            for node in graph.graph.find_nodes(op="get_attr")
        ]
        written = {meta(target)["role"].name for _, target, _ in writes(graph.graph)}
        check_shared_memory(members, constants, written.union(captured.gradients))

    def _layouts(
        self, mesh: Mesh, members: Members, batch: Batch, captured: Captured, updates: Mapping[str, Update]
    ) -> Layouts:
        annotations = [sbp for parameter in members.parameters.values() if (sbp := annotation(parameter)) is not None]
        experts = expert_sbps(members, mesh, self.config).values()
        zero_dims = zero_dims_on(self.config, mesh, batch.sbp, [*annotations, *experts])
        return Layouts(self.config, mesh, zero_dims, members, captured, updates, trains=bool(self.optimizers))

    def _blocks(self, members: Members) -> tuple[str, ...]:
        """Return the names of the blocks that the model repeats."""
        blocks = tuple(repeated_blocks(members.root))
        if self.config.memory.activation_checkpointing == "blocks" and not blocks:
            raise ConfigError(
                "config.memory.activation_checkpointing = 'blocks', but the model repeats none: no nn.ModuleList or "
                "nn.Sequential has several children of one class that are made of modules\n"
                "Choose 'auto' with a memory_budget, or wrap what to recompute in torch.utils.checkpoint."
            )
        return blocks

    def _run_backend(self, members: Members, graph: fx.GraphModule) -> tuple[str, backends.Compiled]:
        """Return the name of the backend, and the function that it compiled the graph to."""
        name, backend = self._resolve_backend(members)
        try:
            return name, backends.compile_graph(backend, graph, exact=self.config.virtual_ranks is not None)
        except ZeroGraphError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the backend {name!r} could not compile the step: {type(error).__name__}: {error}\n"
                "config.backend = 'eager' runs the same graph without compiling it."
            ) from error

    def _resolve_backend(self, members: Members) -> tuple[str, backends.Backend]:
        device = next((p.device for p in members.parameters.values()), torch.device("cpu"))
        name, backend = backends.resolve(self.config.backend, device)
        if self.config.virtual_ranks is not None:
            check_target(self.config, backend, device)
        return name, backend

    def runs_symbolic_sizes(self, members: Members) -> bool:
        """Return whether the backend runs symbolic sizes; CUDA graphs and a user's backend get static ones."""
        return self._resolve_backend(members)[1] in (backends.eager, backends.inductor)

    def micro_batches(self, mesh: Mesh) -> int:
        """Return the number of micro-batches into which each rank's part of the batch is cut.

        Raises:
            ConfigError: ``config.virtual_ranks`` does not fit the ranks, or another option.
        """
        if self.config.virtual_ranks is not None:
            return slices_per_rank(self.config, mesh)
        return self.config.gradient_accumulation_steps if self.optimizers else 1

    def _is_cut(self, mesh: Mesh) -> bool:
        """Return whether a rank's part of the batch is cut, or would be on fewer ranks."""
        return self.config.virtual_ranks is not None or self.micro_batches(mesh) > 1

    def _capture_options(self, mesh: Mesh, request: StepRequest) -> dict[str, Any]:
        """Return the arguments of a capture that options decide; the first is the number of parts of the batch."""
        config, updates = self.config, request.gradients in ("update", "accumulated")
        parts = config.virtual_ranks or mesh.size * self.micro_batches(mesh)
        return {
            "ranks": parts,
            "clip_grad_norm": config.clip_grad_norm if self.optimizers else None,
            "batch_norm_groups": parts if config.batch_norm == "local" else 1,
            "amp_dtype": config.precision.amp_dtype,
            "scaled": config.scaler is not None and bool(self.optimizers) and updates,
            "checked": config.checks.on_nonfinite != "ignore" and updates,
            "accumulated": request.accumulated,
        }

    def _capture(
        self, members: Members, batch: Batch, mesh: Mesh, key: StepKey, artifact: Artifact | None = None
    ) -> tuple[Captured, float]:
        """Return the captured graph, and the seconds that capturing took.

        Args:
            mesh: the ranks.
            key: selects the step; the capture depends on a part of it.
            artifact: has the captured graph, if it was loaded from a file.
        """
        parts, *options = self._capture_options(mesh, key.request).values()
        places, groups = key.request.differentiated, self._expert_groups(mesh, members).values()
        own = (key.of_capture(batch), *options, self._is_cut(mesh), tuple(groups), places)
        cached = self._captures.get(own)
        # Only local regions depend on the number of parts.
        if cached is not None and (not cached[0].regions or cached[2] == parts):
            return cached[:2]
        start = time.perf_counter()
        if artifact is not None:
            captured = artifact.captured
        else:
            tell("passes", 0, 1 + len(edited(self.config.passes)), "capture")
            if places is not None:
                of_all = replace(key, request=replace(key.request, differentiated=None))
                captured = of_results(self._capture(members, batch, mesh, of_all)[0], places)
            else:
                records = self._source is not None and self._source.records
                with recorded() if records else contextlib.nullcontext() as recording:
                    captured = self._trace(members, batch, mesh, key.request)
                captured = replace(captured, recording=recording)
        self._captures[own] = captured, time.perf_counter() - start, parts
        return self._captures[own][:2]

    def _expert_groups(self, mesh: Mesh, members: Members) -> dict[int, int]:
        return expert_groups(members, mesh, self.config, self.micro_batches(mesh))

    def take_captures(self, other: Compiler) -> None:
        """Take over what another compiler of this ``build()`` has captured: it is of global tensors, for any job.

        A process that is new has captured nothing, and must come to the same facts: none may be of Python state that
        has changed.
        """
        if not other._guards and other._states.count <= 1 and other.reads_same():
            self._captures, self._named, self._states = other._captures, other._named, other._states

    def has_captured(self, batch: Batch, key: StepKey) -> bool:
        """Return whether the graph of a step is captured, with the gradients of all results."""
        of = key.of_capture(batch)
        return any(one[0] == of and one[-1] is None for one in self._captures)

    @collection_paused()
    def _trace(self, members: Members, batch: Batch, mesh: Mesh, request: StepRequest) -> Captured:
        """Trace ``build()``; see :meth:`_capture`."""

        def traced(spec: capturing.TensorSpec) -> capturing.TensorSpec:
            return replace(spec, device=torch.device("cpu")) if members.on_accelerator else spec

        capture = capturing.Capture(
            self.build,
            members.root,
            {name: traced(spec) for name, spec in members.specs(members.parameters).items()},
            {name: traced(spec) for name, spec in members.specs(members.buffers).items()},
            members.aliases,
            list(map(traced, batch.specs)),
            batch.arranged,
            train=bool(self.optimizers),
            groups=parameter_groups(members, self.optimizers),
            pure=request.pure,
            guarded=tuple(self._guards.values()),
            sizes={name: sum(sizes) for name, sizes in batch.sizes.items()},
            **self._capture_options(mesh, request),
        )
        with in_groups(self._expert_groups(mesh, members), is_cut=self._is_cut(mesh)):
            captured = capture.run()
        self._guards |= {place.key: place for place in captured.state_changes.guards}
        if self._named is not None:
            self._states.leave_out(self._named[1], self._look(members))
        return accelerator.moved(captured) if members.on_accelerator else captured

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn_user(message)

    def _apply(
        self, job: Job, members: Members, layout: Sequence[PlannedBucket], places: Mapping[str, Extents]
    ) -> dict[str, Store]:
        """Bring the state into the planned layout, and return the stores by bucket name.

        New buckets are filled one after the other. Each takes its parameters, and their state, out of their present
        stores, so about one bucket is whole at a time.

        Args:
            places: space in files for offloaded state, by bucket name.
        """
        new_buckets = {
            planned.layout.name: [members.parameters[slot.name] for slot in planned.layout.slots]
            for planned in layout
            if planned.store is None
        }
        old_stores = stores_of(parameter for parameters in new_buckets.values() for parameter in parameters)
        stores: dict[str, Store] = {}
        for planned in layout:
            name, bucket = planned.layout.name, planned.layout
            if planned.store is None:
                stores[name] = create_store(job, planned, new_buckets[name], places[name])
            elif planned.store.layout.storage != bucket.storage:
                stores[name] = move(planned.store, bucket, places[name])
            else:
                stores[name] = planned.store
            if planned.updates:
                stores[name].first_differs |= planned.first_differs
                stores[name].keeps_unused |= planned.specs.keys() != planned.updates[0].program.state.keys()
        for store in old_stores:
            # A store that still has parameters which this graph lacks.
            if not store.is_released:
                release(store)
        if not self._synchronised:
            plain = [parameter.data for parameter in members.parameters.values() if store_of(parameter) is None]
            broadcast_from(job, [*plain, *members.buffers.values()])
            self._synchronised = True
        return stores


def _plan_key(layout: Sequence[PlannedBucket]) -> Hashable:
    """Return what a graph depends on of its buckets. Stores, and so the keys of buckets, are none of it."""
    # The gather buffers follow from the graph.
    return tuple(
        (
            replace(one.layout, key=None, storage=replace(one.layout.storage, gather_buffer=False)),
            one.fresh and one.first_differs,
            tuple(one.specs.items()),
            tuple((name, replace(layout, key=None)) for name, layout in one.layouts.items()),
            tuple(update.key() for update in one.updates),
        )
        for one in layout
    )
