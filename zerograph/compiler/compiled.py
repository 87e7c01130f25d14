"""The compiler's results: a prepared step, its fingerprint as lines of text, and a step bound to its state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.base.contexts import collection_paused
from zerograph.capture.captured import Captured
from zerograph.compiler.batch import Batch
from zerograph.compiler.layout import PlannedBucket
from zerograph.compiler.members import Members
from zerograph.compiler.memory_search import MemoryCandidate
from zerograph.config import Config
from zerograph.ir.dims import Dim, SizeInput
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Role, boxing_of, meta
from zerograph.ir.pause import pause_of
from zerograph.ir.sbp import NdSbp, partial_sum
from zerograph.ir.step_graph import output_nodes, placeholders, writes
from zerograph.ir.update_program import Path
from zerograph.optim import hyperparameters
from zerograph.optim.hyperparameters import place
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PassRecord
from zerograph.runtime.backends import backends
from zerograph.runtime.executor import Executor, Lookup, bind, with_low_overhead
from zerograph.runtime.heap import keep_freed
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.offload.transfers import check
from zerograph.runtime.state import Store, extents

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedStep:
    """A step after all passes and before the backend, without state and without process group.

    Attributes:
        captured: the graph that ``build()`` was traced to.
        passes: the graph after every pass.
        context: what the passes got besides the graph.
        aliases: maps further names of tied parameters to the first name.
        warnings: messages that the compilation showed.
        candidate: the bucket size and the recomputation that the memory search found.
        requirements: what must be equal to use the captured graph again, besides code and versions, as text by name.
        batch: the inputs, without tensors.
        layout: the buckets, in order of first use.
        update_seconds: seconds that tracing the optimizers' updates took; 0 if all updates were cached.
    """

    captured: Captured
    passes: tuple[PassRecord, ...]
    context: Context
    aliases: Mapping[str, str]
    warnings: tuple[str, ...]
    candidate: MemoryCandidate
    requirements: Mapping[str, str]
    batch: Batch
    layout: tuple[PlannedBucket, ...]
    update_seconds: float

    @property
    def emitted(self) -> fx.Graph:
        """The graph that a rank runs, with zerograph's metadata in ``node.meta``."""
        return self.passes[-1].graph.graph

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that a rank runs, as a module."""
        return self.passes[-1].graph


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledStep:
    """A step bound to the state that it updates.

    Attributes:
        prepared: the step before the backend.
        backend: name of the backend that compiled the last graph.
        executor: runs the compiled graph.
        stores: the state of each bucket of ``prepared.context.buckets``, by bucket name.
        numbers: the optimizer group, and the path in it, of each hyperparameter that is an input; by input name.
        outputs: SBP and global shape of each output tensor.
        lookups: return the tensors that are in no store; called at each run.
        dims: the dynamic dimensions by name, with the largest sizes for which the step keeps its memory budget.
        fitting_calls: sizes of calls that exceed one of these, and for which it keeps the budget nevertheless.
    """

    prepared: PreparedStep
    backend: str
    executor: Executor
    stores: Mapping[str, Store]
    numbers: Mapping[str, tuple[Mapping[str, Any], Path]]
    outputs: tuple[tuple[NdSbp, tuple[int, ...]], ...]
    lookups: Mapping[Role, Lookup]
    dims: dict[str, Dim] = field(default_factory=dict)
    fitting_calls: set[tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=set)

    @property
    def captured(self) -> Captured:
        """The graph that ``build()`` was traced to."""
        return self.prepared.captured

    @property
    def context(self) -> Context:
        """The input of the passes besides the graph."""
        return self.prepared.context

    @functools.cached_property
    def flags(self) -> tuple[str, ...]:
        """Names of the 0-d tensors that the graph returns after the user's outputs."""
        roles: list[Role] = meta(self.executor.graph.graph.output_node())["roles"]
        return tuple(role.name for role in roles if role.kind not in ("output", "accumulated"))

    @functools.cached_property
    def summed(self) -> tuple[tuple[Store, bool], ...]:
        """The stores to whose gradients the graph's last outputs are added, and whether these are unreduced."""
        output = self.executor.graph.graph.output_node().meta
        pairs = zip(output["roles"], output["needs"], strict=True)
        summed = [(role.bucket, partial_sum in sbp) for role, sbp in pairs if role.kind == "accumulated"]
        return tuple((self.stores[bucket], is_unreduced) for bucket, is_unreduced in summed)

    @functools.cached_property
    def gradient_places(self) -> tuple[int, ...]:
        """Places of the outputs whose gradients the graph gets at its pause."""
        pause = pause_of(self.prepared.emitted)
        assert pause is not None
        places: Any = pause.args[2]
        return tuple(places)

    @functools.cached_property
    def differentiated(self) -> tuple[nn.Parameter, ...]:
        """The parameters to whose gradients the graph adds."""
        names = set(self.captured.gradients)
        # A store keeps the names that parameters had when it was created.
        buckets = ((bucket.slots, self.stores[bucket.name].parameters) for bucket in self.context.buckets)
        return tuple(one for slots, own in buckets for slot, one in zip(slots, own, strict=True) if slot.name in names)

    def returned(self, batch: Batch) -> Sequence[Any]:
        """Return the constants that ``build()`` returned, sizes as those of the batch; ``Tensor`` for a tensor."""
        leaves = self.captured.returned
        if self.captured.sizes is None:
            return leaves
        totals = {name: sum(rows) for name, rows in batch.sizes.items()}
        return [_torch.evaluate_number(leaf, totals) if isinstance(leaf, _NUMBERS) else leaf for leaf in leaves]

    def number_values(self) -> dict[str, float]:
        """Return the present value of each hyperparameter that is an input, by input name."""
        return {name: hyperparameters.read(group, path) for name, (group, path) in self.numbers.items()}

    def size_values(self, batch: Batch) -> dict[SizeInput, int]:
        """Return the value of each symbolic size that the graph reads, for a batch."""
        mesh = self.context.mesh
        return {feed: feed.value(batch.sizes.get(feed.dim, ()), mesh.shape, mesh.position) for feed in self._sizes_read}

    @functools.cached_property
    def _sizes_read(self) -> tuple[SizeInput, ...]:
        return tuple(feed for feed in self.executor.feeds if isinstance(feed, SizeInput))

    def metric(self, values: Sequence[Tensor]) -> float:
        """Return the value of the first 0-d tensor that ``build()`` returns; the mean if it is packed.

        Args:
            values: the step's outputs.
        """
        traced = output_nodes(self.captured.graph.graph)
        value = next(value for value, node in zip(values, traced, strict=False) if node.meta["val"].dim() == 0)
        return float(value.item() if value.dim() == 0 else value.double().mean().item())

    def check_files(self) -> None:
        """Check that the files that the step reads are as its last run left them.

        Raises:
            OffloadError: a file has changed; names it.
        """
        stored = (extent for store in self.stores.values() for extent in extents(store).values())
        check(dict.fromkeys(extent.file for extent in stored))


@collection_paused()
def bind_step(
    job: Job,
    members: Members,
    prepared: PreparedStep,
    backend: str,
    function: backends.Compiled,
    stores: Mapping[str, Store],
    config: Config,
) -> CompiledStep:
    """Return the step with its state and its other tensors bound to the compiled function."""
    graph = prepared.graph
    lookups = _lookups(members, prepared)
    written = {meta(target)["role"] for _, target, _ in writes(prepared.captured.graph.graph)}
    updates = prepared.context.gradients in ("update", "accumulated") and any(one.updates for one in prepared.layout)
    changed = tuple(stores.values()) if updates or any(role.kind != "buffer" for role in written) else ()
    executor = bind(job, graph, function, stores, lookups, written=written, updates=changed)
    if backend in backends.BACKENDS:
        executor = with_low_overhead(executor, stores)
    if config.memory.keep_freed_memory and all(
        value.device.type == "cpu"
        for node in placeholders(graph.graph)
        if isinstance(value := node.meta["val"], Tensor)
    ):
        keep_freed()
    numbers = {
        name: place(update.optimizer, update.group, update.program.numbers[short])
        for planned in prepared.layout
        for update in planned.updates
        for short, name in update.numbers().items()
    }
    output = graph.graph.output_node().meta
    returned = zip(output["needs"], output_nodes(graph.graph), output["roles"], strict=True)
    outputs = tuple((sbp, meta(node)["global"]) for sbp, node, role in returned if role.kind == "output")
    return CompiledStep(
        prepared=prepared,
        backend=backend,
        executor=executor,
        stores=stores,
        numbers=numbers,
        outputs=outputs,
        lookups=lookups,
        dims=dict(prepared.captured.sizes.dims) if prepared.captured.sizes else {},
    )


def _lookups(members: Members, prepared: PreparedStep) -> dict[Role, Lookup]:
    """Return functions that return the tensors that are in no store: parameters, buffers, and those of the scaler."""
    lookups = {Role("parameter", name): _attribute(members.root, name) for name in members.parameters}
    lookups |= {Role("buffer", name): _attribute(members.root, name) for name in members.buffers}
    if (scaler := prepared.context.numerics.scaler) is not None:
        for node in placeholders(prepared.graph.graph, "scaler"):
            role, device = meta(node)["role"], node.meta["val"].device
            lookups[role] = functools.partial(_scaler_tensor, scaler, role.name, device)
    return lookups


def _scaler_tensor(scaler: GradScaler, name: str, device: torch.device) -> Tensor:
    return scaler.tensors(device)[name]


def _attribute(root: nn.Module, name: str) -> Lookup:
    """Return a function that reads a tensor of ``root``. The user may replace the tensor between steps."""
    path, _, attribute = name.rpartition(".")
    return functools.partial(getattr, root.get_submodule(path), attribute)


def fingerprint(layout: Sequence[PlannedBucket], graph: fx.GraphModule) -> list[str]:
    """Return the buckets and the emitted graph as lines of text, equal on all ranks that run the same step."""
    lines = [
        f"{planned.layout.name}: {', '.join(slot.name for slot in planned.layout.slots)}; optimizer state "
        f"{'none yet' if planned.fresh else ', '.join(planned.specs)}"
        f"{f'; owned by ranks {planned.layout.owners}' if planned.layout.has_owners else ''}"
        for planned in layout
    ]
    return [*lines, *graph_lines(graph.graph)]


def graph_lines(graph: fx.Graph) -> list[str]:
    """Return a graph as lines of text, equal on all ranks."""
    lines = []
    for node in graph.nodes:
        args = node.args
        for position in meta(node).get("rank_arguments", ()):
            args = (*args[:position], "this rank's own", *args[position + 1 :])
        # The name of a collective's process group differs between ranks too.
        if (boxing := boxing_of(node)) is not None and isinstance(node.args[-1], str):
            args = (*args[:-1], f"along mesh dimension {boxing.dim}")
        value = node.meta.get("val")
        shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
        # The text of a Python function has its address.
        target = node.target.__qualname__ if isinstance(node.target, FunctionType) else node.target
        lines.append(f"{node.name} = {target} {args} {node.kwargs} {shown}".rstrip())
        if (loop := loop_of(node)) is not None:
            lines += [f"in {node.name}, {loop.micro_batches} times: {line}" for line in graph_lines(loop.body.graph)]
    return lines


def numbered(lines: Sequence[str]) -> dict[str, str]:
    """Return the lines by their names in messages."""
    return {f"the emitted graph: line {number}": line for number, line in enumerate(lines)}
