"""Cache update programs: torch's own optimizers are traced once per process."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerograph.ir.update_program import UpdateProgram


@dataclass
class Programs:
    """A cache of update programs.

    Attributes:
        traced: programs by optimizer, hyperparameters, dtype and device, and by shape if it matters.
        separate: keys of programs that were proved to read no other parameter.
    """

    traced: dict[tuple[Hashable, ...], UpdateProgram] = field(default_factory=dict)
    separate: set[Hashable] = field(default_factory=set)


_OF_TORCH = Programs()


def programs_of(optimizer: torch.optim.Optimizer, own: Programs) -> tuple[Hashable, Programs]:
    """Return the optimizer's part of a key, and the cache of its programs.

    Optimizers of torch and of ``flow.optim`` compute with their groups alone, so all instances share a cache. A user's
    class may store anything, so its programs are only for this instance, in the graph's cache ``own``.
    """
    kind: Any = type(optimizer)
    if kind.__module__.startswith(("torch.optim.", "zerograph.compat.oneflow.optim.")):
        return kind, _OF_TORCH
    return id(optimizer), own
