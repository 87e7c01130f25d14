"""fuse: an optimizer's own fused operators, where its group asks for them, update a bucket in one go.

Placement, and the proof that the update is elementwise, saw the plain operators; here they are replaced, so the
optimizer reads and writes its state once where they do so many times.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph._torch import overloads
from zerograph.ir.metadata import Origin, meta, role
from zerograph.ir.rewrite import drop_unused, emit
from zerograph.ir.step_graph import found_infs, placeholders, writes
from zerograph.passes.context import Context

aten = torch.ops.aten


def fuse(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Buckets of optimizers with ``fused=True`` are updated in place by the fused operators."""
    graph = module.graph
    inputs = {found.name: node for node in placeholders(graph) if (found := role(node)) is not None}
    overflows = found_infs(graph)
    written = {state: write for write, state, _ in writes(graph)}
    for gradient in list(graph.find_nodes(op="call_function", target=aten.alias.default)):
        name = meta(gradient).get("gradient_of")
        if name is None:
            continue
        update = context.updates[name]
        program = update.program
        assert program.fused is not None
        state = {entry: inputs[f"{name}.{entry}"] for entry in program.state}
        numbers = {short: inputs[found] for short, found in update.numbers.items()}
        given = {"param": inputs[name], "grad": gradient.all_input_nodes[0], **numbers, **state}
        _put(graph, written[inputs[name]], program.fused, given, update.number_of(overflows))
        for node in (inputs[name], *state.values()):
            if node in written:
                graph.erase_node(written[node])
    drop_unused(graph)
    return module


def _put(
    graph: fx.Graph, before: fx.Node, fused: fx.GraphModule, given: dict[str, fx.Node], found: fx.Node | None
) -> None:
    """The program's operators, which write what they are given, unless an overflow was ``found``."""
    if found is not None and found.meta["val"].device != given["param"].meta["val"].device:
        with graph.inserting_before(before):
            device = given["param"].meta["val"].device
            found = emit(graph, aten._to_copy.default, (found,), Origin("update"), like=found, device=device)
    copies: dict[fx.Node, fx.Node] = {}
    for node in fused.graph.nodes:
        if node.op == "placeholder":
            copies[node] = given[meta(node)["update_input"]]
        elif found is not None and node.target is aten._foreach_add_.Scalar:
            _count_made(graph, before, [copies[step] for step in node.all_input_nodes], found)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            if found is not None and node.target in _SKIPPING:
                kwargs = {**kwargs, "found_inf": found}
            with graph.inserting_before(before):
                sources: list[fx.Node] = []
                fx.map_arg(args, sources.append)
                # Only a step count is a tensor, copied to where an accelerator's kernel reads it.
                copies[node] = emit(graph, node.target, args, Origin("update"), like=sources[0], **kwargs)


# The fused operators that leave everything as it is where they are told of an overflow.
_SKIPPING = {
    overload
    for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
    for overload in overloads(packet)
}


def _count_made(graph: fx.Graph, before: fx.Node, steps: list[fx.Node], found: fx.Node) -> None:
    """Steps are counted by an operator before the fused one: only those that are made."""
    with graph.inserting_before(before):
        made = emit(graph, aten.rsub.Scalar, (found, 1), Origin("update"), like=found)
        for step in steps:
            value = step.meta["val"]
            kind = {"dtype": value.dtype, "device": value.device}
            count = emit(graph, aten._to_copy.default, (made,), Origin("update"), like=found, **kind)
            emit(graph, aten.add_.Tensor, (step, count), Origin("update"), like=step)
