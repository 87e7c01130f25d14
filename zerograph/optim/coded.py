"""Updates whose optimizer state is stored in eight bits."""

from __future__ import annotations

from dataclasses import replace

import torch

from zerograph.errors import CaptureError
from zerograph.ir.coded_state import SIGNED, UNSIGNED, never_negative, root_of_a_difference
from zerograph.ir.update_program import UpdateProgram
from zerograph.optim.program import line_of


def with_coded_state(program: UpdateProgram, parameter: str) -> UpdateProgram:
    """Return the update with its state stored in eight bits. It computes with decoded entries.

    Args:
        program: the update with exact state.
        parameter: name of a parameter that it updates, for messages.

    Raises:
        CaptureError: the update is not elementwise, its state is fp64, or rounded entries would make it NaN.
    """
    where = f"config.precision.optimizer_state = 'int8', but {program.optimizer}, which updates {parameter},"
    if program.mixes is not None:
        raise CaptureError(
            f"{where} is not elementwise: {program.mixes}\n"
            "Use an elementwise optimizer (SGD, Adam, AdamW, ...), or leave its state exact."
        )
    entries = {name: spec for name, spec in program.state.items() if not spec.scalar and spec.dtype.is_floating_point}
    wide = next((name for name, spec in entries.items() if spec.dtype is torch.float64), None)
    if wide is not None:
        raise CaptureError(f"{where} has {wide} of torch.float64\nConvert the parameter to torch.float32.")
    root = root_of_a_difference(program)
    if root is not None:
        raise CaptureError(
            f"{where} takes the root of a difference of its entries at {line_of(root)}: rounded to eight bits it "
            "can be negative\nLeave the state exact, or change this option of the optimizer."
        )
    unsigned = never_negative(program)
    state = {
        name: replace(spec, codec=UNSIGNED if name in unsigned else SIGNED) if name in entries else spec
        for name, spec in program.state.items()
    }
    return replace(program, key=f"{program.key}\nstate in eight bits", state=state)
