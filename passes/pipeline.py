"""The passes in their order, and what is kept of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from zerograph.passes.box import box
from zerograph.passes.context import Context
from zerograph.passes.flatten import flatten
from zerograph.passes.localize import localize
from zerograph.passes.place import place
from zerograph.passes.regather import regather
from zerograph.passes.reinplace import reinplace
from zerograph.passes.schedule import schedule
from zerograph.passes.verify import verify

Pass = Callable[[fx.GraphModule, Context], fx.GraphModule]

PIPELINE: tuple[Pass, ...] = (
    flatten,  # parameters of one group lie end to end in buckets, each updated in one go
    place,  # every tensor has an SBP, every operator a signature
    box,  # where two SBPs meet stands one boxing node
    regather,  # stage 3: no gathered bucket lives from forward into backward
    localize,  # every shape is this rank's, every boxing node a collective
    schedule,  # gathers start early, waits come late, gradients in few buckets
    reinplace,  # gradients and updates are written where they belong
)


@dataclass(frozen=True)
class PassRecord:
    """What a pass left: the graph after it, what is then true, its number of nodes, and the seconds it took."""

    name: str
    summary: str
    graph: fx.GraphModule
    nodes: int
    seconds: float


def run_pipeline(captured: fx.GraphModule, context: Context, capture_seconds: float) -> tuple[PassRecord, ...]:
    """Run every pass over a copy of the captured graph, verifying after each.

    Raises:
        VerificationError: a pass broke an invariant.
    """
    summary = "The whole of build() and its backward() is one functional graph of operators on global tensors."
    records = [PassRecord("capture", summary, captured, len(captured.graph.nodes), capture_seconds)]
    module = copy_graph(captured)
    names = [rewrite.__name__ for rewrite in PIPELINE]
    for rewrite in PIPELINE:
        began = time.perf_counter()
        module = rewrite(module, context)
        name = rewrite.__name__
        at = names.index(name)
        verify(module, name, placed=at >= names.index("place"), boxed=at >= names.index("box"))
        seconds = time.perf_counter() - began
        kept = module if rewrite is PIPELINE[-1] else copy_graph(module)
        summary = (rewrite.__doc__ or "").strip().splitlines()[0]
        records.append(PassRecord(name, summary, kept, len(module.graph.nodes), seconds))
    return tuple(records)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own; values and metadata are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(module.graph, copies, return_output_node=True)
    assert isinstance(returned, tuple)
    graph.output(returned[0])
    graph.output_node().meta.update(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)
