"""bind_sizes: what depends on symbolic sizes is computed by nodes, from inputs that each call fills."""

from __future__ import annotations

from typing import Any

from torch import fx

from zerograph.ir.metadata import Role, meta
from zerograph.ir.sizes import SizeNodes, sizes_of
from zerograph.passes.context import Context


def bind_sizes(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace every symbolic size in arguments by a node; the symbols become inputs of the graph."""
    graph = module.graph

    def new_input(symbol: str, number: Any) -> fx.Node:
        last = next(node for node in graph.nodes if node.op != "placeholder").prev
        with graph.inserting_after(last):
            node = graph.placeholder(symbol)
        sizes = sizes_of(number)
        node.meta["val"] = sizes.symbol(symbol)
        meta(node)["role"] = Role("size", symbol)
        meta(node)["size"] = sizes.inputs[symbol]
        return node

    nodes = SizeNodes(graph, new_input)
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_module"):
            nodes.bind(node)
    return module
