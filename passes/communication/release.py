"""release: in backward, run a gathered weight's last reader before the gradient of that weight is computed.

Autograd computes the gradients of a product's two factors one after the other, in its own order. The activation's
gradient reads the weight, which can then be freed; the weight's gradient takes as much memory again. For the head of a
language model, whose gradient is computed while that of the logits is alive, this is the peak of the step.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import gathers_bucket, source_bucket
from zerograph.ops import blocks
from zerograph.passes.context import Context
from zerograph.passes.edits import move_after

aten = torch.ops.aten


def release(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Move a backward product that reads a gathered weight before the gradients that are computed in between."""
    for product in list(module.graph.nodes):
        if product.target not in _PRODUCTS or origin(product).phase != "backward":
            continue
        weights = [operand for operand in product.all_input_nodes if _is_gathered(operand)]
        others = [operand for operand in product.all_input_nodes if operand not in weights]
        # What is computed again for backward reads values of forward, and stays where backward needs it.
        ready = [other for other in others if other.op != "placeholder" and origin(other).phase == "backward"]
        if weights and ready and _computes_gradient(max(others), product):
            _move_product(max(others), product, weights)
    return module


_PRODUCTS = {aten.mm.default, aten.bmm.default}


def _is_gathered(node: fx.Node) -> bool:
    """Return whether the node is a view of a bucket that a collective gathered."""
    while is_view(node) or node.target is blocks.decode:
        node = node.all_input_nodes[0]
    if node.target is not WAIT:
        return False
    start = node.all_input_nodes[0]
    return gathers_bucket(start) or source_bucket(start.all_input_nodes[0]) is not None


def _computes_gradient(start: fx.Node, end: fx.Node) -> bool:
    node = start.next
    while node is not end:
        if any(isinstance(sbp, PartialSum) for sbp in meta(node).get("sbp", ())):
            return True
        node = node.next
    return False


def _move_product(place: fx.Node, product: fx.Node, weights: list[fx.Node]) -> None:
    """Move the product after ``place``, with the views and the gather that it reads, which need only the bucket."""
    late = [weight for weight in weights if place < weight]
    moving = closure(late, lambda node: (source for source in node.all_input_nodes if place < source))
    move_after([*sorted(moving), product], place)
