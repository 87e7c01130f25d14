"""The boxing node, which changes the SBP of a global tensor."""

from __future__ import annotations

from torch import Tensor, fx

from zerograph.ir.metadata import Origin, TensorRef, meta
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, show


def boxing(x: Tensor, sbp: str) -> Tensor:
    """Return the same global tensor under another SBP. ``localize`` replaces the node by a collective or a slice."""
    return x.view_as(x)


def emit_boxing(graph: fx.Graph, source: fx.Node, target: NdSbp, tensor: TensorRef, new_origin: Origin) -> fx.Node:
    """Emit a boxing node of a tensor that is to have this SBP, before placement."""
    node = emit(graph, boxing, (source, show(target)), new_origin)
    meta(node).update({"target_sbp": target, "tensor": tensor})
    return node
