"""The passes in their order, and what is kept of each."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from zerograph import _torch
from zerograph.loop import loops
from zerograph.passes.ahead import ahead
from zerograph.passes.box import box
from zerograph.passes.carry import carry
from zerograph.passes.coalesce import coalesce
from zerograph.passes.context import Context
from zerograph.passes.exchange import exchange
from zerograph.passes.fill_rooms import fill_rooms
from zerograph.passes.fit import fit
from zerograph.passes.flatten import flatten
from zerograph.passes.fuse import fuse
from zerograph.passes.guard import guard
from zerograph.passes.localize import localize
from zerograph.passes.lookup import lookup
from zerograph.passes.loop import loop
from zerograph.passes.offload import offload
from zerograph.passes.offsets import offsets
from zerograph.passes.overwrite import overwrite
from zerograph.passes.place import place
from zerograph.passes.recompute import recompute
from zerograph.passes.regather import regather
from zerograph.passes.reinplace import reinplace
from zerograph.passes.release import release
from zerograph.passes.remake import remake
from zerograph.passes.reorder import reorder
from zerograph.passes.schedule import schedule
from zerograph.passes.simplify import simplify
from zerograph.passes.spill import spill
from zerograph.passes.take_turns import take_turns
from zerograph.passes.unfuse import unfuse
from zerograph.passes.verify import Seen, verify
from zerograph.progress import tell

Pass = Callable[[fx.GraphModule, Context], fx.GraphModule]

PIPELINE: tuple[Pass, ...] = (
    simplify,  # no operator hides what a simpler one says
    offsets,  # a rank's offsets of bags count within the whole batch
    unfuse,  # where products may be summed over ranks, no bias is in them
    reorder,  # no view flattens the batch behind another dimension
    flatten,  # parameters of one group lie end to end in buckets, each updated in one go
    guard,  # a step that overflowed changes nothing but the loss scale
    take_turns,  # micro-batches are a mesh dimension in time, and the batch is cut along it
    place,  # every tensor has an SBP, every operator a signature
    lookup,  # a table of which a batch reads little stays where its rows rest
    box,  # where two SBPs meet stands one boxing node
    ahead,  # no micro-batch waits for what only all of them yield
    remake,  # what one pass over memory makes again is not kept for backward
    recompute,  # what the configuration says is made again in backward, not kept for it
    regather,  # stage 3: no gathered bucket lives from forward into backward
    localize,  # every shape is this rank's, every boxing node a collective
    loop,  # all micro-batches are one node, whose body is the graph of one
    coalesce,  # small sums that only the step's end needs travel together
    fuse,  # fused optimizers update a bucket by their own operators
    release,  # weights are freed before their gradients take memory
    schedule,  # gathers start early, waits come late, gradients in few buckets
    exchange,  # ranks exchange pieces where that is faster than a collective
    spill,  # activations wait for backward in the CPU's memory, where their way there is hidden
    reinplace,  # gradients and updates are written where they belong
    overwrite,  # temporaries are written over by their only reader, where nodes run one by one
    carry,  # shards go up ahead of their gather, gradients down as they are reduced
    offload,  # what rests in files is fetched before it is read, and put back behind what changed it
    fill_rooms,  # what lives throughout the step is gathered where its shard rests
    fit,  # a memory budget is kept, and used to spare and hide collectives
)

# As progress counts them: capture is the first.
PASSES = len(PIPELINE) + 1


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
    names = [rewrite.__name__ for rewrite in PIPELINE]
    seen: Seen = {}
    for at, rewrite in enumerate(PIPELINE):
        began = time.perf_counter()
        tell("passes", at + 1, PASSES, names[at])
        module = _apply(rewrite, module, context)
        for graph in _graphs(module):
            verify(graph, names[at], seen, placed=at >= names.index("place"), boxed=at >= names.index("box"))
        seconds = time.perf_counter() - began
        summary = (rewrite.__doc__ or "").strip().splitlines()[0]
        again = functools.partial(_rewritten, captured, context, at + 1)
        nodes = sum(len(graph.graph.nodes) for graph in _graphs(module))
        records.append(PassRecord(names[at], summary, nodes, seconds, again))
    tell("passes", PASSES, PASSES)
    for graph in _graphs(module):
        graph.graph.lint()
    records[-1] = replace(records[-1], _make=lambda: _finished(module))
    return tuple(records)


def _apply(rewrite: Pass, module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """What the pass makes of the graph and, behind ``loop``, of every body in it: to a pass a body is a graph."""
    if rewrite in _IN_TIME:
        return rewrite(module, context.in_time())
    if rewrite not in (fill_rooms, fit):
        for inner in loops(module.graph):
            inner.body = rewrite(inner.body, context)
    return rewrite(module, context)


# Up to the cut, time is a mesh dimension.
_IN_TIME = PIPELINE[: PIPELINE.index(loop) + 1]


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph, and the bodies of its loops."""
    return [module, *(inner.body for inner in loops(module.graph))]


def _finished(module: fx.GraphModule) -> fx.GraphModule:
    for inner in loops(module.graph):
        inner.body = fx.GraphModule(inner.body, inner.body.graph)
    return fx.GraphModule(module, module.graph)


def stages(captured: fx.GraphModule, context: Context) -> Iterator[tuple[str, fx.GraphModule]]:
    """Each pass's name and the graph behind it, ``"capture"`` first, all made again in one walk.

    What was yielded is rewritten as soon as the next is asked for: read it, or copy it, before.
    """
    module = _torch.graph_module(captured, copy_graph(captured.graph))
    yield "capture", module
    for at, rewrite in enumerate(PIPELINE):
        tell("passes again", at + 1, PASSES, rewrite.__name__)
        module = _apply(rewrite, module, context)
        yield rewrite.__name__, module
    tell("passes again", PASSES, PASSES)


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
