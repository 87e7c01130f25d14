"""Cost of an operator on a rank, in bytes: what it moves, plus for matrix products what would take as long to move."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta, value
from zerograph.ir.sizes import largest
from zerograph.ops.attention import ACCELERATED, BACKWARD, FORWARD, POSITIONS
from zerograph.ops.flex_attention import flex_attention, scores_of
from zerograph.passes import rules

aten = torch.ops.aten

# Operations of products that a CPU core or a GPU computes while it moves a byte, within a factor of two or three: in
# fp32, and on the tensor cores of an accelerator. They are constants, since all ranks must choose alike.
_FLOPS_PER_BYTE, _TENSOR_CORE_FLOPS_PER_BYTE = 8, 256


def local_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Return the bytes of the node's tensor on a rank. The graph is placed, with global shapes."""
    tensor: Tensor = node.meta["val"]
    return math.prod(largest(local_shape(tensor.shape, meta(node)["sbp"], mesh))) * tensor.element_size()


def operator_work(node: fx.Node, mesh: Mesh) -> int:
    """Return the bytes that the operator reads and writes on a rank, more for products; at least 1."""
    outputs = rules.output_values(node)
    sbps = [meta(node)["sbp"]] if isinstance(node.meta["val"], Tensor) else list(meta(node)["sbp"])
    shapes = [largest(local_shape(output.shape, sbp, mesh)) for output, sbp in zip(outputs, sbps, strict=True)]
    written = sum(math.prod(shape) * output.element_size() for shape, output in zip(shapes, outputs, strict=True))
    read = sum(local_bytes(argument, mesh) for argument in rules.tensor_arguments(node))
    share = math.prod(shapes[0]) / max(math.prod(largest(outputs[0].shape)), 1) if shapes else 1
    balance = _balance(outputs[0]) if outputs else _FLOPS_PER_BYTE
    return 1 + written + read + round(flops(node) * share / balance)


def _balance(result: Tensor) -> int:
    """Return the operations that a product of this dtype and device computes while a byte is moved."""
    on_tensor_cores = result.device.type != "cpu" and result.dtype in (torch.float16, torch.bfloat16)
    return _TENSOR_CORE_FLOPS_PER_BYTE if on_tensor_cores else _FLOPS_PER_BYTE


def flops(node: fx.Node) -> int:
    """Return the floating-point operations of a node in the shapes of its graph; 0 if it is no product."""
    target: Any = node.target
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    if (scores := scores_of(node)) is not None:
        # Two products in forward; in backward these again, and two for each.
        return 2 * math.prod(scores[0]) * scores[1] * (1 if target is flex_attention else 3)
    # Two products in forward and five in backward. torch's formulas refuse heads of keys that several of queries share.
    if target is FORWARD or target in ACCELERATED:
        return 4 * math.prod(largest(args[0].shape)) * largest(args[1].shape)[POSITIONS]
    if target is BACKWARD or target in ACCELERATED.values():
        return 10 * math.prod(largest(args[1].shape)) * largest(args[2].shape)[POSITIONS]
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    return 0 if formula is None else largest((formula(*args, **kwargs, out_val=value(node)),))[0]
