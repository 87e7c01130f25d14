"""merge_exchanges: send in one all-to-all what several adjacent ones send.

Attention on ranks that split the sequence exchanges queries, keys and values for some of the heads, one after the
other, and their gradients in backward. Small exchanges take the latency of the network, and the ranks meet for each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, emit_like
from zerograph.ir.step_graph import nbytes
from zerograph.passes.context import Context
from zerograph.passes.edits import joined_boxing, move_after

aten = torch.ops.aten
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default

# Maximum bytes of an exchange that is merged: for larger ones the latency is small, and merged ones take more memory.
_SMALL = 2**22

# Operators that move elements only. Between exchanges that are merged there are no others.
_MOVES = {
    WAIT,
    *(aten.slice.Tensor, aten.cat.default, aten.clone.default),
    *(aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default),
}


@dataclass(frozen=True, eq=False)
class _Exchange:
    """An all-to-all of equal parts, which a node concatenates, and whose results are cut apart again.

    Attributes:
        start, wait: its nodes.
        rows: size of dimension 0 of each part.
        parts: the tensors for each rank, in order of the ranks.
        pieces: the nodes that take the tensor of each rank from the result.
    """

    start: fx.Node
    wait: fx.Node
    rows: int
    parts: tuple[fx.Node, ...]
    pieces: tuple[fx.Node, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Ranks, phase, data type, and shape without dimension 0; exchanges of one kind can be merged."""
        value, phase = self.start.meta["val"], origin(self.start).phase
        return self.start.args[-1], len(self.parts), phase, value.dtype, value.device, tuple(value.shape[1:])

    @property
    def producer(self) -> fx.Node:
        """The operator that yields the tensor whose elements are sent."""
        node = self.parts[0]
        while node.target in _MOVES or node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return node


def merge_exchanges(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Merge small all-to-alls between the same ranks that only movements of elements separate."""
    _hoist_siblings(module.graph)
    for group in list(_groups(module.graph)):
        if len(group) > 1:
            _merge(module.graph, group)
    return module


def _hoist_siblings(graph: fx.Graph) -> None:
    """Start exchanges of the results of one operator, gradients of queries, keys and values, one after the other."""
    latest: dict[tuple[Any, ...], tuple[fx.Node, fx.Node]] = {}
    moved: set[fx.Node] = set()
    for start in graph.find_nodes(op="call_function", target=EXCHANGE):
        if (exchange := _exchange(start)) is None:
            continue
        key = exchange.producer, exchange.kind
        first, last = latest.get(key, (start, start))
        if first is not start:
            following = partial(_after, first=first)
            sources = closure(following(start), following) - moved
            if not all(node.target in _MOVES or node.target is operator.getitem for node in sources):
                continue
            move_after([*sorted(sources), start], last)
            moved |= sources
        latest[key] = first, start


def _after(node: fx.Node, first: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that come after ``first``."""
    return [source for source in node.all_input_nodes if first < source]


def _groups(graph: fx.Graph) -> Iterator[list[_Exchange]]:
    """Yield exchanges that can be merged: none reads the result of one before it."""
    group: list[_Exchange] = []
    followers: set[fx.Node] = set()
    for node in graph.nodes:
        if not group and node.target is not EXCHANGE:
            continue
        exchange = _exchange(node) if node.target is EXCHANGE else None
        if exchange is not None:
            if group and (exchange.kind != group[0].kind or not followers.isdisjoint(node.all_input_nodes)):
                yield group
                group, followers = [], set()
            group.append(exchange)
            followers.add(node)
        elif node.target not in _MOVES:
            yield group
            group, followers = [], set()
        elif not followers.isdisjoint(node.all_input_nodes):
            followers.add(node)


def _exchange(start: fx.Node) -> _Exchange | None:
    """Return a small exchange of concatenated parts; None for another one."""
    (source,) = start.all_input_nodes
    sent, received = cast("tuple[list[int], list[int]]", start.args[1:3])
    if source.target is aten.clone.default and len(source.users) == 1:
        (source,) = source.all_input_nodes
    (wait,) = start.users
    is_joined = source.target is aten.cat.default and len(source.users) == 1 and (*source.args, 0)[1] == 0
    if nbytes(start.meta["val"]) > _SMALL or sent != received or len(set(sent)) != 1 or not is_joined:
        return None
    parts = cast("list[fx.Node]", source.args[0])
    pieces = {user.args: user for user in wait.users if user.target is aten.slice.Tensor}
    wanted = [(wait, 0, rank * sent[0], (rank + 1) * sent[0]) for rank in range(len(sent))]
    if len(parts) != len(sent) or len(wait.users) != len(sent) or pieces.keys() != set(wanted):
        return None
    return _Exchange(start, wait, sent[0], tuple(parts), tuple(pieces[each] for each in wanted))


def _merge(graph: fx.Graph, group: list[_Exchange]) -> None:
    """Emit one exchange in place of the last one; move what follows from the others to after it."""
    first, last = group[0], group[-1]
    early = _between(first, last)
    rows = sum(member.rows for member in group)
    sizes = [rows] * len(first.parts)
    with graph.inserting_before(last.start):
        ordered = [part for parts in zip(*(member.parts for member in group), strict=True) for part in parts]
        joined = emit_like(first.start, aten.cat.default, ordered)
        if not joined.meta["val"].is_contiguous():
            joined = emit_like(first.start, aten.clone.default, joined, memory_format=torch.contiguous_format)
        start = emit_like(first.start, EXCHANGE, joined, sizes, sizes, first.start.args[-1])
        meta(start)["boxing"] = joined_boxing([meta(member.start)["boxing"] for member in group])
        wait = emit_like(first.wait, WAIT, start)
        for node in early:
            last.start.prepend(node)
    offset = 0
    for member in group:
        for rank, piece in enumerate(member.pieces):
            begin = rank * rows + offset
            piece.args = wait, 0, begin, begin + member.rows
        offset += member.rows
    for member in group:
        _erase_unused(graph, member.wait)


def _between(first: _Exchange, last: _Exchange) -> list[fx.Node]:
    """Return the nodes before the last exchange that follow from an earlier one, without starts and waits."""
    followers, moved = {first.start}, []
    node = first.start.next
    while node is not last.start:
        if node.target is EXCHANGE or not followers.isdisjoint(node.all_input_nodes):
            followers.add(node)
            if node.target not in (EXCHANGE, WAIT):
                moved.append(node)
        node = node.next
    return moved


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an exchange, the concatenation of its parts, and its copy, if nothing reads it."""
    if node.target in (WAIT, EXCHANGE, aten.cat.default, aten.clone.default) and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase_unused(graph, source)
