"""Find the names and shapes of an optimizer's state for a parameter, by tracing its own ``step()``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerograph.optim.sampling import Sample

Shape = tuple[int, ...]


class Entries:
    """The names and shapes of an optimizer's state after the first update. Equal updates are traced once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # None stands for the parameter's own shape.
        self._known: dict[Hashable, Mapping[str, Shape | None]] = {}

    def of(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Shape] | None:
        """Return the shapes of a parameter's state by name; None if the update cannot be traced.

        The error for that is raised when the step is compiled.
        """
        constants = tuple((key, repr(value)) for key, value in group.items() if key not in ("params", "lr"))
        kind = (constants, parameter.dtype, parameter.device)
        shapes = self._known.get(kind, self._known.get((*kind, parameter.shape)))
        if shapes is None:
            # In the state of a 0-d parameter, moments and the step count would have equal shapes.
            shape = parameter.shape or torch.Size((1,))
            sample = Sample(self._optimizer, group, shape, parameter.dtype, parameter.device)
            try:
                _, state = sample.trace(None)
            except Exception:
                # A user's class may raise anything. It raises again at compilation, with its line.
                return None
            shapes = {name: None if value.shape == shape else tuple(value.shape) for name, value in state.items()}
            self._known[(*kind, parameter.shape) if sample.asks_sizes else kind] = shapes
        return {name: tuple(parameter.shape) if shape is None else shape for name, shape in shapes.items()}
