"""coalesce: merge small all-reduces whose results are needed only at the end of the step.

A batch norm on each rank's own part adds two sums for its running statistics, a loss adds one for its mean. By
themselves each costs a message, and a synchronization of the ranks in the middle of forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import is_view
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, emit, replace_node
from zerograph.ir.sbp import Broadcast
from zerograph.ir.step_graph import nbytes, placeholders, writes
from zerograph.passes.context import Context
from zerograph.passes.edits import joined_boxing

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Metadata keys of gradients, which are reduced bucket by bucket, each as early as possible.
_GRADIENTS = {"gradient", "accumulated"}

# Maximum bytes of a sum that is merged with others.
_SMALL = 2**16


@dataclass(frozen=True, eq=False)
class _Sum:
    """An all-reduce.

    Attributes:
        start, wait: its nodes.
        followers: the nodes that follow from it, without ``wait`` and the writes and outputs at the end.
    """

    start: fx.Node
    wait: fx.Node
    followers: set[fx.Node]

    @property
    def source(self) -> fx.Node:
        """The tensor that is summed."""
        (source,) = self.start.all_input_nodes
        return source

    @property
    def kind(self) -> str:
        """The ranks, data type and device; all-reduces of one kind can be merged."""
        return f"{self.start.args[-1]} {self.start.meta['val'].dtype} {self.start.meta['val'].device}"


def coalesce(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Merge small all-reduces over the same ranks whose results only reach state writes and outputs."""
    graph = module.graph
    ends = {graph.output_node(), *(write for write, _, _ in writes(graph))}
    # The updates of owners change parameters in place.
    updates = (node for node in graph.find_nodes(op="call_module") if loop_of(node) is None)
    end = min((*ends, *updates))
    starts = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    sums = [late for start in starts if (late := _deferrable(start, ends)) and late.source < end]
    moved: set[fx.Node] = set()
    for _, group in groupby(sorted(sums, key=attrgetter("kind")), key=attrgetter("kind")):
        together = sorted(group, key=attrgetter("start"))
        if len(together) > 1:
            _merge(graph, together, end)
            moved.update(*(member.followers for member in together))
    for node in sorted(moved):
        if node < end:
            end.prepend(node)
    return module


def _deferrable(start: fx.Node, ends: set[fx.Node]) -> _Sum | None:
    """Return the sum if it is no gradient, it and its followers are small, and only writes and the output need them."""
    (wait,), (source,) = start.users, start.all_input_nodes
    if not all(isinstance(sbp, Broadcast) for sbp in meta(wait)["sbp"]) or not _GRADIENTS.isdisjoint(source.meta):
        return None

    def fits(node: fx.Node) -> bool:
        return _is_small(node) and (node in (start, wait) or _is_pointwise(node))

    reached = closure([start], lambda node: node.users.keys() - ends if fits(node) else ())
    return _Sum(start, wait, reached - {start, wait}) if all(map(fits, reached)) else None


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and nbytes(value) <= _SMALL


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and (torch.Tag.pointwise in node.target.tags or is_view(node))


def _merge(graph: fx.Graph, sums: list[_Sum], end: fx.Node) -> None:
    """Emit one all-reduce after the last source; cut its result into the parts at the end of the step."""
    first = sums[0]
    sizes = [member.source.meta["val"].numel() for member in sums]

    def new(target: OpOverload, *args: object, like: fx.Node) -> fx.Node:
        return emit(graph, target, args, origin(first.start), sbp=meta(like)["sbp"])

    last = max([*(member.source for member in sums), placeholders(graph)[-1]])
    with graph.inserting_before(last.next):
        flat = [new(aten.reshape.default, member.source, [-1], like=member.source) for member in sums]
        joined = new(aten.cat.default, flat, like=first.source)
        start = new(c10d.all_reduce.default, joined, *first.start.args[1:], like=first.start)
        meta(start)["boxing"] = joined_boxing([meta(member.start)["boxing"] for member in sums])
        wait = new(c10d.wait_tensor.default, start, like=first.wait)
    offset = 0
    with graph.inserting_before(end):
        for member, size in zip(sums, sizes, strict=True):
            part = new(aten.slice.Tensor, wait, 0, offset, offset + size, like=first.wait)
            total = new(aten.view.default, part, list(member.wait.meta["val"].shape), like=first.wait)
            replace_node(member.wait, total)
            graph.erase_node(member.start)
            offset += size
