"""What it costs a rank to run an operator: bytes that it moves, and its products as the bytes that take as long."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta, value
from zerograph.passes import rules

aten = torch.ops.aten

# Of a core as of a GPU: what they compute in fp32 while they move a byte, within a factor of two or three. Only the
# order of operators matters, and of those any that multiplies matrices is far behind those that do not.
_FLOPS_PER_BYTE = 16


def local_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Size of the node's tensor on a rank; the graph is placed, its shapes global."""
    found: Tensor = node.meta["val"]
    return math.prod(local_shape(found.shape, meta(node)["sbp"], mesh)) * found.element_size()


def work(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that the operator reads and writes on a rank, and more for products; at least 1."""
    outputs = rules.output_values(node)
    sbps = [meta(node)["sbp"]] if isinstance(node.meta["val"], Tensor) else list(meta(node)["sbp"])
    made = [local_shape(one.shape, sbp, mesh) for one, sbp in zip(outputs, sbps, strict=True)]
    written = sum(math.prod(shape) * one.element_size() for shape, one in zip(made, outputs, strict=True))
    read = sum(local_bytes(given, mesh) for given in rules.tensor_arguments(node))
    share = math.prod(made[0]) / max(outputs[0].numel(), 1) if made else 1
    return 1 + written + read + round(flops(node) * share / _FLOPS_PER_BYTE)


def flops(node: fx.Node) -> int:
    """Floating-point operations, in the shapes that the graph has; 0 for what is no product."""
    target: Any = node.target
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    if target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(*(one.shape for one in args[:3])))
    if target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(*(one.shape for one in args[:4])))
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=value(node)))
