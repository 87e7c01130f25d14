"""reuse_temporaries: let an operator overwrite its operand if that is a temporary without other readers.

Only where nodes run one by one: a compiler assigns memory itself, and fuses better what it may read twice.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable
from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import in_place_of, occurrences
from zerograph.passes.context import Context

aten = torch.ops.aten


def reuse_temporaries(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Overwrite a temporary by its only reader, if the backend runs node by node."""
    if context.backend.node_by_node:
        temporaries: set[fx.Node] = set()
        for node in module.graph.nodes:
            _write_over_operand(node, temporaries)
            if _is_temporary(node, temporaries):
                temporaries.add(node)
    return module


def _write_over_operand(node: fx.Node, temporaries: Collection[fx.Node]) -> None:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or set(source.users) != {node} or occurrences(node, source) > 1:
        return
    value, old = node.meta["val"], source.meta["val"]
    if not isinstance(value, Tensor) or not isinstance(old, Tensor) or _kind(value) != _kind(old):
        return
    if source not in temporaries:
        return
    form = _SCATTERS.get(node.target) or in_place_of(node, source)
    if form is not None:
        node.target = form
    elif node.target in _BACKWARD and value.device.type == "cpu" and value.is_contiguous():
        node.target, name = _BACKWARD[node.target]
        node.kwargs = {**node.kwargs, name: source}
        meta(node).pop("signature", None)  # it is that of the operator without the additional operand


def _kind(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype


def _is_temporary(node: fx.Node, temporaries: Collection[fx.Node]) -> bool:
    """Return whether the node's value is in memory that the graph allocated, with one reader at a time."""
    if node.target in _FRESH:
        return True
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.target.is_view or is_mutable(node.target):
        source = node.args[0]
        return isinstance(source, fx.Node) and set(source.users) == {node} and source in temporaries
    return torch.Tag.pointwise in node.target.tags


# Operators that allocate memory for their result alone; pointwise operators do, too.
_FRESH = {aten.full.default, aten.zeros.default, aten.empty.memory_format, aten.mm.default, aten.bmm.default}

_SCATTERS: dict[Any, OpOverload] = {aten.scatter.src: aten.scatter_.src, aten.scatter.value: aten.scatter_.value}

# Kernels that read an element, or a row, of the gradient before they write it, so they may overwrite it. A step of a
# language model then holds one copy less of its largest tensor, the logits. Those of softmax take the memory for
# contiguous, whatever its strides are.
_BACKWARD: dict[Any, tuple[OpOverload, str]] = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
}
