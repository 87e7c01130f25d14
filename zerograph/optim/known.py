"""Programs traced before: an optimizer of torch's own is the same program in every graph of the process."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerograph.ir.update_program import UpdateProgram


@dataclass
class Programs:
    """Update programs by what they were traced from.

    Attributes:
        traced: by optimizer, hyperparameters, dtype and device, with the shape where that counts.
        separate: those of which it is proved that they read no other parameter.
    """

    traced: dict[tuple[Hashable, ...], UpdateProgram] = field(default_factory=dict)
    separate: set[Hashable] = field(default_factory=set)


_OF_TORCH = Programs()


def programs_of(optimizer: torch.optim.Optimizer, own: Programs) -> tuple[Hashable, Programs]:
    """Return the optimizer's part of a key, and the dictionary of its programs.

    An optimizer of torch's own, or of OneFlow's names, computes with its groups alone; one of a user's class may hold
    anything, so what was traced of it is good for this instance, in the graph that keeps ``own``.
    """
    kind: Any = type(optimizer)
    if kind.__module__.startswith(("torch.optim.", "zerograph.compat.oneflow.optim.")):
        return kind, _OF_TORCH
    return id(optimizer), own
