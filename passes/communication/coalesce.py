"""coalesce: small tensors that nobody needs summed before the step's end are summed over the ranks in one go.

A batch norm of each rank's own part leaves two sums for its running statistics, a loss one for its mean: by themselves
they cost a message and a meeting of the ranks each, in the middle of forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import is_view
from zerograph.ir.metadata import TensorRef, meta, origin
from zerograph.ir.rewrite import emit, positions
from zerograph.ir.sbp import Broadcast
from zerograph.ir.step_graph import nbytes, placeholders, writes
from zerograph.passes.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Marks of gradients, which are reduced bucket by bucket, each as early as it can.
_GRADIENTS = {"gradient", "accumulated"}

# Bytes of what is rather sent with others than by itself.
_SMALL = 2**16


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum over ranks, and what follows from it."""

    start: fx.Node
    wait: fx.Node
    followers: set[fx.Node]

    @property
    def source(self) -> fx.Node:
        (found,) = self.start.all_input_nodes
        return found

    @property
    def kind(self) -> str:
        """Of those that can travel together: ranks and data type."""
        return f"{self.start.args[-1]} {self.start.meta['val'].dtype} {self.start.meta['val'].device}"


def coalesce(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Small sums over the same ranks of which only written state and outputs are made are one all-reduce."""
    graph = module.graph
    order = positions(graph)
    ends = {graph.output_node(), *(write for write, _, _ in writes(graph))}
    end = min(ends, key=order.__getitem__)
    starts = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    found = [one for start in starts if (one := _put_off(start, ends)) and one.source < end]
    moved: set[fx.Node] = set()
    for _, group in groupby(sorted(found, key=attrgetter("kind")), key=attrgetter("kind")):
        together = sorted(group, key=lambda one: order[one.start])
        if len(together) > 1:
            _join(graph, together, end, order)
            moved.update(*(one.followers for one in together))
    for node in sorted(moved, key=order.__getitem__):
        if order[node] < order[end]:
            end.prepend(node)
    return module


def _put_off(start: fx.Node, ends: set[fx.Node]) -> _Sum | None:
    """The sum, if it is no gradient's, it and what follows are small, and only writes and the output need it."""
    (wait,), (source,) = start.users, start.all_input_nodes
    if not all(isinstance(one, Broadcast) for one in meta(wait)["sbp"]) or not _GRADIENTS.isdisjoint(source.meta):
        return None
    followers: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if not _is_small(node):
            return None
        for user in node.users:
            if user in ends:
                continue
            if user is not wait and not _is_pointwise(user):
                return None
            if user not in followers:
                followers.add(user)
                stack.append(user)
    return _Sum(start, wait, followers - {wait})


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and nbytes(value) <= _SMALL


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and (torch.Tag.pointwise in node.target.tags or is_view(node))


def _join(graph: fx.Graph, together: list[_Sum], end: fx.Node, order: dict[fx.Node, int]) -> None:
    """One all-reduce behind the last source, cut into its parts at the step's end."""
    first = together[0]
    boxing = meta(first.start)["boxing"]
    sizes = [one.source.meta["val"].numel() for one in together]

    def made(target: OpOverload, *args: object, like: fx.Node) -> fx.Node:
        return emit(graph, target, args, origin(first.start), sbp=meta(like)["sbp"])

    last = max([*(one.source for one in together), placeholders(graph)[-1]], key=order.__getitem__)
    with graph.inserting_before(last.next):
        flat = [made(aten.reshape.default, one.source, [-1], like=one.source) for one in together]
        joined = made(aten.cat.default, flat, like=first.source)
        start = made(c10d.all_reduce.default, joined, *first.start.args[1:], like=first.start)
        meta(start)["boxing"] = replace(
            boxing,
            bytes=sum(meta(one.start)["boxing"].bytes for one in together),
            tensor=TensorRef("value", f"{boxing.tensor} and {len(together) - 1} more"),
        )
        wait = made(c10d.wait_tensor.default, start, like=first.wait)
    offset = 0
    with graph.inserting_before(end):
        for one, size in zip(together, sizes, strict=True):
            part = made(aten.slice.Tensor, wait, 0, offset, offset + size, like=first.wait)
            total = made(aten.view.default, part, list(one.wait.meta["val"].shape), like=first.wait)
            one.wait.replace_all_uses_with(total)
            graph.erase_node(one.wait)
            graph.erase_node(one.start)
            offset += size
