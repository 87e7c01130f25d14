"""The preparation of a captured step: lay parameters out in buckets, and run the passes.

A step keeps its memory budget for declared maxima of dynamic sizes, and for the largest sizes that were seen when it
was compiled. If these do not fit all together, which perhaps no call needs, the sizes of one call decide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.base.contexts import collection_paused
from zerograph.compiler.artifacts import Artifact
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep, PreparedStep
from zerograph.compiler.layout import Layouts, PlannedBucket, keep_gather_buffers
from zerograph.compiler.memory_search import MemoryCandidate, budget_error
from zerograph.compiler.plain_inputs import NO_COMPARISON, Comparison
from zerograph.compiler.step_key import StepRequest
from zerograph.errors import ArtifactError, MemoryBudgetError, PlacementError
from zerograph.ir.dims import Dim
from zerograph.ir.finite_check import NOT_FINITE
from zerograph.ir.hosts import HostLayout
from zerograph.ir.memory import profile
from zerograph.ir.mesh import Mesh
from zerograph.ir.sizes import Sizes
from zerograph.ir.step_graph import output_with_role
from zerograph.ir.zero import OFF
from zerograph.passes.context import (
    BackendTraits,
    BatchLayout,
    BucketUpdate,
    Context,
    MemoryOptions,
    MissingRules,
    Numerics,
)
from zerograph.passes.pipeline import PassRecord, run_pipeline
from zerograph.runtime.backends import backends


class Observer(Protocol):
    """Follows a compilation, to log or dump it."""

    def started(self) -> None:
        """Receive the start, before anything is traced."""

    def passes(self, captured: fx.GraphModule, context: Context, rank: int) -> AbstractContextManager[None]:
        """Return a context manager for one run of the passes. It sees the exception of a pass."""

    def prepared(self, step: PreparedStep, rank: int) -> None:
        """Receive the prepared step."""


def check_target(mesh: Mesh, device: str) -> None:
    """Check that a step can be prepared for a rank of ``mesh`` and for ``device``.

    Raises:
        PlacementError: there is no such mesh, rank or device.
    """
    if (
        not isinstance(mesh, Mesh)
        or not mesh.size
        or any(a >= n for a, n in zip(mesh.position, mesh.shape, strict=True))
    ):
        raise PlacementError(f"prepare({mesh!r:.80}): pass a mesh, such as zerograph.mesh.line(1024, 0, 'ranks')")
    if device not in ("cpu", "cuda", "meta"):
        raise PlacementError(f"prepare(device={device!r:.60}): choose 'cpu', 'cuda' or 'meta'")


@dataclass(frozen=True)
class Target:
    """The rank that a step is prepared for.

    Attributes:
        mesh: the ranks, and the position of that one.
        rank: files of ``ZEROGRAPH_DUMP`` are filed under it.
        exchanges: the operators that replace torch's collectives, by collective; see
            :mod:`zerograph.runtime.wire.selection`.
        hosts: which ranks share a host; None: unknown.
        comparison: the plain inputs of all ranks.
    """

    mesh: Mesh
    rank: int
    exchanges: Mapping[str, OpOverload]
    hosts: HostLayout | None = None
    comparison: Comparison = NO_COMPARISON


@dataclass(eq=False, kw_only=True)
class Preparation:
    """Prepares one captured step for one rank, once for each candidate of the memory search.

    Attributes:
        layouts: has the captured graph and its updates, and lays out the parameters.
        observer: follows the runs of the passes.
        target: the rank to prepare for.
        batch: the inputs, on that rank.
        capture_seconds: seconds that capturing took.
        update_seconds: seconds that tracing the updates took.
        blocks: names of the blocks that the model repeats.
        backend: compiles the emitted graph.
        request: what the caller asks for.
        warn: shows a message to the user.
        requirements: see :class:`zerograph.compiler.compiled.PreparedStep`.
    """

    layouts: Layouts
    observer: Observer
    target: Target
    batch: Batch
    capture_seconds: float
    update_seconds: float
    blocks: tuple[str, ...]
    backend: backends.Backend
    request: StepRequest
    warn: Callable[[str], None]
    requirements: Mapping[str, str]
    # Several bucket sizes may give the same layout. The graphs of a step that exceeds the budget are not kept.
    _results: dict[tuple[Any, ...], PreparedStep | MemoryBudgetError] = field(default_factory=dict)

    def prepare(self, candidate: MemoryCandidate) -> PreparedStep | MemoryBudgetError:
        """Return the candidate's step, or the error if it does not keep the memory budget."""
        captured, layout = self.layouts.captured, self._lay_out(candidate)
        buckets = tuple(planned.layout for planned in layout)
        sizes = () if captured.sizes is None else tuple(captured.sizes.largest_sizes().items())
        key = buckets, candidate.min_recompute_bytes, candidate.offload_activations, sizes
        if key not in self._results:
            step = self._run_passes(candidate, layout)
            self._results[key] = budget_error(step.emitted, step.context) or step
        return self._results[key]

    def from_artifact(self, artifact: Artifact) -> PreparedStep | None:
        """Return the step with the graph of a file, from which the captured graph is; None if the layout differs."""
        candidate = artifact.candidate
        layout = self._lay_out(candidate)
        context = self._context(candidate, layout, self.warn)
        try:
            passes = artifact.passes(self.layouts.captured, context)
        except ArtifactError:
            if not artifact.optional:
                raise
            passes = None
        if passes is None:
            return None
        for message in artifact.warnings:
            self.warn(message)
        return self._prepared(candidate, layout, context, passes, artifact.warnings)

    def _lay_out(self, candidate: MemoryCandidate) -> tuple[PlannedBucket, ...]:
        config = copy.copy(self.layouts.config)
        config.zero.bucket_size = candidate.bucket_size
        return replace(self.layouts, config=config).plan()

    @collection_paused()
    def _run_passes(self, candidate: MemoryCandidate, layout: Sequence[PlannedBucket]) -> PreparedStep:
        messages: dict[str, None] = {}
        show = self.warn

        # The context outlives self: a reference to self would keep the stores that the step replaces, and their files.
        def warn(message: str) -> None:
            messages[message] = None
            show(message)

        context = self._context(candidate, layout, warn)
        with self.observer.passes(self.layouts.captured.graph, context, self.target.rank):
            passes = run_pipeline(self.layouts.captured.graph, context, self.capture_seconds)
        return self._prepared(candidate, layout, context, passes, messages)

    def _prepared(
        self,
        candidate: MemoryCandidate,
        layout: Sequence[PlannedBucket],
        context: Context,
        passes: tuple[PassRecord, ...],
        messages: Iterable[str],
    ) -> PreparedStep:
        return PreparedStep(
            captured=self.layouts.captured,
            passes=passes,
            context=context,
            aliases=self.layouts.members.aliases,
            warnings=tuple(messages),
            candidate=candidate,
            requirements=self.requirements,
            batch=self.batch.with_tensors(()),
            layout=keep_gather_buffers(tuple(layout), passes[-1].graph.graph),
            update_seconds=self.update_seconds,
        )

    def _context(
        self, candidate: MemoryCandidate, layout: Sequence[PlannedBucket], warn: Callable[[str], None]
    ) -> Context:
        config, gradients, trains = self.layouts.config, self.request.gradients, self.layouts.trains
        updates = gradients in ("update", "accumulated")
        checks = output_with_role(self.layouts.captured.graph.graph, "check", NOT_FINITE.name)
        return Context(
            mesh=self.target.mesh,
            policy=replace(config.policy if trains else OFF, dims=self.layouts.zero_dims),
            buckets=tuple(planned.layout for planned in layout),
            updates={planned.layout.name: _bucket_update(planned) for planned in layout if planned.updates},
            batch=BatchLayout(
                inputs=self.batch.sbp,
                micro_batches=self.batch.micro_batches,
                cut=self.batch.cut,
                packed=self.batch.micro_batches > 1 and config.accumulation_outputs == "packed",
                early_outputs=self.request.early_outputs,
                attention=config.mesh.context_parallel_method,
                expert_capacity=config.mesh.expert_capacity,
                slices=config.virtual_ranks,
            ),
            gradients=gradients,
            numerics=Numerics(
                # A sum of many slices in the narrow dtype of their computation would lose digits.
                reduce_dtype=config.precision.reduce_dtype or (None if config.virtual_ranks is None else torch.float32),
                scaler=config.scaler if trains and updates else None,
                checked=updates and checks is not None,
                wire=config.precision.wire,
            ),
            memory=MemoryOptions(
                budget=config.memory_bytes,
                recompute=config.memory.activation_checkpointing,
                blocks=self.blocks,
                min_recompute_bytes=candidate.min_recompute_bytes,
                offload_activations=candidate.offload_activations,
            ),
            backend=BackendTraits(
                # With slices a compiler fuses little.
                node_by_node=self.backend is backends.eager or config.virtual_ranks is not None,
                inputs_may_overlap=self.backend in backends.BACKENDS.values(),
                exchanges=self.target.exchanges,
                hosts=self.target.hosts,
            ),
            missing_rules=MissingRules(config.checks.on_missing_rule, warn),
            pass_edits=config.passes,
        )


def _bucket_update(planned: PlannedBucket) -> BucketUpdate:
    entries = planned.updates[0].program.state
    return BucketUpdate(
        tuple(update.program for update in planned.updates),
        planned.fresh and planned.first_differs,
        planned.updates[0].numbers(),
        {name: layout for name, layout in planned.layouts.items() if name in entries},
        {name: layout for name, layout in planned.layouts.items() if name not in entries},
        {name: spec.dtype for name, spec in planned.specs.items() if name not in {*entries, *planned.layouts}},
        planned.updates[0].group_name.partition(".")[0],
    )


def prepare_for_sizes(prepare: Callable[[], PreparedStep], sizes: Sizes | None, batch: Batch) -> PreparedStep:
    """Prepare a step for the largest sizes seen or declared; if these exceed the budget, for those of the call.

    Args:
        prepare: runs the memory search.
        sizes: the symbols of the step; None for one without.
        batch: the inputs of the call.

    Raises:
        MemoryBudgetError: the step exceeds its budget for the sizes of the call, or for a declared maximum.
    """
    if sizes is None:
        return prepare()
    largest = list(dict.fromkeys(size for spec in batch.specs for size in spec.shape if isinstance(size, Dim)))
    before = list(sizes.dims.values())
    for dims in (largest, _of_call(largest, batch)):
        sizes.predict_for(dims)
        try:
            return prepare()
        except MemoryBudgetError as error:
            problem = error
    sizes.predict_for(before)
    raise problem


def keeps_budget(step: CompiledStep, batch: Batch) -> bool:
    """Return whether a step keeps its memory budget for the sizes of a call. All ranks return the same.

    Sizes that it keeps the budget for are remembered, and ``step.inspect.memory`` is then predicted for them.
    """
    budget, sizes = step.context.memory.budget, step.captured.sizes
    if budget is None or sizes is None:
        return True
    dims = step.dims
    if all(dim.holds(batch.sizes[name]) for name, dim in dims.items()):
        return True
    call = tuple(batch.sizes.items())
    if call in step.fitting_calls:
        return True
    before = list(sizes.dims.values())
    grown = {name: dim.grown(batch.sizes[name]) for name, dim in dims.items()}
    if _peak(step, sizes, list(grown.values())) <= budget:
        dims.update(grown)
        return True
    fits = _peak(step, sizes, _of_call(list(dims.values()), batch)) <= budget
    sizes.predict_for(before)
    if fits:
        step.fitting_calls.add(call)
    return fits


def _of_call(dims: Sequence[Dim], batch: Batch) -> list[Dim]:
    return [dim.of(batch.sizes[dim.name]) for dim in dims]


def _peak(step: CompiledStep, sizes: Sizes, dims: Sequence[Dim]) -> int:
    sizes.predict_for(dims)
    return profile(step.prepared.emitted).peak
