"""fuse: let an optimizer's own fused operators update a bucket, where its group asks for them.

Placement, and the proof that the update is elementwise, use the plain operators. This pass replaces them by the fused
ones, which read and write the state once.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph._torch import overloads
from zerograph.ir.metadata import Origin, meta
from zerograph.ir.rewrite import drop_unused, emit
from zerograph.ir.step_graph import found_infs, inputs_by_name, writes
from zerograph.passes.context import Context
from zerograph.passes.edits import on_device

aten = torch.ops.aten


def fuse(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Update buckets of optimizers with ``fused=True`` in place by the fused operators."""
    graph = module.graph
    inputs = inputs_by_name(graph, "bucket", "state", "hyperparameter")
    overflows = found_infs(graph)
    written = {state: write for write, state, _ in writes(graph)}
    increments: dict[fx.Node, fx.Node] = {}
    for gradient in list(graph.find_nodes(op="call_function", target=aten.alias.default)):
        name = meta(gradient).get("gradient_of")
        if name is None:
            continue
        update = context.updates[name]
        program = update.program
        assert program.fused is not None
        state = {entry: inputs[f"{name}.{entry}"] for entry in program.state}
        numbers = {short: inputs[name] for short, name in update.numbers.items()}
        operands = {"param": inputs[name], "grad": gradient.all_input_nodes[0], **numbers, **state}
        found_inf = update.found_inf_of(overflows)
        _emit_fused(graph, written[inputs[name]], program.fused, operands, found_inf, increments)
        for node in (inputs[name], *state.values()):
            if node in written:
                graph.erase_node(written[node])
    drop_unused(graph)
    return module


def _emit_fused(
    graph: fx.Graph,
    before: fx.Node,
    fused: fx.GraphModule,
    operands: dict[str, fx.Node],
    found_inf: fx.Node | None,
    increments: dict[fx.Node, fx.Node],
) -> None:
    """Emit the fused operators before ``before``; they write to ``operands`` unless ``found_inf`` is set."""
    if found_inf is not None:
        with graph.inserting_before(before):
            found_inf = on_device(found_inf, operands["param"].meta["val"].device, Origin("update"))
    copies: dict[fx.Node, fx.Node] = {}
    for node in fused.graph.nodes:
        if node.op == "placeholder":
            copies[node] = operands[meta(node)["update_input"]]
        elif found_inf is not None and node.target is aten._foreach_add_.Scalar:
            _count_steps(graph, before, [copies[step] for step in node.all_input_nodes], found_inf, increments)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            if found_inf is not None and node.target in FUSED_UPDATES:
                kwargs = {**kwargs, "found_inf": found_inf}
            with graph.inserting_before(before):
                sources: list[fx.Node] = []
                fx.map_arg(args, sources.append)
                # The only tensor result is a step count, copied to the device of the kernel.
                copies[node] = emit(graph, node.target, args, Origin("update"), like=sources[0], **kwargs)


# The fused operators, which take ``found_inf`` and skip the update if it is set.
FUSED_UPDATES = {
    overload
    for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
    for overload in overloads(packet)
}


def _count_steps(
    graph: fx.Graph, before: fx.Node, steps: list[fx.Node], found_inf: fx.Node, increments: dict[fx.Node, fx.Node]
) -> None:
    """Add 1 to the steps before the fused operator, unless the update is skipped.

    ``increments`` has what is added by its flag: on an accelerator its copy to the CPU waits for the device.
    """
    with graph.inserting_before(before):
        for step in steps:
            value = step.meta["val"]
            if found_inf not in increments:
                increment = emit(graph, aten.rsub.Scalar, (found_inf, 1), Origin("update"), like=found_inf)
                options = {"dtype": value.dtype, "device": value.device}
                increments[found_inf] = emit(
                    graph, aten._to_copy.default, (increment,), Origin("update"), like=found_inf, **options
                )
            emit(graph, aten.add_.Tensor, (step, increments[found_inf]), Origin("update"), like=step)
