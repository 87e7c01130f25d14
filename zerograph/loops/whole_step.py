"""A step of a loop as one graph, to plan it or to look at it before anything runs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerograph.errors import ConfigError
from zerograph.loops.containers import found_in
from zerograph.loops.loop_graph import LoopGraph
from zerograph.loops.prepare import loop_of
from zerograph.passes.context import GradientUse


class WholeStep(LoopGraph):
    """A training step that calls a prepared module once: the call, its backward, and the update.

    The loop's own lines are not known. The loss is that of the module, else the mean square of its results.

    Args:
        module: a prepared module.

    Raises:
        ConfigError: the module is not prepared.
    """

    gradients: ClassVar[GradientUse] = "update"

    def __init__(self, module: nn.Module) -> None:
        loop = loop_of(module)
        if loop is None:
            raise ConfigError(f"a {type(module).__name__} that zg.prepare() has not prepared has no step")
        super().__init__(loop.members, loop.optimizers, loop.config)
        self._name = next(name for name, one in loop.modules.items() if one is module)

    def build(self, *args: Any) -> Tensor:
        """Call the module; run backward from its losses."""
        results = [one for one in found_in(getattr(self, self._name)(*args), Tensor) if one.requires_grad]
        losses = [one for one in results if not one.dim()] or [one.square().mean() for one in results]
        if not losses:
            raise ConfigError(f"no result of {self._name} has a gradient: prepare it with its optimizer")
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss
