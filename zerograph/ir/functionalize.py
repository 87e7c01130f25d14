"""Functionalize a traced graph: replace in-place operators by out-of-place ones."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten

# An out-of-place operator, and the fake value of its result.
OutOfPlace = tuple[_torch.OpOverload, Tensor]

# Operators whose result is their argument.
_RENAMES = (aten.detach.default, aten.alias.default)


def without_mutation(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without mutation, except for final ``copy_`` nodes that write to its inputs.

    If all writes are to whole tensors, nodes of the graph itself are replaced. A write through a view changes aliases:
    for such a graph torch functionalizes, with a second trace of all that may share memory with what is written.
    """
    out_of_place = {node: _out_of_place(node) for node in graph.graph.nodes if _torch.written_arguments(node)}
    if not out_of_place:
        return graph
    replaced = {node: form for node, form in out_of_place.items() if form is not None}
    tensor_of = _tensors(graph.graph, replaced)
    if len(replaced) < len(out_of_place) or _written_through_views(graph.graph, replaced, tensor_of):
        values = [node.meta["val"] for node in placeholders(graph.graph)]
        return _torch.functional_trace(graph, values, _sharing_memory(graph.graph, out_of_place))
    _replace_writes(graph.graph, replaced, tensor_of)
    return graph


def _out_of_place(node: fx.Node) -> OutOfPlace | None:
    """Return the out-of-place overload of this in-place operator with its result, or None."""
    assert isinstance(node.target, _torch.OpOverload)
    form = _torch.functional_overload(node.target)
    if form is None or _torch.written_arguments(node) != list(node.args[:1]):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with torch.no_grad():
        result = form(*args, **kwargs)
    # A tensor keeps its dtype and strides when it is written to.
    return (form, result) if _layout(result) == _layout(node.meta["val"]) else None


def _layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _tensors(graph: fx.Graph, writes: Mapping[fx.Node, OutOfPlace]) -> dict[fx.Node, fx.Node]:
    """Return, for each node whose value is the whole tensor of another node, the first node of that tensor."""
    tensor_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in writes or node.target in _RENAMES:
            source = node.args[0]
            tensor_of[node] = tensor_of.get(source, source)
    return tensor_of


def _written_through_views(
    graph: fx.Graph, writes: Mapping[fx.Node, OutOfPlace], tensor_of: Mapping[fx.Node, fx.Node]
) -> bool:
    """Return True if a written tensor is a view, or if a view of it is taken before the last write."""
    written = {tensor_of[node] for node in writes}
    if any(map(_may_have_aliases, written)):
        return True
    # A view that is taken after the last write is a view of the final value.
    remaining = Counter(tensor_of[node] for node in writes)
    for node in graph.nodes:
        if node in writes:
            remaining[tensor_of[node]] -= 1
        if node in tensor_of:
            continue
        # As declared by schemas: torch's functionalization does not treat unsafe_split() as a view either.
        if sources := _torch.viewed_arguments(node):
            # Several results are nodes of their own.
            views = {node, *node.users} if isinstance(node.meta["val"], (list, tuple)) else {node}
            if not written.isdisjoint(views) or any(remaining[tensor_of.get(source, source)] for source in sources):
                return True
    return False


def _may_have_aliases(node: fx.Node) -> bool:
    """Return True for constants, and for calls without a schema that declares aliases."""
    plain = isinstance(node.target, _torch.OpOverload) or node.target is operator.getitem
    return node.op == "get_attr" or (node.op == "call_function" and not plain)


def _sharing_memory(graph: fx.Graph, writing: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes to trace again: see :func:`zerograph._torch.functional_trace`."""
    families: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        families[node] = {node}
        aliased = [*_torch.viewed_arguments(node), *_torch.written_arguments(node)]
        for source in node.all_input_nodes:
            whole = source.op != "get_attr" and isinstance(source.meta["val"], Tensor)
            if (source in aliased or not whole or _may_have_aliases(node)) and node.op != "output":
                small, large = sorted((families[node], families[source]), key=len)
                if small is not large:
                    large |= small
                    families.update(dict.fromkeys(small, large))
    return set().union(*(families[node] for node in graph.nodes if node in writing or node.op == "get_attr"))


def _replace_writes(
    graph: fx.Graph, writes: Mapping[fx.Node, OutOfPlace], tensor_of: Mapping[fx.Node, fx.Node]
) -> None:
    """Replace writes by out-of-place operators, whose results later readers of the tensor read."""
    latest: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        node.args, node.kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: latest.get(tensor_of.get(source, source), source)
        )
        if node in writes:
            form, result = writes[node]
            with graph.inserting_before(node):
                value = graph.call_function(form, node.args, node.kwargs)
            value.meta.update(node.meta, val=result)
            latest[tensor_of[node]] = value
    with graph.inserting_before(graph.output_node()):
        for placeholder in placeholders(graph):
            if placeholder in latest:
                copy = graph.call_function(aten.copy_.default, (placeholder, latest[placeholder]))
                copy.meta["val"] = placeholder.meta["val"]
    for node in reversed(list(writes)):
        graph.erase_node(node)
