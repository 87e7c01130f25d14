"""split_micro_batches: add micro-batches as a mesh dimension in time, and split the batch along it."""

from __future__ import annotations

from torch import fx

from zerograph.ir.metadata import Origin, TensorRef, meta
from zerograph.ir.rewrite import first_computed
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import placeholders
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import emit_boxing


def split_micro_batches(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Box each input of the batch to S(0) along time for its readers, if there are several micro-batches."""
    graph = module.graph
    if not context.has_time:
        return module
    for node in placeholders(graph, "input"):
        target = context.batch.inputs[int(meta(node)["role"].name)]
        if not isinstance(target[-1], Split) or not node.users:
            continue
        readers = list(node.users)
        with graph.inserting_before(first_computed(graph)):
            tensor = TensorRef("value", str(meta(node)["role"]))
            micro_batch = emit_boxing(graph, node, target, tensor, Origin("forward"))
        for reader in readers:
            reader.replace_input_with(node, micro_batch)
    return module
