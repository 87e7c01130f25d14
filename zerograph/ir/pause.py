"""A pause in the step graph: the loop reads values there, and the step goes on when the loop asks for it.

A step that is to stop there runs as a generator, which yields the values and gets the gradients that backward starts
from. Without a stop the gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from zerograph.ops.definition import define


def _pause(values: Sequence[Tensor], results: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Run a graph without a stop."""
    return [_gradient_of(result, place) for result, place in zip(results, places, strict=True)]


def _gradient_of(result: Tensor, place: int) -> Tensor:
    return torch.zeros(result.shape, dtype=result.dtype, device=result.device)


PAUSE = has_side_effect(
    define("pause", "(Tensor[] values, Tensor[] results, int[] places) -> Tensor[]", _pause, _pause)
)
# The gradient of a result, which the loop computes; ``place`` is the result's number among the outputs.
GRADIENT_OF = define("gradient_of", "(Tensor result, int place) -> Tensor", _gradient_of, _gradient_of)


def pause_of(graph: fx.Graph) -> fx.Node | None:
    """Return the pause of a graph, or None."""
    return next(iter(graph.find_nodes(op="call_function", target=PAUSE)), None)
