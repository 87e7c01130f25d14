"""A traced graph without mutation: what operators write in place becomes a value of its own."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten

# An operator that returns what another one writes, and what it returns.
Form = tuple[_torch.OpOverload, Tensor]

# Operators whose result is their argument under a further name.
_RENAMES = (aten.detach.default, aten.alias.default)


def without_mutation(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without mutation, but for final ``copy_`` nodes that write to its inputs what they hold at the end.

    Where only whole tensors are written, nodes are exchanged, in the graph itself. A write through a view changes what
    others see in the same memory: torch's own functionalization follows that, by a second trace as long as the first.
    """
    forms = {node: _form(node) for node in graph.graph.nodes if _torch.written_arguments(node)}
    if not forms:
        return graph
    exchanged = {node: form for node, form in forms.items() if form is not None}
    tensor_of = _tensors(graph.graph, exchanged)
    if len(exchanged) < len(forms) or _written_through_views(graph.graph, exchanged, tensor_of):
        return _torch.functional_trace(graph, [node.meta["val"] for node in placeholders(graph.graph)])
    _exchange(graph.graph, exchanged, tensor_of)
    return graph


def _form(node: fx.Node) -> Form | None:
    """What computes what the operator writes to its first argument and returns; None where nothing fits."""
    assert isinstance(node.target, _torch.OpOverload)
    form = _torch.functional_overload(node.target)
    if form is None or _torch.written_arguments(node) != list(node.args[:1]):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    with torch.no_grad():
        made = form(*args, **kwargs)
    # What is written keeps its dtype and its strides, whatever is written to it.
    return (form, made) if _layout(made) == _layout(node.meta["val"]) else None


def _layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _tensors(graph: fx.Graph, writes: Mapping[fx.Node, Form]) -> dict[fx.Node, fx.Node]:
    """By node whose value is another's whole tensor, written since or not: the first node that has it."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in writes or node.target in _RENAMES:
            given = node.args[0]
            found[node] = found.get(given, given)
    return found


def _written_through_views(
    graph: fx.Graph, writes: Mapping[fx.Node, Form], tensor_of: Mapping[fx.Node, fx.Node]
) -> bool:
    """Whether what is written is a part of another tensor, or has had a part taken before."""
    written = {tensor_of[node] for node in writes}
    if any(map(_may_be_seen, written)):
        return True
    # A part that is taken behind the last write is one of the value.
    to_come = Counter(tensor_of[node] for node in writes)
    for node in graph.nodes:
        if node in writes:
            to_come[tensor_of[node]] -= 1
        if node in tensor_of:
            continue
        if viewed := _torch.viewed_arguments(node):
            # Of several parts each is a node of its own.
            parts = {node, *node.users} if isinstance(node.meta["val"], (list, tuple)) else {node}
            if not written.isdisjoint(parts) or any(to_come[tensor_of.get(one, one)] for one in viewed):
                return True
    return False


def _may_be_seen(node: fx.Node) -> bool:
    """Whether others may see the memory of what the node yields: constants, and what says nothing of its results."""
    plain = isinstance(node.target, _torch.OpOverload) or node.target is operator.getitem
    return node.op == "get_attr" or (node.op == "call_function" and not plain)


def _exchange(graph: fx.Graph, writes: Mapping[fx.Node, Form], tensor_of: Mapping[fx.Node, fx.Node]) -> None:
    """Replace writes by values; later readers of the tensor read the value."""
    now: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        node.args, node.kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda given: now.get(tensor_of.get(given, given), given)
        )
        if node in writes:
            form, made = writes[node]
            with graph.inserting_before(node):
                value = graph.call_function(form, node.args, node.kwargs)
            value.meta.update(node.meta, val=made)
            now[tensor_of[node]] = value
    with graph.inserting_before(graph.output_node()):
        for given in placeholders(graph):
            if given in now:
                graph.call_function(aten.copy_.default, (given, now[given])).meta["val"] = given.meta["val"]
    for node in reversed(list(writes)):
        graph.erase_node(node)
