"""Options that several commands share: help texts and checks."""

from __future__ import annotations

from typing import Annotated

import typer

SCRIPT = (
    "SCRIPT:STEP, such as train.py:example: a ZeroGraph, or a function without arguments that returns (step, inputs)"
)
_INPUTS = "name of inputs in the script, if STEP is a ZeroGraph"
PRECISIONS = ("fp32", "bf16", "fp16")
PRECISION = "fp32, bf16 or fp16 (with fp32 masters), instead of the script's"
_SET = "an option of zg.Config instead of the script's, such as seed=1 or offload.optimizer=cpu; may be repeated"


def precision_checked(value: str | None) -> str | None:
    """Check a precision before anything is imported.

    ``"mixed"`` is another name of ``"bf16"``, and of the closed form's 16 bits.

    Raises:
        typer.BadParameter: there is no such precision.
    """
    if value not in (None, "mixed", *PRECISIONS):
        raise typer.BadParameter(f"{value}: choose {', '.join(PRECISIONS)}, or leave it out for the script's")
    return value


Inputs = Annotated[str | None, typer.Option(help=_INPUTS)]
Precision = Annotated[str | None, typer.Option(help=PRECISION, callback=precision_checked)]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help=_SET)]
