"""What an optimizer holds for a parameter behind its first update: names and shapes, asked of its own ``step()``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerograph.optim.sampling import Sample

Shape = tuple[int, ...]


class Entries:
    """The state that an optimizer's update needs; what is alike is traced once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # None stands for the parameter's own shape.
        self._known: dict[Hashable, Mapping[str, Shape | None]] = {}

    def of(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Shape] | None:
        """Shapes of the entries by name; None if the update is no graph, which is said when the step is compiled."""
        constants = tuple((key, repr(value)) for key, value in group.items() if key not in ("params", "lr"))
        kind = (constants, parameter.dtype, parameter.device)
        found = self._known.get(kind, self._known.get((*kind, parameter.shape)))
        if found is None:
            # In a 0-d parameter's state nobody could tell its moments from the step count.
            shape = parameter.shape or torch.Size((1,))
            sample = Sample(self._optimizer, group, shape, parameter.dtype, parameter.device)
            try:
                _, state = sample.trace(None)
            except Exception:
                # Whatever a class of the user's raises here, it raises again where its line is told.
                return None
            found = {name: None if value.shape == shape else tuple(value.shape) for name, value in state.items()}
            self._known[(*kind, parameter.shape) if sample.asks_sizes else kind] = found
        return {name: tuple(parameter.shape) if shape is None else shape for name, shape in found.items()}
