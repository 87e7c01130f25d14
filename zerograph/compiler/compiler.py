"""From a graph's members and a batch to a step that runs: capture, lay out, rewrite, compile, bind."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph._torch import OpOverload
from zerograph.base.progress import tell
from zerograph.capture import accelerator
from zerograph.capture import trace as capturing
from zerograph.capture.captured import Captured
from zerograph.capture.python_state import Place
from zerograph.compiler.batch import Batch
from zerograph.compiler.blocks import repeated_blocks
from zerograph.compiler.compiled import CompiledStep, PreparedStep
from zerograph.compiler.fingerprint import fingerprint, numbered
from zerograph.compiler.index_inputs import check_indices, read_outside_regions
from zerograph.compiler.layout import Planned, Update
from zerograph.compiler.members import Members, Optimizers, check_optimizers, parameters_of
from zerograph.compiler.memory_search import Candidate, search_memory
from zerograph.compiler.plain_inputs import NO_OTHERS, Comparison, check_inputs, compare_inputs, unequal_explained
from zerograph.compiler.preparation import Observer, Preparation, lay_out
from zerograph.compiler.residence import make_room
from zerograph.compiler.shared_memory import check_shared_memory
from zerograph.compiler.updates import Updates
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, PlacementError, ZeroGraphError
from zerograph.ir.annotate import annotation
from zerograph.ir.buckets import default_bytes
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.mesh import Mesh, piece_count
from zerograph.ir.metadata import Role, meta
from zerograph.ir.step_graph import output_nodes, placeholders, writes
from zerograph.passes.pipeline import edited
from zerograph.runtime.backends import backends
from zerograph.runtime.executor import Lookup, bind, with_low_overhead
from zerograph.runtime.heap import keep_freed
from zerograph.runtime.job.process_group import Job, agree, broadcast_from_first, digest, noted
from zerograph.runtime.relayout import create_store, move, release
from zerograph.runtime.state import Extents, Store, store_of, stores_of
from zerograph.runtime.wire import selection


@dataclass
class Compiler:
    """Compiles the steps of one graph; keeps captures and update programs, which cost the most to make again.

    ``reads_metric``: a scheduler will read the first 0-d tensor that ``build()`` returns. ``accumulates``: a graph
    without optimizer has micro-batches, too.
    """

    build: Callable[..., Any]
    optimizers: Optimizers
    config: Config
    observer: Observer
    reads_metric: bool = False
    accumulates: bool = False
    updates: Updates = field(init=False)
    _captures: dict[tuple[Hashable, ...], tuple[Captured, float, int]] = field(default_factory=dict)
    # Places of Python state that build() changes, by key.
    _guards: dict[Hashable, Place] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _synchronised: bool = False

    def __post_init__(self) -> None:
        self.updates = Updates(self.optimizers)

    def compile(self, job: Job, members: Members, batch: Batch, key: Hashable, doing: str) -> CompiledStep:
        """Compile a step for these inputs. Every rank calls it; state changes only once all ranks have the same graph.

        Args:
            key: equal for equal members and inputs: then the capture is the same, whatever the configuration (but for
                ``clip_grad_norm``).
            doing: names the step in messages.

        Raises:
            ZeroGraphError: on every rank, whichever rank found the problem.
        """
        problem: BaseException | None = None
        prepared: PreparedStep | None = None
        exchanges = selection.select_exchanges(job)
        compared = compare_inputs(job, batch, doing)
        try:
            with job.signs.busy(f"tracing and rewriting {doing}"):
                prepared = self.prepare(job.mesh, members, batch, key, exchanges, job.rank, compared)
            with job.signs.busy(f"compiling {doing} with the backend"):
                backend, function = self._compiled(members, prepared.graph)
            places = make_room(prepared.layout, job.mesh, job.rank)
        except BaseException as error:
            problem = error
        lines = [] if prepared is None else fingerprint(prepared.layout, prepared.graph)
        agree(job, f"running {doing}", digest(lines), lambda: numbered(lines), problem)
        assert prepared is not None
        with noted(job, f"laying out parameters for {doing}"):
            stores = self._apply(job, members, prepared.layout, places)
        return self._bind(job, members, prepared, backend, function, stores)

    def prepare(
        self,
        mesh: Mesh,
        members: Members,
        batch: Batch,
        key: Hashable,
        exchanges: Mapping[str, OpOverload] | None = None,
        rank: int | None = None,
        compared: Comparison = NO_OTHERS,
    ) -> PreparedStep:
        """Capture, lay out and rewrite a step for one rank of ``mesh``. Touches no state and needs no process group.

        Args:
            batch, key: as :meth:`compile` has them; members and batch may be on the meta device.
            exchanges: what moves tensors instead of torch's collectives; see :mod:`zerograph.runtime.wire.selection`.
            rank: what ``ZEROGRAPH_DUMP`` files the graphs under; default: its place on the mesh.
            compared: what the ranks know of each other's plain inputs.

        Raises:
            ZeroGraphError: the step cannot be one graph, or not on this mesh.
        """
        self.observer.started()
        self._check(members)
        with unequal_explained(batch, compared):
            captured, seconds = self._capture(members, batch, mesh.size * self.micro_batches, key)
        self._check_captured(captured, mesh, batch, compared)
        updates, update_seconds = self._trace_updates(members, captured)
        preparation = Preparation(
            config=self.config,
            observer=self.observer,
            rank=mesh.rank if rank is None else rank,
            mesh=mesh,
            zero_dim=self._zero_dim(mesh, members, batch),
            members=members,
            batch=batch,
            captured=captured,
            capture_seconds=seconds,
            updates=updates,
            update_seconds=update_seconds,
            exchanges=exchanges or {},
            blocks=self._blocks(members) if captured.gradients else (),
            backend=self._backend(members)[1],
            micro_batches=self.micro_batches,
            trains=bool(self.optimizers),
            warn=self._warn,
        )
        step = self._fit_memory_budget(preparation)
        self.observer.prepared(step, preparation.rank)
        return step

    def _trace_updates(self, members: Members, captured: Captured) -> tuple[dict[str, Update], float]:
        """Return the update of each parameter, and the seconds that tracing them took."""
        began = time.perf_counter()
        return self.updates.of(members, captured, self.config), time.perf_counter() - began

    def _fit_memory_budget(self, preparation: Preparation) -> PreparedStep:
        """Prepare the step within the memory budget, if there is one."""
        config, members = self.config, preparation.members
        specs = members.specs(members.parameters)
        total = sum(math.prod(specs[name].shape) * specs[name].dtype.itemsize for name in preparation.updates)
        may_recompute = config.recompute == "auto" and bool(preparation.captured.gradients)
        on_accelerator = any(members.device(one).type != "cpu" for one in members.parameters.values())
        return search_memory(
            preparation.prepare,
            Candidate(config.bucket_size, min_recompute_bytes=0, offload_activations=config.offload_activations),
            default_bucket_bytes=(
                default_bytes(total) if config.memory_budget is not None and config.bucket_size is None else None
            ),
            may_recompute=may_recompute,
            may_offload=may_recompute and on_accelerator,
        )

    def _check_captured(self, captured: Captured, mesh: Mesh, batch: Batch, compared: Comparison) -> None:
        """Show the capture's warnings; raise if the captured graph cannot run on these inputs or on this mesh."""
        for message in captured.state_changes.warnings:
            self._warn(message)
        check_inputs(batch, read_outside_regions(captured), compared, self._warn)
        parts = piece_count(self.config.batch_on(mesh.dims), mesh)
        check_indices(captured, batch, parts, self.micro_batches, compared, self._warn)
        if captured.gradients and not self.optimizers:
            raise CaptureError(
                "build() calls backward(), but no optimizer is registered: the gradients would go nowhere\n"
                "Register one with add_optimizer(), or leave backward() out of a graph that only predicts."
            )
        returned = zip(
            output_nodes(captured.graph.graph), meta(captured.graph.graph.output_node())["roles"], strict=True
        )
        if self.reads_metric and not any(r.kind == "output" and node.meta["val"].dim() == 0 for node, r in returned):
            raise CaptureError(
                "ReduceLROnPlateau watches the first 0-d tensor that build() returns, but it returns none\n"
                "Return the loss, or whatever is to fall or rise, from build()."
            )
        if captured.regions and mesh.dims > 1:
            raise PlacementError(
                "build() has a local region, and the graph's placement has several dimensions\n"
                "Which ranks then have parts of their own is not defined yet: use a placement of one dimension."
            )

    def guards(self) -> dict[str, Any]:
        """Return the Python state that ``build()`` changed when it was traced, as it is now: a step depends on it."""
        values = tuple((place.name, place.read()) for place in self._guards.values())
        return {"Python state that build() changes": values} if values else {}

    def keys_left(
        self, step: CompiledStep, batch: Batch, known: Mapping[str, Any], read: Callable[[], Mapping[str, Any]]
    ) -> list[Hashable]:
        """Return the key of a step for the facts as its trace left them, if its graph holds for those.

        Args:
            known: the facts that it was compiled for.
            read: reads them as they are now.
        """
        if not step.captured.state_changes.valid_after_trace:
            return []
        now = read()
        if now != {**known, **{name: now[name] for name in ("modules", "attributes of the graph")}}:
            return []
        before, after = ((tuple(facts.values()), batch.key()) for facts in (known, now))
        self._captures |= {(after, *rest): one for (first, *rest), one in self._captures.items() if first == before}
        return [(after, self.config.key())]

    def lay_out(self, mesh: Mesh, members: Members, batch: Batch, key: Hashable) -> tuple[Planned, ...]:
        """Return the buckets of the step that :meth:`prepare` would make, and where they rest; no pass is run."""
        self._check(members)
        captured, _ = self._capture(members, batch, mesh.size * self.micro_batches, key)
        updates = self.updates.of(members, captured, self.config)
        zero_dim = self._zero_dim(mesh, members, batch)
        return lay_out(self.config, mesh, zero_dim, members, captured, updates, trains=bool(self.optimizers))

    def _check(self, members: Members) -> None:
        check_optimizers(members, self.optimizers)
        if self.optimizers:
            check_shared_memory(members)

    def _zero_dim(self, mesh: Mesh, members: Members, batch: Batch) -> int:
        placed = [sbp for one in members.parameters.values() if (sbp := annotation(one)) is not None]
        return self.config.zero_dim_on(mesh.dims, batch.sbp, placed)

    def _blocks(self, members: Members) -> tuple[str, ...]:
        """The blocks that the model repeats, if the configuration needs to know."""
        if self.config.recompute == "none":
            return ()
        found = tuple(repeated_blocks(members.root))
        if self.config.recompute == "blocks" and not found:
            raise ConfigError(
                "config.recompute = 'blocks', but the model repeats none: no nn.ModuleList or nn.Sequential has "
                "several children of one class that are made of modules\n"
                "Choose 'auto' with a memory_budget, or put torch.utils.checkpoint around what is to be made again."
            )
        return found

    def _compiled(self, members: Members, graph: fx.GraphModule) -> tuple[str, backends.Compiled]:
        """Name of the backend, and what it made of the graph."""
        name, backend = self._backend(members)
        try:
            return name, backends.compile_graph(backend, graph)
        except ZeroGraphError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the backend {name!r} could not compile the step: {type(error).__name__}: {error}\n"
                "config.backend = 'eager' runs the same graph without compiling it."
            ) from error

    def _backend(self, members: Members) -> tuple[str, backends.Backend]:
        device = next((p.device for p in members.parameters.values()), torch.device("cpu"))
        return backends.resolve(self.config.backend, device)

    @property
    def micro_batches(self) -> int:
        """Into how many micro-batches each rank's part of the batch is cut."""
        return self.config.gradient_accumulation_steps if self.optimizers or self.accumulates else 1

    def _capture(self, members: Members, batch: Batch, parts: int, key: Hashable) -> tuple[Captured, float]:
        """``parts``: of the batch that are computed each by itself, beside each other or in turn."""
        clip = self.config.clip_grad_norm if self.optimizers else None
        scaled = self.config.scaler is not None and bool(self.optimizers)
        checked = self.config.on_nonfinite != "ignore"
        batch_norm_groups = parts if self.config.batch_norm == "local" else 1
        key = (key, clip, batch_norm_groups, self.config.amp_dtype, scaled, checked)
        if (known := self._captures.get(key)) is None or (known[0].regions and known[2] != parts):
            began = time.perf_counter()
            tell("passes", 0, 1 + len(edited(self.config.passes)), "capture")

            def traced(specs: Iterable[capturing.TensorSpec]) -> list[capturing.TensorSpec]:
                return [replace(one, device=torch.device("cpu")) if members.on_accelerator else one for one in specs]

            captured = capturing.Capture(
                self.build,
                members.root,
                dict(zip(members.parameters, traced(members.specs(members.parameters).values()), strict=True)),
                dict(zip(members.buffers, traced(members.specs(members.buffers).values()), strict=True)),
                members.aliases,
                traced(batch.specs),
                batch.arranged,
                train=bool(self.optimizers),
                ranks=parts,
                groups=_groups(members, self.optimizers),
                trained=_trained(members, self.optimizers),
                clip_grad_norm=clip,
                batch_norm_groups=batch_norm_groups,
                amp_dtype=self.config.amp_dtype,
                scaled=scaled,
                checked=checked,
                guarded=tuple(self._guards.values()),
            ).run()
            self._guards |= {place.key: place for place in captured.state_changes.guards}
            if members.on_accelerator:
                captured = accelerator.moved(captured)
            self._captures[key] = captured, time.perf_counter() - began, parts
        return self._captures[key][:2]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def _apply(
        self, job: Job, members: Members, layout: Sequence[Planned], places: Mapping[str, Extents]
    ) -> dict[str, Store]:
        """Bring the state into the planned layout, by bucket name, one new bucket after the other.

        Each takes its parameters, and their state, out of where they are; so about one bucket is whole at a time. What
        is only to rest elsewhere moves there; ``places`` has the room for it.
        """
        new = {
            one.bucket.name: [members.parameters[slot.name] for slot in one.bucket.slots]
            for one in layout
            if one.store is None
        }
        moving = stores_of(parameter for parameters in new.values() for parameter in parameters)
        stores: dict[str, Store] = {}
        for one in layout:
            name, bucket = one.bucket.name, one.bucket
            if one.store is None:
                kept = one.specs, one.layouts, one.first_differs, one.keeper
                stores[name] = create_store(job, bucket, new[name], *kept, places[name])
            elif one.store.layout.storage != bucket.storage:
                stores[name] = move(one.store, bucket, places[name])
            else:
                stores[name] = one.store
            if one.updates:
                stores[name].first_differs |= one.first_differs
                stores[name].keeps_unused |= one.specs.keys() != one.updates[0].program.state.keys()
        for store in moving:
            # Of parameters that this graph does not have.
            if not store.is_released:
                release(store)
        if not self._synchronised:
            plain = [parameter.data for parameter in members.parameters.values() if store_of(parameter) is None]
            broadcast_from_first(job, [*plain, *members.buffers.values()])
            self._synchronised = True
        return stores

    def _bind(
        self,
        job: Job,
        members: Members,
        prepared: PreparedStep,
        backend: str,
        function: backends.Compiled,
        stores: Mapping[str, Store],
    ) -> CompiledStep:
        graph = prepared.graph
        lookups = {Role("parameter", name): _lookup(members.root, name) for name, p in members.parameters.items()} | {
            Role("buffer", name): _lookup(members.root, name) for name in members.buffers
        }
        if (scaler := prepared.context.numerics.scaler) is not None:
            for node in placeholders(graph.graph, "scaler"):
                name, device = meta(node)["role"].name, node.meta["val"].device
                lookups[meta(node)["role"]] = functools.partial(_tensor_of, scaler, name, device)
        written = {meta(target)["role"] for _, target, _ in writes(prepared.captured.graph.graph)}
        executor = bind(job, graph, function, stores, lookups, written=written)
        if backend in backends.BACKENDS:
            executor = with_low_overhead(executor)
        if self.config.keep_freed_memory and all(
            node.meta["val"].device.type == "cpu" for node in placeholders(graph.graph)
        ):
            keep_freed()
        numbers = {
            name: (update.group, update.program.numbers[short])
            for one in prepared.layout
            for update in one.updates
            for short, name in update.numbers().items()
        }
        about = graph.graph.output_node().meta
        returned = zip(about["needs"], output_nodes(graph.graph), about["roles"], strict=True)
        outputs = tuple((need, meta(node)["global"]) for need, node, r in returned if r.kind == "output")
        return CompiledStep(
            captured=prepared.captured,
            passes=prepared.passes,
            context=prepared.context,
            aliases=prepared.aliases,
            warnings=prepared.warnings,
            backend=backend,
            executor=executor,
            stores=stores,
            numbers=numbers,
            outputs=outputs,
            lookups=lookups,
        )


def _tensor_of(scaler: GradScaler, name: str, device: torch.device) -> Tensor:
    return scaler.tensors(device)[name]


def _lookup(root: nn.Module, name: str) -> Lookup:
    """Finds a tensor of ``root`` anew for each step: the user may have put another in its place."""
    path, _, attribute = name.rpartition(".")
    return functools.partial(getattr, root.get_submodule(path), attribute)


def _trained(members: Members, optimizers: Optimizers) -> dict[str, set[str]]:
    """The names of each optimizer's parameters, by the optimizer's name in the graph."""
    names = members.names()
    return {
        f"optimizer{number}": {names[id(parameter)] for parameter in parameters_of(optimizer)}
        for number, optimizer in enumerate(optimizers)
    }


def _groups(members: Members, optimizers: Optimizers) -> list[tuple[dict[str, Any], list[str]]]:
    """Every parameter group with the names of its parameters."""
    names = members.names()
    return [
        (group, [names[id(parameter)] for parameter in group["params"]])
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
