"""The result of tracing ``build()``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zerograph._torch import pytree
from zerograph.base.recording import Recording
from zerograph.capture.state_changes import StateChanges
from zerograph.ir.dims import SizeGuard
from zerograph.ir.region import Region
from zerograph.ir.sizes import Sizes


@dataclass
class Captured:
    """A traced ``build()``: its graph, and how the graph's flat outputs become what the user returned.

    Attributes:
        graph: its placeholders have roles. It returns the user's outputs, then one gradient for each name in
            ``gradients``. In-place changes of buffers are ``copy_`` nodes at its end.
        output_spec: structure of what ``build()`` returned.
        returned: one entry for each leaf of ``output_spec``: the class ``Tensor`` for a tensor, else the Python value.
        gradients: names of the parameters that have a gradient.
        regions: the local regions that the nodes ``local`` refer to.
        state_changes: what follows from the Python state that ``build()`` changed.
        guards: conditions on sizes that the trace relied on.
        sizes: the symbols of dynamic dimensions; None without any.
        recording: what the trace ran and read, if that was recorded.
    """

    graph: fx.GraphModule
    output_spec: pytree.TreeSpec
    returned: tuple[Any, ...]
    gradients: tuple[str, ...]
    regions: tuple[Region, ...] = ()
    state_changes: StateChanges = field(default_factory=StateChanges)
    guards: tuple[SizeGuard, ...] = ()
    sizes: Sizes | None = None
    recording: Recording | None = None
