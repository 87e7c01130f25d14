"""split_micro_batches: micro-batches are a mesh dimension in time, and the batch is cut along it."""

from __future__ import annotations

from torch import fx

from zerograph.ir.metadata import Origin, TensorRef, meta
from zerograph.ir.rewrite import emit, first_computed
from zerograph.ir.sbp import Split, show
from zerograph.ir.step_graph import placeholders
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing


def split_micro_batches(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """What reads an input of the batch reads its micro-batch, S(0) along time, if there are several."""
    graph = module.graph
    if not context.timed:
        return module
    for node in placeholders(graph, "input"):
        target = context.batch.inputs[int(meta(node)["role"].name)]
        if not isinstance(target[-1], Split) or not node.users:
            continue
        readers = list(node.users)
        with graph.inserting_before(first_computed(graph)):
            taken = emit(graph, boxing, (node, show(target)), Origin("forward"))
        meta(taken).update({"target_sbp": target, "tensor": TensorRef("value", str(meta(node)["role"]))})
        for reader in readers:
            reader.replace_input_with(node, taken)
    return module
