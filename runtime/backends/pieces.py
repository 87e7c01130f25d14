"""Cut the emitted graph into pieces worth compiling: what Inductor fuses, between what it would call as it is.

Products, attention, convolutions and collectives run the same kernel whether a compiler calls them or not. Between them
lie chains of pointwise operators and reductions, and a model of many equal layers has few different ones: compiling
those, once each, takes the same time whatever the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, written_arguments
from zerograph.ir.alias import WAIT, is_view, viewed
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten

# Beside everything that torch tags as pointwise: what Inductor turns into loops of its own.
_LOOPS = frozenset(
    {
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._to_copy.default,
        aten.amax.default,
        aten.amin.default,
        aten.copy_.default,
        aten.gather.default,
        aten.linalg_vector_norm.default,
        aten.mean.default,
        aten.mean.dim,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var_mean.correction,
    }
)
# Cost nothing by themselves, but belong to the loop that reads them.
_MAKERS = frozenset(
    {
        aten.arange.default,
        aten.full.default,
        aten.full_like.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.zeros.default,
        aten.zeros_like.default,
    }
)
# Several passes by themselves: Inductor's single one is up to twice as fast (layer norm on CPU).
_NORMS = frozenset(
    {
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)
_FLAT_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
# A wait hands on the memory of its collective; torch's schema does not say so.

# A piece of which no value has as many elements is done in the time of the call, on CPU: no reason to compile it.
SMALLEST = 4096
# Beyond it a kernel grows, and so does what must stay alive until the piece runs.
_LARGEST = 64


@dataclass(eq=False)
class Piece:
    """Nodes that run as one, in their order; ``inputs`` and ``outputs`` are the values that cross its border."""

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    def where(self) -> str:
        """The modules and source lines that it comes from, for messages."""
        origins = [origin(node) for node in self.nodes]
        modules = dict.fromkeys(o.module for o in origins if o.module)
        sources = dict.fromkeys(f"{o.source}: {o.code}" for o in origins if o.source)
        return "\n".join([f"the {origins[0].phase} of {', '.join(modules) or 'build()'}", *sources])


def cut(graph: fx.Graph) -> list[fx.Node | Piece]:
    """The graph as what to run one after the other: nodes as they are, and pieces to compile.

    Everything outside of pieces keeps its order. A piece runs as soon as nothing more can join it, at the latest before
    what reads one of its values or writes to what it reads, so no value lives much longer than without pieces.
    """
    cutter = _Cutter(graph)
    for node in graph.nodes:
        cutter.place(node)
    return cutter.program


class _Cutter:
    def __init__(self, graph: fx.Graph) -> None:
        self.program: list[fx.Node | Piece] = []
        self._memory = _memory(graph)
        self._joining = _joining(graph)
        self._open: list[_Growing] = []
        self._placed: set[fx.Node] = set()

    def place(self, node: fx.Node) -> None:
        if node in self._placed:
            return
        if node not in self._joining or (_is_view(node) and not self._made_open(node)):
            self._close([one for one in self._open if one.conflicts(node) or _separates(node, one)])
            if node.op != "output":
                self.program.append(node)
            return
        into = _Growing(self._memory)
        joined = [one for one in self._open if any(value in one.nodes for value in node.all_input_nodes)]
        if sum(len(one.nodes) for one in joined) < _LARGEST and all(one.takes(node) for one in joined):
            self._open = [one for one in self._open if one not in joined]
            for one in joined:
                into.absorb(one)
        self._close([one for one in self._open if one in joined or one.conflicts(node)])
        into.add(node, self._joining)
        # The results of an operator that has several leave a piece one by one.
        for result in [user for user in node.users if user.target is getitem]:
            into.add(result, self._joining)
            self._placed.add(result)
        self._open.append(into)
        if not into.waiting:
            self._close([into])

    def _made_open(self, view: fx.Node) -> bool:
        """Views of what comes from outside stay outside: where a weight lies in its bucket differs between layers."""
        return any(one.makes(view) for one in self._open)

    def _close(self, some: Sequence[_Growing]) -> None:
        for growing in some:
            self._open.remove(growing)
            self.program += growing.finished()


def _joining(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may be in a piece: loops, and the views and constants that loops read."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not _on_tensors(node):
            continue
        target = node.target
        if _is_scalar(node):
            continue
        if _is_loop(node):
            found.add(node)
        elif target is getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and _is_loop(source):
                found.add(node)
        elif (target in _MAKERS or _is_view(node)) and any(user in found for user in node.users):
            found.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    return is_view(node) and isinstance(node.meta.get("val"), Tensor)


def _separates(node: fx.Node, growing: _Growing) -> bool:
    """A norm over all gradients is summed bucket by bucket, as they arrive: not in one piece that grows with depth."""
    arrives = node.target is WAIT or "boxing" in node.meta
    return arrives and growing.phase == "update" and not growing.changes_anything


def _is_loop(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or "boxing" in node.meta or not _on_tensors(node):
        return False
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in _LOOPS or torch.Tag.pointwise in target.tags


def _is_scalar(node: fx.Node) -> bool:
    """Whether it makes 0-d values of 0-d values, on the CPU.

    In a loop that reads them they would be made again for each element: Adam's powers of its betas took most of its
    update's time so.
    """
    values = [one.meta["val"] for one in (node, *node.all_input_nodes)]
    return all(isinstance(one, Tensor) and one.dim() == 0 and one.device.type == "cpu" for one in values)


def _loops(node: fx.Node) -> int:
    """How many passes over memory the node is by itself: nothing is won by compiling a single one."""
    if node.target in _NORMS:
        return 2
    return int(_is_loop(node) and node.target is not aten.copy_.default)


def _is_large(node: fx.Node) -> bool:
    values = [one.meta["val"] for one in (node, *node.all_input_nodes)]
    return any(
        isinstance(value, Tensor) and (value.numel() >= SMALLEST or value.device.type != "cpu") for value in values
    )


def _on_tensors(node: fx.Node) -> bool:
    """Whether the node and all that it reads are tensors: pieces take and give nothing else."""
    if node.op != "call_function" or not _tensors(node):
        return False
    return all(_tensors(argument) for argument in node.all_input_nodes)


def _tensors(node: fx.Node) -> bool:
    found = node.meta.get("val")
    if isinstance(found, (tuple, list)):
        return all(one is None or isinstance(one, Tensor) for one in found)
    return isinstance(found, Tensor)


def _memory(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the one whose memory its value shares: itself, unless it is a view or written in place."""
    rooms = {meta(node)["role"].bucket: node for node in placeholders(graph, "gather_buffer")}
    found: dict[fx.Node, fx.Node] = {room: room for room in rooms.values()}
    for node in graph.nodes:
        source: object = None
        if viewed(node) is not None or node.target in (getitem, WAIT):
            source = node.args[0]
        elif written := written_arguments(node):
            source = written[0]
        elif (given := role(node)) is not None and given.kind == "bucket":
            # The shard is a view of the gather buffer, if there is one.
            source = rooms.get(given.name)
        found[node] = found[source] if isinstance(source, fx.Node) else node
    return found


class _Growing:
    """A piece that nodes may still join."""

    def __init__(self, memory: dict[fx.Node, fx.Node]) -> None:
        self._memory = memory
        self.nodes: dict[fx.Node, None] = {}
        self.waiting: set[fx.Node] = set()
        # What lies outside and is read or written, by the memory that it lies in: whether it is written.
        self._touched: dict[fx.Node, dict[fx.Node, bool]] = {}
        self._made: set[fx.Node] = set()

    @property
    def phase(self) -> str:
        return origin(next(iter(self.nodes))).phase

    def makes(self, node: fx.Node) -> bool:
        """Whether the node's value lies in memory that the piece takes itself."""
        return self._memory[node] in self._made

    def takes(self, node: fx.Node) -> bool:
        """Whether with ``node`` the piece still belongs to one phase, and sees each memory from outside in one way."""
        if self.phase != origin(node).phase:
            return False
        written = written_arguments(node)
        for argument in node.all_input_nodes:
            if argument in self.nodes:
                continue
            for other, changed in self._touched.get(self._memory[argument], {}).items():
                if other is not argument and (changed or argument in written) and not _apart(other, argument):
                    return False
        return True

    def conflicts(self, node: fx.Node) -> bool:
        """Whether ``node``, outside, must see what the piece does, or would change what the piece still has to read."""
        written = [self._memory[one] for one in written_arguments(node)]
        if any(memory in self._touched for memory in written):
            return True
        # A view says where memory lies, not what is in it.
        looks = not _is_view(node)
        for argument in node.all_input_nodes:
            memory = self._memory[argument]
            if memory in self._made or argument in self.nodes or (looks and self._changes(memory)):
                return True
        return False

    def _changes(self, memory: fx.Node) -> bool:
        return any(self._touched.get(memory, {}).values())

    @property
    def changes_anything(self) -> bool:
        return any(map(self._changes, self._touched))

    def add(self, node: fx.Node, joining: set[fx.Node]) -> None:
        self.nodes[node] = None
        self.waiting.discard(node)
        phase = origin(node).phase
        self.waiting.update(user for user in node.users if user in joining and origin(user).phase == phase)
        if self._memory[node] is node:
            self._made.add(node)
        written = written_arguments(node)
        for argument in node.all_input_nodes:
            if argument not in self.nodes:
                outside = self._touched.setdefault(self._memory[argument], {})
                outside[argument] = outside.get(argument, False) or argument in written

    def absorb(self, other: _Growing) -> None:
        self.nodes |= other.nodes
        self._made |= other._made
        for memory, seen in other._touched.items():
            mine = self._touched.setdefault(memory, {})
            for argument, changed in seen.items():
                mine[argument] = mine.get(argument, False) or changed
        self.waiting = (self.waiting | other.waiting) - set(self.nodes)

    def finished(self) -> list[fx.Node | Piece]:
        """One piece, or the nodes as they are where there is nothing to fuse."""
        if sum(map(_loops, self.nodes)) < 2 or not any(map(_is_large, self.nodes)):
            return list(self.nodes)
        nodes = list(self.nodes)
        inputs = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in self.nodes)
        outside = [_written(node) for node in nodes if any(user not in self.nodes for user in node.users)]
        # What came from outside is known there already.
        outputs = dict.fromkeys(node for node in outside if node in self.nodes and isinstance(node.meta["val"], Tensor))
        return [Piece(nodes, list(inputs), list(outputs))]


def _written(node: fx.Node) -> fx.Node:
    """The value itself, of what is only the same after a change in place."""
    while written := written_arguments(node):
        node = written[0]
    return node


def _apart(one: fx.Node, other: fx.Node) -> bool:
    """Whether two views of one flat tensor have no element in common."""
    first, second = _extent(one), _extent(other)
    if first is None or second is None or first[0] is not second[0]:
        return False
    return first[2] <= second[1] or second[2] <= first[1]


def _extent(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(flat tensor, start, end) of what is a slice of it in another shape."""
    while node.target in _FLAT_VIEWS:
        node = node.all_input_nodes[0]
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    base, dim, start, end = node.args
    if not isinstance(base, fx.Node) or base.meta["val"].dim() != 1 or dim != 0:
        return None
    return (base, start, end) if isinstance(start, int) and isinstance(end, int) else None
