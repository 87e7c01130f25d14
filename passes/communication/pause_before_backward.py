"""pause_before_backward: let a loop compute with the results of forward before backward runs.

The gradients that backward starts from are results of the pause. The rest may never run: the loop may call no
backward. So forward writes its buffers before the pause, nothing else changes state there, and no collective is in
flight. Where backward reads such a buffer, or recomputes from it, it reads a copy of what forward has read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from zerograph.ir.alias import WAIT, readers, viewed
from zerograph.ir.metadata import meta, origin
from zerograph.ir.pause import GRADIENT_OF, PAUSE, pause_of
from zerograph.ir.rewrite import ancestors, emit, emit_like, first_computed, replace_node
from zerograph.ir.step_graph import output_nodes, writes
from zerograph.passes.context import Context
from zerograph.passes.edits import move_after


def pause_before_backward(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Pause as soon as the outputs are computed that the loop reads before backward."""
    if not context.batch.early_outputs:
        return module
    graph = module.graph
    values = output_nodes(graph)[: context.batch.early_outputs]
    gradients = graph.find_nodes(op="call_function", target=GRADIENT_OF)
    copies = _writes_of_forward(graph, gradients)
    wanted = [*values, *copies]
    needed = ancestors(wanted) | set(wanted)
    computed = sorted(node for node in needed if node.op != "placeholder")
    backward = [node for node in graph.nodes if node.op == "call_function" and origin(node).phase == "backward"]
    first = min((node for node in backward if node not in needed), default=graph.output_node())
    place = max(node for node in computed if node < first)
    # What follows in backward only makes an output of a value: a collective, for instance.
    place = move_after([node for node in computed if first < node], place)
    results, places = [node.args[0] for node in gradients], [node.args[1] for node in gradients]
    with graph.inserting_after(place):
        pause = emit(graph, PAUSE, (values, results, places), origin(place))
    _receive(graph, pause, gradients)
    for copy in copies:
        _keep_for_backward(copy.all_input_nodes[0], pause)
    states = [value for _, _, value in writes(graph) if value.op != "placeholder" and value < pause]
    move_after([one for one in states if one not in needed and all(user > pause for user in one.users)], pause)
    return module


def _writes_of_forward(graph: fx.Graph, gradients: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that write what forward has computed to buffers, which nothing reads afterwards."""
    return [
        copy
        for copy, target, _ in writes(graph)
        if meta(target)["role"].kind == "buffer"
        and ancestors([copy]).isdisjoint(gradients)
        and all(reader <= copy for reader in readers(target))
    ]


def _keep_for_backward(buffer: fx.Node, pause: fx.Node) -> None:
    """Let what follows the pause read a buffer, and views of it, as it was before forward wrote to it."""
    if any(pause < reader for reader in readers(buffer)):
        with buffer.graph.inserting_before(first_computed(buffer.graph)):
            kept = emit(buffer.graph, torch.ops.aten.clone.default, (buffer,), origin(pause), like=buffer)
        _read_after(pause, buffer, kept)


def _read_after(pause: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Let what follows the pause read a new value, and views of it, in place of an old one."""
    for user in list(old.users):
        if pause < user:
            user.replace_input_with(old, new)
        elif viewed(user) is old and any(pause < reader for reader in readers(user)):
            with old.graph.inserting_after(max(pause, new)):
                view = old.graph.node_copy(user, lambda one: new if one is old else one)
            _read_after(pause, user, view)


def _receive(graph: fx.Graph, pause: fx.Node, gradients: Sequence[fx.Node]) -> None:
    """Replace gradients that the loop computes by results of the pause."""
    for index, node in reversed([*enumerate(gradients)]):
        with graph.inserting_after(pause):
            value = emit_like(node, operator.getitem, pause, index)
        replace_node(node, value)


def start_after_pause(graph: fx.Graph) -> None:
    """Start collectives that are waited for after a pause after it too."""
    pause = pause_of(graph)
    if pause is None:
        return
    waits = [wait for wait in graph.find_nodes(op="call_function", target=WAIT) if pause < wait]
    starts = [start for wait in waits if (start := wait.all_input_nodes[0]) < pause]
    move_after(sorted(starts), pause)
