"""Pointwise operators. The family has a rule by its tag; these are the ones that are linear, or have no tag."""

from __future__ import annotations

import torch

from zerograph.ir.pause import GRADIENT_OF
from zerograph.passes.rules.registry import Operands, pointwise, product_added, rule, together

aten = torch.ops.aten

# Linear in both operands together: a sum of partial sums is a partial sum.
rule(aten.add.Tensor, pointwise, linear=together(0, 1))
rule(aten.sub.Tensor, pointwise, linear=together(0, 1))
rule(aten.where.self, pointwise, linear=together(1, 2))
rule(aten.lerp.Scalar, pointwise, linear=together(0, 1))
rule(aten.masked_fill.Scalar, pointwise, linear=lambda operands: () if operands["value"] else (0,))
rule(aten.masked_fill.Tensor, pointwise, linear=lambda operands: (0,) if operands.zero[2] else ())

# Linear in each operand by itself.
rule(aten.mul.Tensor, pointwise, linear=(0, 1))
rule(aten.mul.Scalar, pointwise, linear=(0,))
rule(aten.div.Tensor, pointwise, linear=(0,))
rule(aten.div.Scalar, pointwise, linear=(0,))
rule(aten.neg.default, pointwise, linear=(0,))
rule(aten.gelu_backward.default, pointwise, linear=(0,))
rule(aten.silu_backward.default, pointwise, linear=(0,))
rule(aten.sigmoid_backward.default, pointwise, linear=(0,))
rule(aten.tanh_backward.default, pointwise, linear=(0,))
rule(aten.threshold_backward.default, pointwise, linear=(0,))
rule(aten.elu_backward.default, pointwise, linear=(0,))
rule(aten.hardshrink_backward.default, pointwise, linear=(0,))
rule(aten.hardsigmoid_backward.default, pointwise, linear=(0,))
rule(aten.hardswish_backward.default, pointwise, linear=(0,))
rule(aten.hardtanh_backward.default, pointwise, linear=(0,))
rule(aten.leaky_relu_backward.default, pointwise, linear=(0,))
rule(aten.logit_backward.default, pointwise, linear=(0,))
rule(aten.mish_backward.default, pointwise, linear=(0,))
rule(aten.rrelu_with_noise_backward.default, pointwise, linear=(0,))
rule(aten.softplus_backward.default, pointwise, linear=(0,))
rule(aten.softshrink_backward.default, pointwise, linear=(0,))
rule(aten._prelu_kernel_backward.default, pointwise, linear=(0,))
rule(aten.lerp.Tensor, pointwise, linear=together(0, 1))
rule(aten.addcmul.default, pointwise, linear=product_added)
rule(aten.addcdiv.default, pointwise, linear=together(0, 1))

# Pointwise, but without the tag; the first one has it from torch 2.12 on.
rule(aten.leaky_relu.default, pointwise)
rule(aten.hardswish.default, pointwise)
rule(aten._prelu_kernel.default, pointwise)
rule(aten.bucketize.Tensor, "..., s! -> ...")

# Copies, which have no tag.
rule(aten.clone.default, pointwise, linear=(0,))
rule(aten.detach.default, pointwise, linear=(0,))
rule(aten.alias.default, pointwise, linear=(0,))
rule(aten.lift_fresh_copy.default, pointwise, linear=(0,))
# Initial state of an optimizer: values are not read, and zeros add up to zeros.
rule(aten.zeros_like.default, pointwise, linear=(0,))
rule(aten.ones_like.default, pointwise)
# The gradient of a whole tensor is whole.
rule(GRADIENT_OF, pointwise)
rule(aten.full_like.default, pointwise)
rule(aten.fill.Scalar, pointwise)
rule(aten.fill.Tensor, "...,  -> ...", linear=(1,))
rule(aten.copy.default, "..., ... -> ...", linear=(1,))
rule(aten.copy_.default, "..., ... -> ...")
# Up to rounding.
rule(aten._to_copy.default, pointwise, linear=(0,))


def _log_sigmoid(operands: Operands) -> str:
    """Return the notation of log-sigmoid, whose second output is scratch memory that only the CPU kernel uses."""
    buffer = operands.outputs[1] if len(operands.outputs) == 2 else operands.inputs[2]
    used = "..." if buffer.shape == operands.inputs[0].shape else " ".join(f"b{i}!" for i in range(buffer.dim()))
    return f"... -> ..., {used}" if len(operands.outputs) == 2 else f"..., ..., {used} -> ..."


rule(aten.log_sigmoid_forward.default, _log_sigmoid)
rule(aten.log_sigmoid_backward.default, _log_sigmoid, linear=(0,))

# Complex numbers.
rule(aten._conj.default, pointwise, linear=(0,))
rule(aten._conj_physical.default, pointwise, linear=(0,))
rule(aten._neg_view.default, pointwise, linear=(0,))
rule(aten.view_as_real.default, "... -> ... parts!", linear=(0,))
rule(aten.view_as_complex.default, "... parts! -> ...", linear=(0,))
rule(aten.complex.default, pointwise, linear=together(0, 1))
rule(aten.polar.default, pointwise, linear=(0,))
