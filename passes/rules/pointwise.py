"""Pointwise operators: the family has a rule by its tag; here stand those that let a partial sum pass."""

from __future__ import annotations

import torch

from zerograph.passes.rules.factors import Linear
from zerograph.passes.rules.registry import Operands, pointwise, rule, together

aten = torch.ops.aten

# Linear in both operands together: a sum of partial sums is a partial sum.
rule(aten.add.Tensor, pointwise, linear=together(0, 1))
rule(aten.sub.Tensor, pointwise, linear=together(0, 1))
rule(aten.where.self, pointwise, linear=together(1, 2))
rule(aten.lerp.Scalar, pointwise, linear=together(0, 1))
rule(aten.masked_fill.Scalar, pointwise, linear=lambda operands: () if operands["value"] else (0,))
rule(aten.masked_fill.Tensor, pointwise, linear=lambda operands: (0,) if operands.zero[2] else ())

# Linear in each operand for itself.
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

# Copies: tagged as nothing, but they touch each element alone.
rule(aten.clone.default, pointwise, linear=(0,))
rule(aten.detach.default, pointwise, linear=(0,))
rule(aten.alias.default, pointwise, linear=(0,))
rule(aten.lift_fresh_copy.default, pointwise, linear=(0,))
rule(aten.fill.Scalar, pointwise)
rule(aten.fill.Tensor, "...,  -> ...", linear=(1,))
rule(aten.copy.default, "..., ... -> ...", linear=(1,))
rule(aten.copy_.default, "..., ... -> ...")


def _linear_cast(operands: Operands) -> Linear:
    """A cast distributes over a sum, up to rounding; to an integer or bool it does not."""
    return (0,) if operands.outputs[0].is_floating_point() or operands.outputs[0].is_complex() else ()


rule(aten._to_copy.default, pointwise, linear=_linear_cast)
