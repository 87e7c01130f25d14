"""Random numbers: each is that of its place in the global tensor, so any dimension may be split."""

from __future__ import annotations

from zerograph.ir.random import uniform
from zerograph.passes.rules.registry import Operands, letters, rule


def _drawn(operands: Operands) -> str:
    return "-> " + " ".join(letters(operands.outputs[0].dim()))


rule(uniform, _drawn)
