"""A pause in the step graph: the loop reads values there, and the step goes on when the loop asks for it.

A step that is to stop there runs as a generator, which yields the values and gets the gradients that backward starts
from. Without a stop the gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

_library = torch.library.Library("zerograph", "FRAGMENT")
_library.define(
    "pause(Tensor[] values, Tensor[] results, int[] places) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
PAUSE = has_side_effect(torch.ops.zerograph.pause.default)
# The gradient of a result, which the loop computes; ``place`` is the result's number among the outputs.
_library.define("gradient_of(Tensor result, int place) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
GRADIENT_OF = torch.ops.zerograph.gradient_of.default


def _pause(values: Sequence[Tensor], results: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Run a graph without a stop."""
    return [_gradient_of(result, place) for result, place in zip(results, places, strict=True)]


def _gradient_of(result: Tensor, place: int) -> Tensor:
    return torch.zeros(result.shape, dtype=result.dtype, device=result.device)


for _name, _function in (("pause", _pause), ("gradient_of", _gradient_of)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerograph::{_name}", _function, lib=_library)


def pause_of(graph: fx.Graph) -> fx.Node | None:
    """Return the pause of a graph, or None."""
    return next(iter(graph.find_nodes(op="call_function", target=PAUSE)), None)
