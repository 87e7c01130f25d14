"""unfuse: split the bias off a matrix product, so that the product can be summed over ranks first."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import emit, replace_node
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten


def unfuse(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Split biases off matrix products if the mesh has several dimensions, so that no partial product adds one."""
    graph = module.graph
    if context.rank_dims == 1:
        return module
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        arguments = rules.arguments(node)
        with graph.inserting_before(node):
            product = emit(graph, aten.mm.default, (arguments["mat1"], arguments["mat2"]), origin(node))
            bias = arguments["self"]
            if arguments["alpha"] != 1:
                product = emit(graph, aten.mul.Tensor, (product, arguments["alpha"]), origin(node))
            if arguments["beta"] != 1:
                bias = emit(graph, aten.mul.Tensor, (bias, arguments["beta"]), origin(node))
            total = emit(graph, aten.add.Tensor, (product, bias), origin(node))
        replace_node(node, total)
    return module
