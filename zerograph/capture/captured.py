"""The result of tracing ``build()``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zerograph._torch import pytree
from zerograph.capture.state_changes import StateChanges
from zerograph.ir.region import Region


@dataclass
class Captured:
    """A traced ``build()``: its graph and how its flat outputs become what the user returned.

    ``graph`` takes the roles on its placeholders and returns the user's outputs, then one gradient for each
    name in ``gradients``; in-place changes of buffers stand at its end as ``copy_`` nodes. ``returned`` has one
    entry for each leaf of ``output_spec``: the class ``Tensor`` where a tensor goes, else the Python value itself.
    ``regions`` are what its nodes ``local`` stand for. ``state_changes`` is what it depends on in Python's state.
    """

    graph: fx.GraphModule
    output_spec: pytree.TreeSpec
    returned: tuple[Any, ...]
    gradients: tuple[str, ...]
    regions: tuple[Region, ...] = ()
    state_changes: StateChanges = field(default_factory=StateChanges)
