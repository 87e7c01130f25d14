"""Options that several commands have: their texts, and how their values are checked."""

from __future__ import annotations

import typer

SCRIPT = "SCRIPT:STEP, as train.py:example: a ZeroGraph, or a function without arguments that returns (step, inputs)"
INPUTS = "inputs in the script, where STEP is a ZeroGraph"
PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION = "fp32, bf16 or fp16 (with fp32 masters), instead of the script's"


def precision_checked(value: str | None) -> str | None:
    """Refuse a precision that there is not, before anything is imported.

    ``"mixed"`` is another name of ``"bf16"``, and of the closed form's 16 bits.
    """
    if value not in (None, "mixed", *PRECISIONS):
        raise typer.BadParameter(f"{value}: choose {', '.join(PRECISIONS)}, or leave it out for the script's")
    return value
