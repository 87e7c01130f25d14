"""Products of tokens with the weights of their experts."""

from __future__ import annotations

from zerograph.ops.dispatch import COMBINE, DISPATCH, GATHER_IDS
from zerograph.ops.experts import EXPERT_MM, EXPERT_MM_SUMMED, EXPERT_WEIGHT_GRADIENT
from zerograph.passes.rules.registry import Operands, rule


def _rows(operands: Operands) -> str:
    return {2: "t i", 3: "g t i", 4: "g t k! i"}[operands.inputs[0].dim()]


rule(EXPERT_MM, lambda operands: f"{_rows(operands)}, g e! i o, t k! -> g t k! o", linear=(0, 1))
rule(EXPERT_MM_SUMMED, "g t k! i, g e! i o, t k! -> t o", linear=(0, 1))
rule(EXPERT_WEIGHT_GRADIENT, lambda operands: f"{_rows(operands)}, g t k! o, t k! -> g e! i o", linear=(0, 1))
rule(DISPATCH, "t i, t k! -> g t i", linear=(0,))
rule(COMBINE, "g t i, t k! -> t i", linear=(0,))
rule(GATHER_IDS, "t k -> t k", linear=(0,))
