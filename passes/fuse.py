"""fuse: an optimizer's own fused operators, where its group asks for them, update a bucket in one go.

Placement, and the proof that the update is elementwise, saw the plain operators; here they are replaced, so the
optimizer reads and writes its state once where they do so many times.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.passes.context import Context
from zerograph.passes.edit import emit
from zerograph.step_graph import Origin, placeholders, role, writes

aten = torch.ops.aten


def fuse(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Buckets of optimizers with ``fused=True`` are updated in place by the fused operators."""
    graph = module.graph
    inputs = {found.name: node for node in placeholders(graph) if (found := role(node)) is not None}
    written = {state: write for write, state, _ in writes(graph)}
    for gradient in list(graph.find_nodes(op="call_function", target=aten.alias.default)):
        name = gradient.meta.get("gradient_of")
        if name is None:
            continue
        update = context.updates[name]
        program = update.program
        assert program.fused is not None
        state = {entry: inputs[f"{name}.{entry}"] for entry in program.state}
        numbers = {short: inputs[found] for short, found in update.numbers.items()}
        given = {"param": inputs[name], "grad": gradient.all_input_nodes[0], **numbers, **state}
        _put(graph, written[inputs[name]], program.fused, given)
        for node in (inputs[name], *state.values()):
            if node in written:
                graph.erase_node(written[node])
    graph.eliminate_dead_code()
    return module


def _put(graph: fx.Graph, before: fx.Node, fused: fx.GraphModule, given: dict[str, fx.Node]) -> None:
    """The program's operators, which write what they are given."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in fused.graph.nodes:
        if node.op == "placeholder":
            copies[node] = given[node.meta["update_input"]]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            with graph.inserting_before(before):
                copies[node] = emit(graph, node.target, args, Origin("update"), **kwargs)
