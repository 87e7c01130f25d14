"""fuse_feedback: add gradient and residual, code the sum, and compute what the code lacks, in one operator."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit
from zerograph.ops import blocks
from zerograph.passes.context import Context

aten = torch.ops.aten


def fuse_feedback(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace a sum that only a code and its error read by one operator that returns both."""
    graph = module.graph
    for error in graph.find_nodes(op="call_function", target=blocks.coding_error):
        total, code, *codec, dtype = error.args
        assert isinstance(total, fx.Node)
        assert isinstance(code, fx.Node)
        if set(total.users) == {code, error} and code.args == (total, *codec) and _is_plain_sum(total):
            with graph.inserting_before(code):
                both = emit(graph, blocks.encode_sum, (*total.args, *codec, dtype), origin(code))
                for index, node in enumerate((code, error)):
                    result = emit(graph, operator.getitem, (both, index), origin(node), like=node)
                    result.meta = {**node.meta, "val": result.meta["val"]}
                    node.replace_all_uses_with(result)
            for node in (error, code, total):
                graph.erase_node(node)
    return module


def _is_plain_sum(node: fx.Node) -> bool:
    """Return whether the node adds two tensors of one shape in fp32."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(one, fx.Node) for one in node.args):
        return False
    values = [node.meta["val"], *(meta(one)["val"] for one in node.all_input_nodes)]
    shapes = {tuple(value.shape) for value in values}
    return len(shapes) == 1 and len(values) == 3 and values[0].dtype is values[1].dtype is torch.float32
