"""Signatures: how an operator may be placed along one mesh dimension."""

from __future__ import annotations

from dataclasses import dataclass

from zerograph.ir.sbp import Sbp


@dataclass(frozen=True)
class Signature:
    """One legal assignment of an SBP, along one mesh dimension, to each tensor operand and each output."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
