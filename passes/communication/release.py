"""release: in backward, what reads a gathered weight for the last time comes before that weight's gradient is made.

Autograd makes the gradients of a product's two factors one after the other, in an order of its own. That of the
activation reads the weight, which may then be freed; that of the weight takes as much memory again. For a language
model's head, whose gradient is made while the logits' is alive, this is the peak of the step.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, move_after
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import source_bucket
from zerograph.passes.context import Context

aten = torch.ops.aten


def release(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No gradient of a weight is made between a backward's product with a gathered weight and what that reads."""
    for product in list(module.graph.nodes):
        if product.target not in _PRODUCTS or origin(product).phase != "backward":
            continue
        weights = [operand for operand in product.all_input_nodes if _is_gathered(operand)]
        others = [operand for operand in product.all_input_nodes if operand not in weights]
        if weights and others and _makes_gradient(max(others), product):
            _move_after(max(others), product, weights)
    return module


_PRODUCTS = {aten.mm.default, aten.bmm.default}


def _is_gathered(node: fx.Node) -> bool:
    """Whether it is a view of a bucket that a collective gathered."""
    while is_view(node):
        node = node.all_input_nodes[0]
    if node.target is not WAIT:
        return False
    return source_bucket(node.all_input_nodes[0].all_input_nodes[0]) is not None


def _makes_gradient(start: fx.Node, end: fx.Node) -> bool:
    node = start.next
    while node is not end:
        if any(isinstance(one, PartialSum) for one in meta(node).get("sbp", ())):
            return True
        node = node.next
    return False


def _move_after(place: fx.Node, product: fx.Node, weights: list[fx.Node]) -> None:
    """Move the product after ``place``, with the views and the gather that it reads: they need only the bucket."""
    late = [weight for weight in weights if place < weight]
    moving = closure(late, lambda node: (source for source in node.all_input_nodes if place < source))
    move_after([*sorted(moving), product], place)
