"""A pause in the step graph: the loop reads values there, and the step goes on when the loop asks for it.

The operator does nothing. A step that is to stop there runs as a generator, which yields the operator's arguments; see
:mod:`zerograph.runtime.paused`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

_library = torch.library.Library("zerograph", "FRAGMENT")
_library.define("pause(Tensor[] values) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
PAUSE = has_side_effect(torch.ops.zerograph.pause.default)


def _pause(values: Sequence[Tensor]) -> None:
    """Run a graph without a stop."""


_library.impl("pause", _pause, "CompositeExplicitAutograd")
torch.library.register_fake("zerograph::pause", _pause, lib=_library)


def pause_of(graph: fx.Graph) -> fx.Node | None:
    """Return the pause of a graph, or None."""
    return next(iter(graph.find_nodes(op="call_function", target=PAUSE)), None)
