"""Clean a traced graph: remove what the trace leaves besides the computation of the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zerograph.capture.random_operators import refuse_others
from zerograph.errors import CaptureError
from zerograph.ir.alias import base_of
from zerograph.ir.gradient_edits import has_shape, is_edit, join_mixed_overflows, mark_edits
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import operand, replace_node
from zerograph.ir.step_graph import placeholders, writes

aten = torch.ops.aten


def strip_profiling(graph: fx.Graph) -> None:
    """Erase the operators with which ``zero_grad()`` times itself for torch's profiler."""
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def clean(graph: fx.Graph, trained: Mapping[str, Collection[str]]) -> None:
    """Clean a functional graph with roles and origins.

    Args:
        graph: the graph.
        trained: the names of each optimizer's parameters, by the optimizer's name in the graph.

    Raises:
        CaptureError: it draws random numbers that no graph can repeat, or changes a parameter in place.
    """
    refuse_others(graph)
    _settle_writes(graph)
    _strip_detaches(graph)
    mark_edits(graph)
    join_mixed_overflows(graph, trained)
    _cancel_views(graph)
    _strip_copies(graph)
    _drop_unused_seed(graph)
    _clone_state_outputs(graph)
    graph.eliminate_dead_code()


def _settle_writes(graph: fx.Graph) -> None:
    """Erase writes to gradients, whose new values the update reads, and those that restore a parameter after a change.

    Raises:
        CaptureError: a write changes a parameter.
    """
    for write, target, value in list(writes(graph)):
        kind = meta(target)["role"].kind
        if kind == "gradient":
            graph.erase_node(write)
        elif kind == "parameter" and _has_value_of(value, target):
            replace_node(write, target)
        elif kind == "parameter":
            raise CaptureError(
                f"build() changes the {meta(target)['role']} in place\n"
                "Parameters change through optimizers only. To compute at other values for a while, keep "
                "old = p.detach().clone() and write it back with p.copy_(old) (p.sub_() rounds), or use "
                "torch.func.functional_call; else make it a buffer, or change it outside build()."
            )


def _has_value_of(value: fx.Node, target: fx.Node) -> bool:
    """Return whether a node has the value of another one, through copies and views that keep shape and dtype."""
    while value.op == "call_function" and value.target in _SAME_VALUE:
        source = value.args[_SAME_VALUE[value.target]]
        if not isinstance(source, fx.Node):
            break
        before, after = source.meta["val"], value.meta["val"]
        if before.shape != after.shape or before.dtype != after.dtype:
            break
        value = source
    return value is target


# Operators whose result has the values of one of their arguments, and the position of that argument.
_SAME_VALUE: dict[Any, int] = {
    aten.copy.default: 1,
    aten.clone.default: 0,
    aten.detach.default: 0,
    aten.alias.default: 0,
    aten.view.default: 0,
}


def _strip_detaches(graph: fx.Graph) -> None:
    """Replace detached tensors by the tensors: the graph already contains backward."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        source = node.all_input_nodes[0]
        if source.op == "call_function":
            replace_node(node, source)


def _strip_copies(graph: fx.Graph) -> None:
    """Replace a tensor that is allocated empty and then filled by the tensor that it is filled with."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        empty, source = operand(node), operand(node, 1)
        if empty.target not in _EMPTY:
            continue
        new, old = node.meta["val"], source.meta["val"]
        if (new.shape, new.dtype, new.device, new.stride()) == (old.shape, old.dtype, old.device, old.stride()):
            replace_node(node, source)


_EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


def _drop_unused_seed(graph: fx.Graph) -> None:
    """Erase the seed of a graph that draws nothing."""
    for node in placeholders(graph, "seed"):
        if not node.users:
            graph.erase_node(node)


def _cancel_views(graph: fx.Graph) -> None:
    """Erase chains of views that lead back to the tensor: in-place edits of gradient views leave many of them."""
    for node in list(graph.nodes):
        if not is_edit(node) or node.target not in _VIEWS:
            continue
        chain, source = [node], node.all_input_nodes[0]
        while True:
            if has_shape(source, node.meta["val"].shape) and _is_identity(source, chain):
                node.replace_all_uses_with(source)
                break
            if source.target not in _VIEWS:
                break
            chain.append(source)
            source = source.all_input_nodes[0]
    for node in reversed(list(graph.nodes)):
        if not node.users and is_edit(node) and node.target in _VIEWS:
            graph.erase_node(node)


_VIEWS: set[Any] = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}


def _is_identity(source: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Return whether the views, last first, give a contiguous ``source`` its own shape and strides again."""
    whole = torch.empty(source.meta["val"].shape, device="meta")
    result = whole
    for view in reversed(chain):
        try:
            result = view.target(result, *view.args[1:], **view.kwargs)  # type: ignore[operator]
        except RuntimeError:
            return False
    return result.shape == whole.shape and result.stride() == whole.stride()


def _clone_state_outputs(graph: fx.Graph) -> None:
    """Clone outputs that are views of a weight or buffer, which the step overwrites."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        base = base_of(node)
        # Nothing overwrites an input gradient before it is read.
        if base.op == "placeholder" and meta(base)["role"].kind != "gradient":
            with graph.inserting_before(output):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta.update({"val": node.meta["val"], "origin": origin(node)})
            output.replace_input_with(node, clone)
