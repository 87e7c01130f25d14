"""The pipeline: the passes in order, how they run, and a record of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from zerograph import _torch
from zerograph.base.progress import tell
from zerograph.errors import ConfigError, VerificationError, ZeroGraphError
from zerograph.ir.loop import loops
from zerograph.ir.pass_edits import PassEdit, Rewrite
from zerograph.passes.accumulation.hoist_batch_statistics import hoist_batch_statistics
from zerograph.passes.accumulation.loop import loop
from zerograph.passes.accumulation.split_micro_batches import split_micro_batches
from zerograph.passes.buckets.flatten import flatten
from zerograph.passes.buckets.fuse import fuse
from zerograph.passes.buckets.merge_updates import merge_updates
from zerograph.passes.buckets.skip_overflowed_update import skip_overflowed_update
from zerograph.passes.communication.assign_wire_formats import assign_wire_formats
from zerograph.passes.communication.coalesce import coalesce
from zerograph.passes.communication.error_feedback import fuse_feedback
from zerograph.passes.communication.merge_exchanges import merge_exchanges
from zerograph.passes.communication.pause_before_backward import pause_before_backward
from zerograph.passes.communication.release import release
from zerograph.passes.communication.schedule import schedule
from zerograph.passes.context import Context
from zerograph.passes.lower.add_in_tree import add_in_tree
from zerograph.passes.lower.bind_sizes import bind_sizes
from zerograph.passes.lower.localize import localize
from zerograph.passes.lower.lower_to_p2p import lower_to_p2p
from zerograph.passes.memory.fit_memory_budget import fit_memory_budget
from zerograph.passes.memory.gather_in_place import gather_in_place
from zerograph.passes.memory.mark_fused import mark_fused
from zerograph.passes.memory.offload import offload
from zerograph.passes.memory.offload_activations import offload_activations
from zerograph.passes.memory.pack_scalars import pack_scalars
from zerograph.passes.memory.prefetch_offloaded import prefetch_offloaded
from zerograph.passes.memory.reinplace import reinplace
from zerograph.passes.memory.reuse_temporaries import reuse_temporaries
from zerograph.passes.normalize.batch_first import batch_first
from zerograph.passes.normalize.offsets import offsets
from zerograph.passes.normalize.repeat_key_heads import repeat_key_heads
from zerograph.passes.normalize.simplify import simplify
from zerograph.passes.normalize.unfuse import unfuse
from zerograph.passes.placement.box import box
from zerograph.passes.placement.place import place
from zerograph.passes.placement.shard_embeddings import shard_embeddings
from zerograph.passes.recompute.gather_keys_again import gather_keys_again
from zerograph.passes.recompute.recompute import recompute
from zerograph.passes.recompute.recompute_cheap import recompute_cheap
from zerograph.passes.recompute.reshard_after_forward import reshard_after_forward
from zerograph.passes.verify import verify

Scope = Literal["global", "placed", "local"]


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline.

    Attributes:
        run: rewrites the graph.
        scope: the graph that the pass works on: ``"global"`` tensors, up to ``place``; ``"placed"`` global tensors, up
            to ``localize``; ``"local"`` tensors and collectives.
        time: time is a mesh dimension for the pass if there are micro-batches. This holds up to ``loop``.
        bodies: after ``loop`` the pass also rewrites the body of each loop, as a graph of its own.
        essential: without the pass a graph does not run, or computes something else; it cannot be disabled.
        requires: passes that must run before this one.
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
        """First line of the function's docstring: what the pass does."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


PIPELINE: tuple[Pass, ...] = (
    # remove identities and merge what is equal
    Pass(simplify, "global"),
    # make a rank's offsets of embedding bags count within the whole batch
    Pass(offsets, "global", essential=True),
    # split biases off products that may be summed over ranks
    Pass(unfuse, "global"),
    # repeat heads of keys that the ranks do not divide
    Pass(repeat_key_heads, "global"),
    # keep the batch dimension first in views
    Pass(batch_first, "global"),
    # concatenate parameters and gradients into buckets, each updated by one call
    Pass(flatten, "global", essential=True),
    # let a step that overflowed change the loss scale only
    Pass(skip_overflowed_update, "global", essential=True, requires=("flatten",)),
    # make micro-batches a mesh dimension in time, and split the batch along it
    Pass(split_micro_batches, "global", essential=True),
    # give every tensor an SBP, every operator a signature
    Pass(place, "global", essential=True, requires=("flatten", "split_micro_batches")),
    # keep large embedding tables split; move indices and rows instead
    Pass(shard_embeddings, "placed"),
    # insert boxing nodes where a reader needs another SBP
    Pass(box, "placed", essential=True, requires=("place",)),
    # compute batch statistics before the first micro-batch
    Pass(hoist_batch_statistics, "placed", essential=True, requires=("box",)),
    # free gathered keys and values after forward, gather them again in backward
    Pass(gather_keys_again, "placed", requires=("box",)),
    # recompute in backward what costs one pass over memory
    Pass(recompute_cheap, "placed", requires=("box",)),
    # recompute in backward what the configuration says
    Pass(recompute, "placed", requires=("box",)),
    # stage 3: free gathered buckets after forward, gather them again in backward
    Pass(reshard_after_forward, "placed", requires=("box",)),
    # code what the boxings of parameters and gradients send
    Pass(assign_wire_formats, "placed", essential=True, requires=("box",)),
    # give every tensor this rank's shape, replace boxing nodes by collectives
    Pass(localize, "placed", essential=True, requires=("box",)),
    # replace all micro-batches by one node, whose body is the graph of one
    Pass(loop, "local", essential=True, requires=("split_micro_batches", "localize")),
    # pause where a loop reads values before backward
    Pass(pause_before_backward, "local", time=False, bodies=False, essential=True),
    # merge small all-reduces that only the step's end needs
    Pass(coalesce, "local", time=False),
    # add, code, and compute what the code lacks, in one operator
    Pass(fuse_feedback, "local", time=False),
    # send queries, keys and values of attention in one all-to-all
    Pass(merge_exchanges, "local", time=False),
    # let fused optimizers update a bucket by their own operators
    Pass(fuse, "local", time=False, requires=("flatten", "skip_overflowed_update")),
    # free weights before their gradients take memory
    Pass(release, "local", time=False),
    # start gathers early, wait late, reduce gradients in few buckets
    Pass(schedule, "local", time=False),
    # update buckets with equal hyperparameters by one call
    Pass(merge_updates, "local", time=False, requires=("fuse",)),
    # copy step counts and rates to the accelerator in one transfer
    Pass(pack_scalars, "local", time=False),
    # exchange pieces of partial sums, and add them in the tree of config.virtual_ranks
    Pass(add_in_tree, "local", time=False, essential=True),
    # exchange pieces between ranks in place of a collective where the transport has such an exchange
    Pass(lower_to_p2p, "local", time=False),
    # offload activations to the CPU between forward and backward where the copies overlap
    Pass(offload_activations, "local", time=False),
    # write gradients and updates directly into their buffers
    Pass(reinplace, "local", time=False),
    # overwrite temporaries by their only reader, where nodes run one by one
    Pass(reuse_temporaries, "local", time=False),
    # mark what a compiler never stores
    Pass(mark_fused, "local", time=False),
    # copy offloaded shards before their gather, gradients when they are reduced
    Pass(prefetch_offloaded, "local", time=False),
    # read tensors from files before they are used, write them back after they change
    Pass(offload, "local", time=False, essential=True),
    # gather buckets that live throughout the step into gather buffers
    Pass(gather_in_place, "local", time=False, bodies=False),
    # keep a memory budget, and use it to avoid and hide collectives
    Pass(fit_memory_budget, "local", time=False, bodies=False, essential=True),
    # sizes that differ between calls are inputs
    Pass(bind_sizes, "local", time=False, bodies=False, essential=True),
)


def edited(edits: tuple[PassEdit, ...]) -> tuple[Pass, ...]:
    """Return the pipeline with a user's edits, applied in order.

    An inserted pass has the scope and the time dimension of the pass after it.

    Raises:
        ConfigError: an edit names a pass that does not exist, disables a pass that is essential or that another
            requires, or adds a second pass of the same name.
    """
    passes = list(PIPELINE)
    for edit in edits:
        names = [entry.name for entry in passes]
        if edit.name not in names:
            raise ConfigError(f"config.passes: {edit}: there is no such pass\nThere are {', '.join(names)}.")
        index = names.index(edit.name)
        target = passes[index]
        if edit.run is None:
            if target.essential:
                raise ConfigError(f"config.passes: {edit}: a step does not run without it\nReplace it instead.")
            passes[index : index + 1] = []
            continue
        if edit.run.__name__ in names and (edit.action != "replace" or edit.run.__name__ != edit.name):
            raise ConfigError(f"config.passes: {edit}: there is a pass of that name already\nGive it another one.")
        if edit.action == "replace":
            passes[index] = dataclasses.replace(target, run=edit.run)
            continue
        if edit.action == "after":
            index += 1
        neighbour = passes[min(index, len(passes) - 1)]
        passes.insert(index, Pass(edit.run, neighbour.scope, neighbour.time, bodies=not neighbour.time))
    _check_requirements(passes)
    return tuple(passes)


def _check_requirements(passes: list[Pass]) -> None:
    done: set[str] = set()
    for entry in passes:
        missing = [name for name in entry.requires if name not in done]
        if missing:
            raise ConfigError(f"config.passes: the pass {entry.name} requires {', '.join(missing)} before it")
        done.add(entry.name)


@dataclass(frozen=True, eq=False)
class PassRecord:
    """The result of one pass.

    Attributes:
        name, summary: see :class:`Pass`.
        nodes: number of nodes after the pass; nodes of a loop's body count once.
        seconds: how long it took.
        rebuild: returns the graph after the pass; before the last one a new one: the passes up to this one run again.
    """

    name: str
    summary: str
    nodes: int
    seconds: float
    rebuild: Callable[[], fx.GraphModule]

    @functools.cached_property
    def graph(self) -> fx.GraphModule:
        """The graph after the pass, made when it is first read."""
        return self.rebuild()


def run_pipeline(captured: fx.GraphModule, context: Context, capture_seconds: float) -> tuple[PassRecord, ...]:
    """Run every pass over a copy of the captured graph; verify the graph where the scope changes and at the end.

    If it is broken, or a pass fails, the passes run again, verified one by one.

    Raises:
        VerificationError: a pass broke an invariant; the message names the first that did.
    """
    try:
        return _run_passes(captured, context, capture_seconds)
    except Exception as error:
        if isinstance(error, ZeroGraphError) and not isinstance(error, VerificationError):
            raise
        if (broken := _find_broken(captured, context)) is not None:
            raise broken from error
        raise


def _find_broken(captured: fx.GraphModule, context: Context) -> VerificationError | None:
    """Return the error of the first pass that breaks an invariant; None if there is none before a pass fails."""
    done: set[str] = set()
    try:
        for name, module in stages(captured, context):
            _verify(module, name, done)
    except Exception as error:
        # Others are as they were before.
        return error if isinstance(error, VerificationError) else None
    return None


def _run_passes(captured: fx.GraphModule, context: Context, capture_seconds: float) -> tuple[PassRecord, ...]:
    summary = "Trace build() and its backward() into one functional graph of operators on global tensors."
    nodes = len(captured.graph.nodes)
    records = [PassRecord("capture", summary, nodes, capture_seconds, lambda: fx.GraphModule(captured, captured.graph))]
    module = _torch.graph_module(captured, copy_graph(captured.graph))
    passes = edited(context.pass_edits)
    total = len(passes) + 1
    done: set[str] = set()
    for index, (entry, following) in enumerate(zip(passes, [*passes[1:], None], strict=True)):
        began = time.perf_counter()
        tell("passes", index + 1, total, entry.name)
        try:
            module = apply_pass(entry, module, context)
        except Exception as error:
            if any(edit.run is entry.run for edit in context.pass_edits):
                after, nodes = records[-1].name, len(module.graph.nodes)
                error.add_note(
                    f"config.passes: the pass {entry.name} failed, on the graph after {after} ({nodes} nodes)"
                )
            raise
        # What localize reads is broken before it, or no longer seen.
        if following is None or following.scope != entry.scope or following.name == "localize":
            _verify(module, entry.name, done)
        seconds = time.perf_counter() - began
        rebuild = functools.partial(_graph_after, captured, context, index + 1)
        nodes = sum(len(graph.graph.nodes) for graph in _graphs(module))
        records.append(PassRecord(entry.name, entry.summary, nodes, seconds, rebuild))
    tell("passes", total, total)
    for graph in _graphs(module):
        graph.graph.lint()
    records[-1] = replace(records[-1], rebuild=lambda: finalize(module))
    return tuple(records)


def restored(
    records: Sequence[tuple[str, str, int, float]], captured: fx.GraphModule, context: Context, emitted: fx.GraphModule
) -> tuple[PassRecord, ...]:
    """Return the records of passes that ran in another process.

    Args:
        records: name, summary, number of nodes and seconds of each pass, the capture first.
        captured: the captured graph.
        context: what the passes got besides it.
        emitted: the graph after the last pass.
    """
    module = finalize(emitted)
    rebuilds: list[Callable[[], fx.GraphModule]] = [
        functools.partial(_graph_after, captured, context, number) for number in range(len(records) - 1)
    ]
    return tuple(
        PassRecord(*record, rebuild) for record, rebuild in zip(records, [*rebuilds, lambda: module], strict=True)
    )


@_torch.raw_sizes()
def apply_pass(entry: Pass, module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Run a pass over the graph and, after ``loop``, over the body of each loop in it."""
    if entry.time:
        return _check_result(entry, entry.run(module, context.with_time_dim()))
    if entry.bodies:
        for inner in loops(module.graph):
            inner.body = _check_result(entry, entry.run(inner.body, context))
    return _check_result(entry, entry.run(module, context))


def _verify(module: fx.GraphModule, name: str, done: set[str]) -> None:
    """Verify a graph and the bodies of its loops after a pass, which joins those that are done."""
    done.add(name)
    for graph in _graphs(module):
        verify(graph, name, placed="place" in done, boxed="box" in done)


def _check_result(entry: Pass, module: Any) -> fx.GraphModule:
    if not isinstance(module, fx.GraphModule):
        kind = type(module).__name__
        raise VerificationError(f"the pass {entry.name} returned {kind}: a pass returns the graph module")
    return module


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graph and the bodies of its loops."""
    return [module, *(inner.body for inner in loops(module.graph))]


@_torch.raw_sizes()
def finalize(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph, and the bodies of its loops, with the code that runs them."""
    for inner in loops(module.graph):
        inner.body = fx.GraphModule(inner.body, inner.body.graph)
    # Backends run code that is generated from the graph in another way.
    return _torch.graph_module(module, module.graph)


def stages(captured: fx.GraphModule, context: Context) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield each pass's name and the graph after it, ``"capture"`` first. The passes run again for this.

    The next pass rewrites the graph that was yielded: read or copy it before you ask for the next one.
    """
    module = _torch.graph_module(captured, copy_graph(captured.graph))
    yield "capture", module
    passes = edited(context.pass_edits)
    for index, entry in enumerate(passes):
        tell("passes again", index + 1, len(passes) + 1, entry.name)
        module = apply_pass(entry, module, context)
        yield entry.name, module
    tell("passes again", len(passes) + 1, len(passes) + 1)


def _graph_after(captured: fx.GraphModule, context: Context, passes: int) -> fx.GraphModule:
    for _, module in itertools.islice(stages(captured, context), passes + 1):  # noqa: B007 (the last one is returned)
        pass
    return finalize(module)


@_torch.raw_sizes()
def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph's nodes; values and metadata are shared."""
    copy = fx.Graph()
    returned = copy.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(returned, tuple)
    copy.output(returned[0])
    copy.output_node().meta.update(graph.output_node().meta)
    return copy
