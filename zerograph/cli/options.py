"""Options that several commands share: help texts and checks."""

from __future__ import annotations

import typer

SCRIPT = (
    "SCRIPT:STEP, such as train.py:example: a ZeroGraph, or a function without arguments that returns (step, inputs)"
)
INPUTS = "name of inputs in the script, if STEP is a ZeroGraph"
PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION = "fp32, bf16 or fp16 (with fp32 masters), instead of the script's"


def precision_checked(value: str | None) -> str | None:
    """Check a precision before anything is imported.

    ``"mixed"`` is another name of ``"bf16"``, and of the closed form's 16 bits.

    Raises:
        typer.BadParameter: there is no such precision.
    """
    if value not in (None, "mixed", *PRECISIONS):
        raise typer.BadParameter(f"{value}: choose {', '.join(PRECISIONS)}, or leave it out for the script's")
    return value
