"""Products of tokens with the weights of their experts."""

from __future__ import annotations

from zerograph.ir.experts import EXPERT_MM, EXPERT_MM_SUMMED, EXPERT_WEIGHT_GRADIENT
from zerograph.passes.rules.registry import Operands, rule


def _rows(operands: Operands) -> str:
    return "t i" if operands.inputs[0].dim() == 2 else "g t k! i"


rule(EXPERT_MM, lambda operands: f"{_rows(operands)}, g e! i o, t k! -> g t k! o", linear=(0, 1))
rule(EXPERT_MM_SUMMED, "g t k! i, g e! i o, t k! -> t o", linear=(0, 1))
rule(EXPERT_WEIGHT_GRADIENT, lambda operands: f"{_rows(operands)}, g t k! o, t k! -> g e! i o", linear=(0, 1))
