"""unfuse: a bias is added beside its product, so that a product may be summed over ranks first."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import emit
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten


def unfuse(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No product has a bias in it, if the mesh has several dimensions: partial products must not each add one."""
    graph = module.graph
    if context.rank_dims == 1:
        return module
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        given = rules.arguments(node)
        with graph.inserting_before(node):
            product = emit(graph, aten.mm.default, (given["mat1"], given["mat2"]), origin(node))
            bias = given["self"]
            if given["alpha"] != 1:
                product = emit(graph, aten.mul.Tensor, (product, given["alpha"]), origin(node))
            if given["beta"] != 1:
                bias = emit(graph, aten.mul.Tensor, (bias, given["beta"]), origin(node))
            total = emit(graph, aten.add.Tensor, (product, bias), origin(node))
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return module
