"""The passes in their order, and what is kept of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from zerograph import _torch
from zerograph.base.progress import tell
from zerograph.errors import ConfigError, VerificationError
from zerograph.ir.loop import loops
from zerograph.ir.pass_edits import PassEdit, Rewrite
from zerograph.passes.accumulation.hoist_batch_statistics import hoist_batch_statistics
from zerograph.passes.accumulation.loop import loop
from zerograph.passes.accumulation.split_micro_batches import split_micro_batches
from zerograph.passes.buckets.flatten import flatten
from zerograph.passes.buckets.fuse import fuse
from zerograph.passes.buckets.skip_overflowed_update import skip_overflowed_update
from zerograph.passes.communication.coalesce import coalesce
from zerograph.passes.communication.release import release
from zerograph.passes.communication.schedule import schedule
from zerograph.passes.context import Context
from zerograph.passes.lower.localize import localize
from zerograph.passes.lower.lower_to_p2p import lower_to_p2p
from zerograph.passes.memory.fit_memory_budget import fit_memory_budget
from zerograph.passes.memory.gather_in_place import gather_in_place
from zerograph.passes.memory.offload import offload
from zerograph.passes.memory.offload_activations import offload_activations
from zerograph.passes.memory.prefetch_offloaded import prefetch_offloaded
from zerograph.passes.memory.reinplace import reinplace
from zerograph.passes.memory.reuse_temporaries import reuse_temporaries
from zerograph.passes.normalize.batch_first import batch_first
from zerograph.passes.normalize.offsets import offsets
from zerograph.passes.normalize.simplify import simplify
from zerograph.passes.normalize.unfuse import unfuse
from zerograph.passes.placement.box import box
from zerograph.passes.placement.place import place
from zerograph.passes.placement.shard_embeddings import shard_embeddings
from zerograph.passes.recompute.recompute import recompute
from zerograph.passes.recompute.recompute_cheap import recompute_cheap
from zerograph.passes.recompute.reshard_after_forward import reshard_after_forward
from zerograph.passes.verify import Seen, verify

Scope = Literal["global", "placed", "local"]


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline.

    Attributes:
        run: rewrites the graph.
        scope: the graph that it works on: of ``"global"`` tensors, up to ``place``; of ``"placed"`` global tensors, up
            to ``localize``; or of ``"local"`` tensors and collectives.
        time: time is a mesh dimension for it if there are micro-batches; so up to ``loop``, which cuts there.
        bodies: after ``loop`` it also rewrites the body of each loop, as a graph of its own.
        essential: without it a graph does not run, or computes something else; it cannot be disabled.
        requires: passes that must run before it.
    """

    run: Rewrite
    scope: Scope
    time: bool = True
    bodies: bool = True
    essential: bool = False
    requires: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.run.__name__

    @property
    def summary(self) -> str:
        """First line of the function's docstring: what is true after it."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


PIPELINE: tuple[Pass, ...] = (
    # no operator hides what a simpler one says
    Pass(simplify, "global"),
    # a rank's offsets of bags count within the whole batch
    Pass(offsets, "global", essential=True),
    # where products may be summed over ranks, no bias is in them
    Pass(unfuse, "global"),
    # no view merges the batch dimension into an earlier one
    Pass(batch_first, "global"),
    # parameters of one group lie end to end in buckets, each updated in one go
    Pass(flatten, "global", essential=True),
    # a step that overflowed changes nothing but the loss scale
    Pass(skip_overflowed_update, "global", essential=True, requires=("flatten",)),
    # micro-batches are a mesh dimension in time, and the batch is cut along it
    Pass(split_micro_batches, "global", essential=True),
    # every tensor has an SBP, every operator a signature
    Pass(place, "global", essential=True, requires=("flatten", "split_micro_batches")),
    # a table of which a batch reads little stays where its rows rest
    Pass(shard_embeddings, "placed"),
    # where two SBPs meet stands one boxing node
    Pass(box, "placed", essential=True, requires=("place",)),
    # no micro-batch waits for what only all of them yield
    Pass(hoist_batch_statistics, "placed", essential=True, requires=("box",)),
    # backward recomputes what costs one pass over memory
    Pass(recompute_cheap, "placed", requires=("box",)),
    # backward recomputes what the configuration says
    Pass(recompute, "placed", requires=("box",)),
    # stage 3: no gathered bucket lives from forward into backward
    Pass(reshard_after_forward, "placed", requires=("box",)),
    # every shape is this rank's, every boxing node a collective
    Pass(localize, "placed", essential=True, requires=("box",)),
    # all micro-batches are one node, whose body is the graph of one
    Pass(loop, "local", essential=True, requires=("split_micro_batches", "localize")),
    # small sums that only the step's end needs travel together
    Pass(coalesce, "local", time=False),
    # fused optimizers update a bucket by their own operators
    Pass(fuse, "local", time=False, requires=("flatten", "skip_overflowed_update")),
    # weights are freed before their gradients take memory
    Pass(release, "local", time=False),
    # gathers start early, waits come late, gradients in few buckets
    Pass(schedule, "local", time=False),
    # ranks exchange pieces where that is faster than a collective
    Pass(lower_to_p2p, "local", time=False),
    # activations wait for backward in the CPU's memory, where their way there is hidden
    Pass(offload_activations, "local", time=False),
    # gradients and updates are written where they belong
    Pass(reinplace, "local", time=False),
    # temporaries are written over by their only reader, where nodes run one by one
    Pass(reuse_temporaries, "local", time=False),
    # shards go up ahead of their gather, gradients down as they are reduced
    Pass(prefetch_offloaded, "local", time=False),
    # tensors in files are fetched before they are read, and written back after they change
    Pass(offload, "local", time=False, essential=True),
    # what lives throughout the step is gathered where its shard rests
    Pass(gather_in_place, "local", time=False, bodies=False),
    # a memory budget is kept, and used to spare and hide collectives
    Pass(fit_memory_budget, "local", time=False, bodies=False, essential=True),
)


def edited(edits: tuple[PassEdit, ...]) -> tuple[Pass, ...]:
    """Return the pipeline with a user's edits, made in order.

    An inserted pass works on the graph as it is there: its scope and time are those of its place.

    Raises:
        ConfigError: an edit names a pass that does not exist, disables one that is essential or that another requires,
            or gives a second pass of one name.
    """
    passes = list(PIPELINE)
    for edit in edits:
        names = [one.name for one in passes]
        if edit.name not in names:
            raise ConfigError(f"config.passes: {edit}: there is no such pass\nThere are {', '.join(names)}.")
        at = names.index(edit.name)
        there = passes[at]
        if edit.run is None:
            if there.essential:
                raise ConfigError(f"config.passes: {edit}: a step does not run without it\nReplace it instead.")
            passes[at : at + 1] = []
            continue
        if edit.run.__name__ in names and (edit.action != "replace" or edit.run.__name__ != edit.name):
            raise ConfigError(f"config.passes: {edit}: there is a pass of that name already\nGive it another one.")
        if edit.action == "replace":
            passes[at] = dataclasses.replace(there, run=edit.run)
            continue
        if edit.action == "after":
            at += 1
        passes.insert(at, _in_place_of(edit.run, passes[at - 1 : at], passes[at : at + 1]))
    _check_requirements(passes)
    return tuple(passes)


def _in_place_of(run: Rewrite, before: list[Pass], after: list[Pass]) -> Pass:
    """An inserted pass works on what the next one works on; at the end, on what the last one does."""
    (there,) = after or before
    return Pass(run, there.scope, there.time, bodies=not there.time)


def _check_requirements(passes: list[Pass]) -> None:
    done: set[str] = set()
    for one in passes:
        missing = [name for name in one.requires if name not in done]
        if missing:
            raise ConfigError(f"config.passes: the pass {one.name} requires {', '.join(missing)} before it")
        done.add(one.name)


@dataclass(frozen=True, eq=False)
class PassRecord:
    """What a pass left: what is then true, how many nodes there are, the seconds it took, and the graph itself.

    Nodes of a loop's body count once.
    """

    name: str
    summary: str
    nodes: int
    seconds: float
    _make: Callable[[], fx.GraphModule]

    @functools.cached_property
    def graph(self) -> fx.GraphModule:
        """The graph after the pass. Passes are functions: for those who ask it is made again, not kept for all."""
        return self._make()


def run_pipeline(captured: fx.GraphModule, context: Context, capture_seconds: float) -> tuple[PassRecord, ...]:
    """Run every pass over a copy of the captured graph, verifying after each.

    Raises:
        VerificationError: a pass broke an invariant.
    """
    summary = "The whole of build() and its backward() is one functional graph of operators on global tensors."
    nodes = len(captured.graph.nodes)
    records = [PassRecord("capture", summary, nodes, capture_seconds, lambda: fx.GraphModule(captured, captured.graph))]
    module = _torch.graph_module(captured, copy_graph(captured.graph))
    passes = edited(context.pass_edits)
    total = len(passes) + 1
    seen: Seen = {}
    done: set[str] = set()
    for at, one in enumerate(passes):
        began = time.perf_counter()
        tell("passes", at + 1, total, one.name)
        module = _apply(one, module, context)
        done.add(one.name)
        for graph in _graphs(module):
            verify(graph, one.name, seen, placed="place" in done, boxed="box" in done)
        seconds = time.perf_counter() - began
        again = functools.partial(_rewritten, captured, context, at + 1)
        nodes = sum(len(graph.graph.nodes) for graph in _graphs(module))
        records.append(PassRecord(one.name, one.summary, nodes, seconds, again))
    tell("passes", total, total)
    for graph in _graphs(module):
        graph.graph.lint()
    records[-1] = replace(records[-1], _make=lambda: _finished(module))
    return tuple(records)


def _apply(one: Pass, module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Run a pass over the graph and, after ``loop``, over the body of each loop in it."""
    if one.time:
        return _returned(one, one.run(module, context.in_time()))
    if one.bodies:
        for inner in loops(module.graph):
            inner.body = _returned(one, one.run(inner.body, context))
    return _returned(one, one.run(module, context))


def _returned(one: Pass, module: Any) -> fx.GraphModule:
    if not isinstance(module, fx.GraphModule):
        kind = type(module).__name__
        raise VerificationError(f"the pass {one.name} returned {kind}: a pass returns the graph module")
    return module


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph, and the bodies of its loops."""
    return [module, *(inner.body for inner in loops(module.graph))]


def _finished(module: fx.GraphModule) -> fx.GraphModule:
    for inner in loops(module.graph):
        inner.body = fx.GraphModule(inner.body, inner.body.graph)
    return fx.GraphModule(module, module.graph)


def stages(captured: fx.GraphModule, context: Context) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield each pass's name and the graph after it, ``"capture"`` first; the passes run again for it.

    A graph that was yielded is rewritten as soon as the next one is asked for: read it, or copy it, before.
    """
    module = _torch.graph_module(captured, copy_graph(captured.graph))
    yield "capture", module
    passes = edited(context.pass_edits)
    for at, one in enumerate(passes):
        tell("passes again", at + 1, len(passes) + 1, one.name)
        module = _apply(one, module, context)
        yield one.name, module
    tell("passes again", len(passes) + 1, len(passes) + 1)


def _rewritten(captured: fx.GraphModule, context: Context, passes: int) -> fx.GraphModule:
    for _, module in itertools.islice(stages(captured, context), passes + 1):  # noqa: B007 (the last one is returned)
        pass
    return _finished(module)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same graph in nodes of its own; values and metadata are shared."""
    copy = fx.Graph()
    returned = copy.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(returned, tuple)
    copy.output(returned[0])
    copy.output_node().meta.update(graph.output_node().meta)
    return copy
