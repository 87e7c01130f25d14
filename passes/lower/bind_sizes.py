"""bind_sizes: what depends on symbolic sizes is computed by nodes, from inputs that each call fills."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.dims import Size, SizeInput
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.metadata import Origin, Role, meta
from zerograph.ir.sizes import SYMBOLIC, sizes_of
from zerograph.passes.context import Context


def bind_sizes(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace every symbolic size in arguments by a node; the symbols of all shapes become inputs of the graph."""
    for node in module.graph.find_nodes(op="call_module"):
        if (loop := loop_of(node)) is not None:
            with _torch.raw_sizes():
                node.args = (*node.args, *_bind_body(loop))
    _bind(module.graph)
    return module


def _bind_body(loop: Loop) -> list[Size]:
    """Bind the sizes in the body of a loop; return the sizes that are operands of the loop."""
    inputs = _bind(loop.body.graph)
    loop.sizes = tuple(inputs)
    operands = [sizes_of(n).rows_before(size) if size.micro_batches else n for size, n in inputs.items()]
    return [*operands, *(size for result in loop.results for size in result.shape if not isinstance(size, int))]


def _bind(graph: fx.Graph) -> dict[SizeInput, Any]:
    """Bind the sizes in one graph; return what its new inputs stand for, with their symbols."""
    nodes = _SizeNodes(graph)
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_module"):
            nodes.bind(node)
        nodes.add_inputs(node.meta.get("val"))
    return nodes.inputs


class _SizeNodes:
    """The nodes that compute sizes in one graph. They come before all other nodes except inputs.

    Attributes:
        inputs: the symbol of each new input of the graph, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.inputs: dict[SizeInput, Any] = {}
        self._graph = graph
        self._nodes: dict[Any, fx.Node] = {}
        # Numbers whose symbols are inputs.
        self._seen: set[Any] = set()
        self._first = next(node for node in graph.nodes if node.op != "placeholder")

    def bind(self, node: fx.Node) -> None:
        """Replace the symbolic numbers among the arguments of a node by nodes."""
        numbers = []

        def bound(argument: Any) -> Any:
            if not isinstance(argument, SYMBOLIC):
                return argument
            numbers.append(argument)
            constant = _torch.constant_value(argument)
            return self._node(argument) if constant is None else constant

        arguments = fx.node.map_aggregate((node.args, node.kwargs), bound)
        # Without symbols the node stays as it is, and so does the order of its inputs' users.
        if numbers:
            node.args, node.kwargs = arguments

    def _node(self, number: Any) -> fx.Node:
        """Return the node that computes a symbolic number."""
        key = _torch.size_key(number)
        if key not in self._nodes:
            self._add_inputs(number)
            if key not in self._nodes:
                with self._graph.inserting_before(self._first):
                    before = self._first.prev
                    self._nodes[key] = _torch.emit_size(self._graph, number, self._nodes)
                node = before.next
                while node is not self._first:
                    node.meta.setdefault("origin", Origin("forward"))
                    node = node.next
                self._nodes[key].meta["val"] = number
        return self._nodes[key]

    def add_inputs(self, value: Any) -> None:
        """Add an input for every symbol in the shape and strides of a tensor: compiled code computes with them."""
        if isinstance(value, Tensor):
            for size in (*value.shape, *value.stride()):
                if not isinstance(size, int):
                    self._add_inputs(size)

    def _add_inputs(self, number: Any) -> None:
        key = _torch.size_key(number)
        if key not in self._seen:
            self._seen.add(key)
            for symbol in sorted(key.free_symbols, key=str):
                if symbol not in self._nodes:
                    self._nodes[symbol] = self._input(str(symbol), number)

    def _input(self, symbol: str, number: Any) -> fx.Node:
        """Add an input of the graph for a symbol of a number."""
        last = next(node for node in self._graph.nodes if node.op != "placeholder").prev
        with self._graph.inserting_after(last):
            node = self._graph.placeholder(symbol)
        sizes = sizes_of(number)
        node.meta["val"] = sizes.symbol(symbol)
        meta(node)["role"] = Role("size", symbol)
        meta(node)["size"] = sizes.inputs[symbol]
        self.inputs[sizes.inputs[symbol]] = node.meta["val"]
        return node
