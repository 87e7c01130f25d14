"""The nodes of a step in one table, which all views read: those of the graph and of the bodies of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from zerograph.inspection.names import label, updated_buckets
from zerograph.ir.loop import accumulate, collect, loop_of
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import meta
from zerograph.ops.tree_sum import accumulate_in_tree
from zerograph.passes.context import Context


@dataclass(frozen=True, eq=False)
class Row:
    """A node in the table.

    Attributes:
        label: module path and name, see :mod:`zerograph.inspection.names`.
        bucket: the bucket that it holds or updates; None for other nodes, and for those of several.
        index: from 0; a loop comes before the nodes of its body.
        done: of a loop, the index after the last node of its body; else the node's own index.
        times: number of runs per step.
        loops: the loop nodes around it, outermost first.
    """

    node: fx.Node
    label: str
    bucket: str | None
    index: int
    done: int
    times: int
    loops: tuple[fx.Node, ...]

    def name(self, separator: str) -> str:
        """Return a name that is unique in the table: the node's, after those of the loops around it."""
        return separator.join(node.name for node in (*self.loops, self.node))


class NodeTable:
    """The rows of a graph, each after the loop that it is in, and its dataflow across the borders of loops."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.rows = _rows(graph, 0, 1, ())
        self._by_node = {row.node: row for row in self.rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, node: fx.Node) -> Row:
        return self._by_node[node]

    @cached_property
    def is_local(self) -> bool:
        """True if values have this rank's shapes, as after ``localize``, from which on inputs have global ones too."""
        return any("global" in node.meta for node in self.graph.find_nodes(op="placeholder"))

    def shapes(self, node: fx.Node, context: Context) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Return the global shape of a node's tensor, None if it has none, and the shape of this rank's part."""
        shape, sbp = tuple(node.meta["val"].shape), meta(node).get("sbp")
        if self.is_local:
            whole = meta(node).get("global")
            return None if whole is None else tuple(whole), shape
        if sbp is None:
            return shape, shape
        mesh = context.mesh if len(sbp) == context.mesh.dims else context.with_time_dim().mesh
        return shape, local_shape(shape, sbp, mesh)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that read a value, in order: also in the body of a loop, and after the loop it leaves."""
        readers: dict[fx.Node, None] = {}
        for user in node.users:
            if loop_of(user) is not None:
                for operand, placeholder in loop_inputs(user):
                    if operand is node:
                        readers |= dict.fromkeys(self.readers(placeholder))
            elif user.target in (accumulate, accumulate_in_tree, collect) and node in user.args[1:3]:
                readers |= dict.fromkeys([user, *self._loop_results(user)])
            else:
                readers[user] = None
        return sorted(readers, key=self.index)

    def index(self, node: fx.Node) -> int:
        """Return the index of a node's row."""
        return self[node].index

    def _loop_results(self, write: fx.Node) -> list[fx.Node]:
        """Return the nodes outside a loop that stand for a result that ``write`` writes."""
        loop_node = self[write].loops[-1]
        placeholders: list[Any] = list(write.graph.find_nodes(op="placeholder", sort=True))
        index = placeholders.index(write.args[0]) - len(loop_node.args)
        return [user for user in loop_node.users if user.args[1] == index]

    def storage(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return the node after which a value's memory is freed, and its bytes; None if it outlives the graph."""
        storage = self._storage(node)
        nodes = self._profiles[node.graph].nodes
        if storage is None or storage.is_input or not storage.bytes or storage.dies == len(nodes) - 1:
            return None
        return nodes[storage.dies], storage.bytes

    def same_memory(self, first: fx.Node, second: fx.Node) -> bool:
        """Return True if two values of one graph share memory."""
        if first is second:
            return True
        if first.graph is not second.graph:
            return False
        storage = self._storage(first)
        return storage is not None and storage is self._storage(second)

    def _storage(self, node: fx.Node) -> Storage | None:
        storages = self._profiles[node.graph].of.get(node, ())
        return storages[0] if storages else None

    @cached_property
    def _profiles(self) -> dict[fx.Graph, Profile]:
        """The memory of the graph and of the bodies of its loops."""
        profiles = [profile(self.graph)]
        for memory in profiles:
            profiles += memory.bodies.values()
        return {memory.nodes[0].graph: memory for memory in profiles}


def _rows(graph: fx.Graph, start: int, times: int, loops: tuple[fx.Node, ...]) -> list[Row]:
    rows: list[Row] = []
    for node, bucket in updated_buckets(graph).items():
        index, loop = start + len(rows), loop_of(node)
        body = [] if loop is None else _rows(loop.body.graph, index + 1, times * loop.micro_batches, (*loops, node))
        done = index + len(body) + (loop is not None)
        rows += [Row(node, label(node, bucket), bucket, index, done, times, loops), *body]
    return rows


def loop_inputs(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return (operand, placeholder of the body) for each node that a loop passes to its body."""
    loop = loop_of(node)
    assert loop is not None
    inputs = zip(node.args, loop.body.graph.find_nodes(op="placeholder", sort=True), strict=False)
    return [(operand, placeholder) for operand, placeholder in inputs if isinstance(operand, fx.Node)]
