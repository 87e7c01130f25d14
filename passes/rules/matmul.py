"""Matrix products and convolutions."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", linear=(0, 1))
rule(aten.bmm.default, "b m k, b k n -> b m n", linear=(0, 1))
rule(aten.mv.default, "m k, k -> m", linear=(0, 1))


# With an added bias, splitting k would add the bias once per rank: k stays whole.
def _addmm(operands: Operands) -> str:
    bias = {0: "", 1: "n", 2: "m n"}[operands.inputs[0].dim()]
    return f"{bias or '...'}, m k!, k! n -> m n"


def _baddbmm(operands: Operands) -> str:
    bias = {0: "...", 1: "n", 2: "m n", 3: "b m n"}[operands.inputs[0].dim()]
    return f"{bias}, b m k!, b k! n -> b m n"


rule(aten.addmm.default, _addmm, linear=((0, 1), (0, 2)))
rule(aten.baddbmm.default, _baddbmm, linear=((0, 1), (0, 2)))


def _convolution(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    weight = "".join(f" k{i}!" for i in range(operands.inputs[0].dim() - 2))
    result = "".join(f" o{i}!" for i in range(operands.inputs[0].dim() - 2))
    bias = ", co!" if len(operands.inputs) == 3 else ""
    return f"n ci!{window}, a! b!{weight}{bias} -> n co!{result}"


def _convolution_backward(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[1].dim() - 2))
    weight = "".join(f" k{i}!" for i in range(operands.inputs[1].dim() - 2))
    result = "".join(f" o{i}!" for i in range(operands.inputs[1].dim() - 2))
    asked = operands["output_mask"]
    outputs = [f"n ci!{window}", f"a! b!{weight}", "co!"]
    return f"n co!{result}, n ci!{window}, a! b!{weight} -> " + ", ".join(
        text for text, wanted in zip(outputs, asked, strict=True) if wanted
    )


rule(aten.convolution.default, _convolution)
rule(aten.convolution_backward.default, _convolution_backward, linear=(0,))
