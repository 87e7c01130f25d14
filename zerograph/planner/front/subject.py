"""The graph to plan: a user's graph, or one around a plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph

Optimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[..., Tensor]


class Training(ZeroGraph):
    """The training step of a model that returns its loss, or whose output ``loss`` turns into one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, loss: Loss | None) -> None:
        super().__init__()
        self.config.enable_zero()
        self.model = model
        self._loss = loss
        if optimizer is not None:
            self.add_optimizer(optimizer([parameter for parameter in model.parameters() if parameter.requires_grad]))

    def build(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss, and its gradients if there is an optimizer."""
        output = self.model(*args, **kwargs)
        loss = loss_of(output) if self._loss is None else self._loss(output)
        if self._optimizers:
            loss.backward()
        return loss


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output: the output itself, its ``loss``, or the first of several.

    Raises:
        ConfigError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if not isinstance(loss, Tensor) or loss.dim():
        raise ConfigError(
            f"the model returns {type(output).__name__} without a loss: a 0-d tensor, or one as its `loss`\n"
            "Give plan(loss=...), a function of the model's output, or a ZeroGraph with the whole step."
        )
    return loss


def graph_of(subject: Any, optimizer: Optimizer | None, loss: Loss | None) -> ZeroGraph:
    """Return the graph to plan: a graph, the result of a function without arguments, or a graph around a model.

    A function is called with the meta device as default, so that its tensors take no memory.

    Raises:
        ConfigError: the subject is none of these, or an optimizer or loss is passed for a graph that has its own.
    """
    if not isinstance(subject, (nn.Module, ZeroGraph)):
        if not callable(subject):
            raise ConfigError(
                f"plan({type(subject).__name__}): give a module, a ZeroGraph, or a function that returns one"
            )
        with torch.device("meta"):
            subject = subject()
    if isinstance(subject, ZeroGraph):
        if optimizer is not None or loss is not None:
            raise ConfigError("a ZeroGraph has its optimizer and its loss: leave out plan(optimizer=, loss=)")
        return subject
    if isinstance(subject, nn.Module):
        return Training(subject, optimizer, loss)
    raise ConfigError(f"the function returned {type(subject).__name__}: it must return a module or a ZeroGraph")
