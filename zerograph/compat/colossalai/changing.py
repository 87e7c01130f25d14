"""Numbers that change from step to step, such as the weight of a loss: inputs of the step, no constants in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerograph.compat.colossalai.deferred import Deferred

_ARITHMETIC = ("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "subtract", "__rsub__", "rsub")


class Numbers:
    """Floats in the arithmetic of recorded calls, by where they stand: the first time one differs, it becomes a tensor.

    From then on it is an input: one more compile, then none.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], float] = {}
        self._changing: set[tuple[int, str]] = set()

    def lifted(self, place: int, function: Callable[..., Any], args: Any) -> Any:
        """The arguments of call number ``place`` of a tape, with a 0-d tensor instead of a float that changes."""
        name = getattr(function, "__name__", "")
        if name not in _ARITHMETIC or len(args) != 2:
            return args
        tensor, number = args
        # Narrower ones would round the number; the others count on with it as they would with a constant.
        wide = isinstance(tensor, Deferred) and tensor.dtype in (torch.float32, torch.float64)
        if not wide or not isinstance(number, float):
            return args
        key = place, name
        if self._seen.setdefault(key, number) != number:
            self._changing.add(key)
        if key not in self._changing:
            return args
        return tensor, torch.tensor(number, dtype=tensor.dtype, device=tensor.device)
