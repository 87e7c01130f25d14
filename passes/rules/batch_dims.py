"""The dimensions of tensors that run over the batch, as the rules tell: those that a signature splits together."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure
from zerograph.ir.sbp import Signature, Split
from zerograph.passes.rules.registry import output_of, output_values, signatures_of, tensor_arguments

aten = torch.ops.aten

# The node, the number of its output, and the dimension.
TensorDim = tuple[fx.Node, int, int]


def signature_along(node: fx.Node, dims: Sequence[int | None], ranks: int, *, partly: bool = False) -> Signature | None:
    """Return the first signature that splits each tensor argument along its dimension, or None.

    Args:
        node: a node of an operator.
        dims: the dimension of each tensor argument; None: any.
        ranks: number of parts.
        partly: if there is none, return the one that splits most of the arguments so, and leaves others whole.
    """
    wanted = [(number, Split(dim)) for number, dim in enumerate(dims) if dim is not None]
    best, most = None, 0 if partly else len(wanted) - 1
    for signature in (wanted and signatures_of(node, ranks)) or ():
        pairs = [(signature.inputs[number], split) for number, split in wanted]
        matched = sum(sbp == split for sbp, split in pairs)
        if matched > most and all(sbp == split or not isinstance(sbp, Split) for sbp, split in pairs):
            best, most = signature, matched
    return best


def batch_dims(graph: fx.Graph, inputs: Sequence[fx.Node], ranks: int) -> set[TensorDim]:
    """Return the dimensions of all tensors that run over the batch.

    A signature that splits one factor lists the dimensions of an operator that run over the same index. If one of them
    is a batch dimension, all are.
    """
    groups: dict[TensorDim, list[list[TensorDim]]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not isinstance(node.target, OpOverload):
            continue
        if origin(node).phase != "forward" or not output_values(node):
            continue
        operands = list(map(output_of, tensor_arguments(node)))
        outputs = [(node, number) for number in range(len(output_values(node)))]
        same_index = []
        for signature in signatures_of(node, ranks) or ():
            sbps = zip((*operands, *outputs), (*signature.inputs, *signature.outputs), strict=True)
            same_index.append([(*tensor, sbp.dim) for tensor, sbp in sbps if isinstance(sbp, Split)])
        if node.target.overloadpacket in _LIKE_FIRST:
            same_index += [[(*operands[0], dim), (*outputs[0], dim)] for dim in range(meta(node)["val"].dim())]
        for group in same_index:
            for dim in group:
                groups.setdefault(dim, []).append(group)
    start = [(node, 0, 0) for node in inputs]
    return closure(start, lambda dim: (one for group in groups.get(dim, ()) for one in group if _may_be_batch(one[0])))


# Operators whose result has the dimensions of the first operand, although no signature splits one of them.
_LIKE_FIRST = {
    aten._log_softmax,
    aten._softmax,
    aten.cumsum,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.index_put,
    aten.logcumsumexp,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
}


def _may_be_batch(node: fx.Node) -> bool:
    """Return False for parameters and buffers, which have no batch dimension."""
    return node.op != "placeholder" or meta(node)["role"].kind == "input"
