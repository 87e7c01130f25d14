"""Cut the emitted graph into pieces worth compiling: chains of operators that Inductor fuses.

Products, attention, convolutions and collectives run the same kernel whether a compiler calls them or not. Between them
are chains of pointwise operators and reductions. A model of many equal layers has few different chains, so compiling
each once takes the same time whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload, written_arguments
from zerograph.ir.alias import WAIT, is_view, viewed
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.operator_parts import LOOPS_OF_SEVERAL, PARTS, SCATTERS, is_number
from zerograph.ir.sizes import elements
from zerograph.ir.step_graph import inputs_by_name, placeholders

aten = torch.ops.aten

# Operators that Inductor turns into loops of its own, beside those that torch tags as pointwise.
_LOOPS = LOOPS_OF_SEVERAL | {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
}
# Factories: they cost nothing by themselves, and belong to the loop that reads them.
FACTORIES = frozenset(
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
# Several passes over memory in eager mode. Inductor's single pass is up to twice as fast (layer norm on CPU).
_NORMS = frozenset(
    {
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)
_FLAT_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
# Operators whose results IEEE 754 fixes, or those of their parts: compiled, they round alike in pieces of any size.
_ROUND_ONCE = {
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.div.Tensor,
    aten.div_.Tensor,
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.sub.Tensor,
    aten.sub_.Tensor,
}
_COPIES = {aten._to_copy.default, aten.clone.default, aten.copy_.default}
_EXACT = PARTS.keys() | _COPIES | {aten.sqrt.default, aten.sqrt_.default}
_WIDE = (torch.float32, torch.float64)
_FLOATS = (*_WIDE, torch.bfloat16, torch.float16)
# Elements. On CPU a piece of smaller values takes no longer than its call, and is not compiled.
SMALLEST = 4096
WithSymbols = Callable[[Iterable[fx.Node]], list[fx.Node]]
# Nodes of the largest piece. Larger kernels keep more values alive until the piece runs.
_LARGEST = 64


@dataclass(eq=False)
class Piece:
    """Nodes that run as one function.

    Attributes:
        nodes: in execution order.
        inputs, outputs: the values that cross its border. All symbols of its sizes are among the inputs.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    def where(self) -> str:
        """Return the modules, source lines and operators of the piece, for messages."""
        origins = [origin(node) for node in self.nodes]
        modules = dict.fromkeys(o.module for o in origins if o.module)
        sources = dict.fromkeys(f"{o.source}: {o.code}" for o in origins if o.source)
        operators = dict.fromkeys(str(node.target) for node in self.nodes if node.target is not getitem)
        where = f"the {origins[0].phase} of {', '.join(modules) or 'build()'}"
        return "\n".join([where, *sources, f"operators: {', '.join(operators)}"])


Program = list["fx.Node | Piece"]


def cut(graph: fx.Graph) -> Program:
    """Return the graph as a program: nodes to run as they are, and pieces to compile.

    Nodes outside of pieces keep their order. A piece runs as soon as no further node can join it, at the latest before
    a node that reads one of its values or writes to one of its inputs. So no value lives much longer than without
    pieces.
    """
    return _cut(graph, Cutter(graph))


def cut_exactly(graph: fx.Graph) -> Program:
    """Return the graph as a program whose numbers do not depend on where it is cut, nor on the sizes of shards.

    With ``config.virtual_ranks`` a piece of forward and backward has operators of which kernels and compiled code
    return the same bits. Other operators of an update are in a piece in any case: compiled, each of their parts rounds
    once, in vectors and alone.
    """
    return _cut(graph, Cutter(graph, exact=True))


def _cut(graph: fx.Graph, cutter: Cutter) -> Program:
    for node in graph.nodes:
        cutter.place(node)
    return read_numbers(graph, cutter.program)


def read_numbers(graph: fx.Graph, program: Program) -> Program:
    """Return the program without the numbers that no node outside of pieces reads: pieces take the tensors."""
    outside = {argument for step in program if isinstance(step, fx.Node) for argument in step.all_input_nodes}
    outside.update(graph.output_node().all_input_nodes)
    return [step for step in program if isinstance(step, Piece) or not is_number(step) or step in outside]


class Cutter:
    """Visit nodes in order; ``program`` grows by nodes and finished pieces.

    Args:
        graph: the emitted graph.
        of_updates: only nodes of the update join pieces.
        exact: see :func:`cut_exactly`.
    """

    def __init__(self, graph: fx.Graph, *, of_updates: bool = False, exact: bool = False) -> None:
        self.program: Program = []
        self._memory, self._exact = memory_owners(graph), exact
        fusible = _fusible(graph, _is_exact, frozenset()) if exact else _fusible(graph, _is_loop, FACTORIES)
        self._fusible = {node for node in fusible if not of_updates or origin(node).phase == "update"}
        self._with_symbols = symbol_inputs(graph)
        self._open: list[OpenPiece] = []
        self._placed: set[fx.Node] = set()

    def place(self, node: fx.Node) -> None:
        """Put the node into an open piece or into the program."""
        if node in self._placed:
            return
        if node not in self._fusible or (_is_view(node) and not self._is_of_open_piece(node)):
            self._close([piece for piece in self._open if piece.conflicts(node) or _separates(node, piece)])
            if node.op != "output":
                self.program.append(node)
            return
        into = OpenPiece(self._memory)
        joined = [piece for piece in self._open if any(value in piece.nodes for value in reads(node))]
        if sum(len(piece.nodes) for piece in joined) < _LARGEST and all(piece.takes(node) for piece in joined):
            self._open = [piece for piece in self._open if piece not in joined]
            for piece in joined:
                into.absorb(piece)
        self._close([piece for piece in self._open if piece in joined or piece.conflicts(node)])
        into.add(node, self._fusible)
        # An operator's several results leave a piece one by one.
        for result in [user for user in node.users if user.target is getitem]:
            into.add(result, self._fusible)
            self._placed.add(result)
        self._open.append(into)
        if not into.waiting:
            self._close([into])

    def close(self) -> None:
        """Append all open pieces to the program."""
        self._close(list(self._open))

    def _is_of_open_piece(self, view: fx.Node) -> bool:
        """Return whether a view is of memory of an open piece.

        Other views stay outside of pieces: the offset of a weight in its bucket differs between layers.
        """
        return any(piece.allocates(view) for piece in self._open)

    def _close(self, pieces: Sequence[OpenPiece]) -> None:
        for piece in pieces:
            self._open.remove(piece)
            self.program += piece.finish(self._with_symbols, self._exact)


def symbol_inputs(graph: fx.Graph) -> WithSymbols:
    """Return a function that puts the symbols of the sizes of a piece's inputs before the inputs."""
    symbols = inputs_by_name(graph, "size")

    def with_symbols(inputs: Iterable[fx.Node]) -> list[fx.Node]:
        names = {name for node in inputs for size in _sizes(node.meta["val"]) for name in _torch.symbols_of(size)}
        return list(dict.fromkeys([*(symbols[name] for name in sorted(names)), *inputs]))

    return with_symbols


def _sizes(value: Any) -> list[torch.SymInt]:
    """Return the symbolic sizes in a value."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def by_tensors(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return what a piece calls for a node, with its arguments: 0-d tensors where the operator takes their values.

    So a piece computes the update of an optimizer whose learning rate is a number that the step reads, as SGD's is.
    """
    target: Any = SCATTERS.get(node.target, node.target)
    if not _takes_tensors(node):
        return target, node.args, dict(node.kwargs)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _tensor_of)
    return PARTS[target], args, kwargs


def reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that :func:`by_tensors` reads."""
    return list(map(_tensor_of, node.all_input_nodes)) if _takes_tensors(node) else node.all_input_nodes


def _takes_tensors(node: fx.Node) -> bool:
    """Return whether a piece passes 0-d tensors for numbers: products of this dtype are rounded in a kernel, too."""
    value = node.meta.get("val")
    is_wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return is_wide and node.target in PARTS and any(map(is_number, node.all_input_nodes))


def _tensor_of(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if is_number(node) else node


def _fusible(graph: fx.Graph, is_loop: Callable[[fx.Node], bool], factories: Collection[Any]) -> set[fx.Node]:
    """Return the nodes that may be in a piece: loops, and the views and constants that loops read."""
    fusible: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not on_tensors(node):
            continue
        target = node.target
        if _is_scalar(node):
            continue
        if is_loop(node):
            fusible.add(node)
        elif target is getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and is_loop(source):
                fusible.add(node)
        elif (target in factories or _is_view(node)) and any(user in fusible for user in node.users):
            fusible.add(node)
    return fusible


def _is_view(node: fx.Node) -> bool:
    return is_view(node) and isinstance(node.meta.get("val"), Tensor)


def _separates(node: fx.Node, piece: OpenPiece) -> bool:
    """Return whether a collective ends a piece that only reads, such as a part of a gradient norm.

    A norm over all gradients is summed bucket by bucket, as they arrive, not in one piece that grows with depth.
    """
    is_collective = node.target is WAIT or "boxing" in node.meta
    return is_collective and piece.phase == "update" and not piece.writes_outside


def _is_loop(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or "boxing" in node.meta or not on_tensors(node):
        return False
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in _LOOPS or torch.Tag.pointwise in target.tags


def _is_exact(node: fx.Node) -> bool:
    """Return whether an operator may be in a piece of :func:`cut_exactly`."""
    return _is_loop(node) and (_rounds_once(node) or (origin(node).phase == "update" and _has_exact_parts(node)))


def _rounds_once(node: fx.Node) -> bool:
    """Return whether the operator's kernel and compiled code return the same bits."""
    if node.target not in _ROUND_ONCE:
        return node.target in _COPIES and _is_wide(node, _FLOATS)
    values = [source.meta.get("val") for source in node.all_input_nodes]
    numbers = len(values) < len(node.args) or node.kwargs
    return not numbers and _is_wide(node) and all(isinstance(value, Tensor) and value.dim() for value in values)


def _has_exact_parts(node: fx.Node) -> bool:
    # Inductor lets the C++ compiler change the sign of a zero where it sees this number.
    numbers = [number for number in (*node.args, *node.kwargs.values()) if isinstance(number, (int, float))]
    return node.target in _EXACT and _is_wide(node) and not {0, -1}.intersection(numbers)


def _is_wide(node: fx.Node, sources: Collection[torch.dtype] = _WIDE) -> bool:
    """Return whether the result is fp32 or fp64, and each tensor that the node reads is of one of these dtypes."""
    dtypes = [value.dtype for source in reads(node) if isinstance(value := source.meta.get("val"), Tensor)]
    return node.meta["val"].dtype in _WIDE and all(dtype in sources for dtype in dtypes)


def _is_scalar(node: fx.Node) -> bool:
    """Return whether all inputs and the result are 0-d CPU tensors.

    A loop that reads the result would compute it again for each element. Adam's powers of its betas took most of the
    update's time that way.
    """
    values = [value_node.meta["val"] for value_node in (node, *reads(node))]
    tensors = [value for value in values if not isinstance(value, torch.SymInt)]
    return all(isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu" for value in tensors)


def _loops(node: fx.Node) -> int:
    """Return how many passes over memory the node takes in eager mode; compiling a single one gains nothing."""
    if node.target in _NORMS:
        return 2
    return int(_is_loop(node) and node.target is not aten.copy_.default)


def _is_large(node: fx.Node) -> bool:
    values = [value_node.meta["val"] for value_node in (node, *reads(node))]
    return any(
        isinstance(value, Tensor) and (elements(value) >= SMALLEST or value.device.type != "cpu") for value in values
    )


def on_tensors(node: fx.Node) -> bool:
    """Return whether the node returns tensors, and reads tensors and sizes only, as pieces do."""
    if node.op != "call_function" or not _has_tensors(node):
        return False
    return all(_has_tensors(argument) or isinstance(argument.meta.get("val"), torch.SymInt) for argument in reads(node))


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return all(result is None or isinstance(result, Tensor) for result in value)
    return isinstance(value, Tensor)


def memory_owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the node that owns its memory: itself, unless it is a view or written in place."""
    gather_buffers = {meta(node)["role"].bucket: node for node in placeholders(graph, "gather_buffer")}
    owners: dict[fx.Node, fx.Node] = {node: node for node in gather_buffers.values()}
    for node in graph.nodes:
        source: object = None
        if viewed(node) is not None or node.target in (getitem, WAIT):
            source = node.args[0]
        elif written := written_arguments(node):
            source = written[0]
        elif (node_role := role(node)) is not None and node_role.kind == "bucket":
            # The shard is a view of the gather buffer, if there is one.
            source = gather_buffers.get(node_role.name)
        owners[node] = owners[source] if isinstance(source, fx.Node) else node
    return owners


class OpenPiece:
    """A piece that nodes may still join."""

    def __init__(self, memory: dict[fx.Node, fx.Node]) -> None:
        self._memory = memory
        self.nodes: dict[fx.Node, None] = {}
        self.waiting: set[fx.Node] = set()
        # By owner of memory outside: the nodes that are read or written, and whether each is written.
        self._outside: dict[fx.Node, dict[fx.Node, bool]] = {}
        # Owners of memory that the piece allocates.
        self._allocated: set[fx.Node] = set()

    @property
    def phase(self) -> str:
        """Return the phase that all nodes of the piece belong to."""
        return origin(next(iter(self.nodes))).phase

    def allocates(self, node: fx.Node) -> bool:
        """Return whether the piece allocates the memory of the node's value."""
        return self._memory[node] in self._allocated

    def takes(self, node: fx.Node) -> bool:
        """Return whether ``node`` may join: it is of the same phase, and the piece still uses no memory in two ways."""
        if self.phase != origin(node).phase:
            return False
        written = written_arguments(node)
        for argument in reads(node):
            if argument in self.nodes:
                continue
            for other, is_written in self._outside.get(self._memory[argument], {}).items():
                if other is not argument and (is_written or argument in written) and not _disjoint(other, argument):
                    return False
        return True

    def conflicts(self, node: fx.Node) -> bool:
        """Return whether the piece must run before ``node``, which reads its results or writes to its inputs."""
        written = [self._memory[argument] for argument in written_arguments(node)]
        if any(memory in self._outside for memory in written):
            return True
        # A view does not depend on the contents of memory.
        has_contents = not _is_view(node)
        for argument in reads(node):
            memory = self._memory[argument]
            if memory in self._allocated or argument in self.nodes or (has_contents and self._writes(memory)):
                return True
        return False

    def _writes(self, memory: fx.Node) -> bool:
        return any(self._outside.get(memory, {}).values())

    @property
    def writes_outside(self) -> bool:
        """Return whether the piece writes to memory that it does not allocate."""
        return any(map(self._writes, self._outside))

    def add(self, node: fx.Node, fusible: Collection[fx.Node] = ()) -> None:
        """Append the node; users of it that may join are waited for."""
        self.nodes[node] = None
        self.waiting.discard(node)
        phase = origin(node).phase
        self.waiting.update(user for user in node.users if user in fusible and origin(user).phase == phase)
        if self._memory[node] is node:
            self._allocated.add(node)
        written = written_arguments(node)
        for argument in reads(node):
            if argument not in self.nodes:
                outside = self._outside.setdefault(self._memory[argument], {})
                outside[argument] = outside.get(argument, False) or argument in written

    def absorb(self, other: OpenPiece) -> None:
        """Append another piece."""
        self.nodes |= other.nodes
        self._allocated |= other._allocated
        for memory, accesses in other._outside.items():
            own = self._outside.setdefault(memory, {})
            for argument, is_written in accesses.items():
                own[argument] = own.get(argument, False) or is_written
        self.waiting = (self.waiting | other.waiting) - set(self.nodes)

    def finish(self, with_symbols: WithSymbols, exact: bool) -> Program:
        """Return one piece, or the nodes as they are if there is nothing to fuse, and their kernels round alike."""
        gains = sum(map(_loops, self.nodes)) > 1 and any(map(_is_large, self.nodes))
        if not gains and (not exact or all(is_view(node) or _rounds_once(node) for node in self.nodes)):
            return list(self.nodes)
        return [self.piece(with_symbols)]

    def piece(self, with_symbols: WithSymbols, late: Collection[fx.Node] = ()) -> Piece:
        """Return the nodes as one piece.

        Args:
            with_symbols: see :func:`symbol_inputs`.
            late: views that are computed again outside: their sources leave the piece in their place.
        """
        nodes: dict[fx.Node, None] = {}
        for node in reversed(self.nodes):
            if node not in late or any(user in nodes for user in node.users):
                nodes[node] = None
        nodes = dict.fromkeys(reversed(nodes))
        inputs = dict.fromkeys(a for node in nodes for a in reads(node) if a not in nodes)
        leaving = [n for n in nodes if n not in late and any(user not in nodes or user in late for user in n.users)]
        # Tensors from outside that the piece writes to are no outputs.
        outputs = [
            node for node in map(_before_writes, leaving) if node in nodes and isinstance(node.meta["val"], Tensor)
        ]
        return Piece(list(nodes), with_symbols(inputs), list(dict.fromkeys(outputs)))


def _before_writes(node: fx.Node) -> fx.Node:
    """Return the node that produced the tensor which ``node`` is after writes in place."""
    while written := written_arguments(node):
        node = written[0]
    return node


def _disjoint(first_view: fx.Node, second_view: fx.Node) -> bool:
    """Return whether two nodes are views of one flat tensor without a common element."""
    first, second = _interval(first_view), _interval(second_view)
    if first is None or second is None or first[0] is not second[0]:
        return False
    return first[2] <= second[1] or second[2] <= first[1]


def _interval(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (flat tensor, start, end) of a reshaped slice of a flat tensor; None for other nodes."""
    while node.target in _FLAT_VIEWS:
        node = node.all_input_nodes[0]
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    base, dim, start, end = node.args
    if not isinstance(base, fx.Node) or base.meta["val"].dim() != 1 or dim != 0:
        return None
    return (base, start, end) if isinstance(start, int) and isinstance(end, int) else None
