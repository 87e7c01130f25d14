"""What is planned: a user's graph, or one made around a plain model; with a configuration to try out."""

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
    """The step of a model that computes its loss itself, or whose output ``loss`` turns into one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        if optimizer is not None:
            self.add_optimizer(optimizer([one for one in model.parameters() if one.requires_grad]))

    def build(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.model(*args, **kwargs)
        loss = found_loss(output) if self._loss is None else self._loss(output)
        if self._optimizers:
            loss.backward()
        return loss


def found_loss(output: Any) -> Tensor:
    """The loss in a model's output: itself, its ``loss``, or the first of several.

    Raises:
        ConfigError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if not isinstance(loss, Tensor) or loss.dim():
        raise ConfigError(
            f"the model returns {type(output).__name__}, and no loss in it: a 0-d tensor, or one as its `loss`\n"
            "Give plan(loss=...), which takes what the model returns, or a ZeroGraph with the whole step."
        )
    return loss


def graph_of(subject: Any, optimizer: Optimizer | None, loss: Loss | None) -> ZeroGraph:
    """The graph to plan: given, or made by a function without arguments, or around a model.

    A function is called with the meta device as default: what it makes takes no memory.

    Raises:
        ConfigError: nothing of this, or an optimizer or loss for a graph that has its own.
    """
    if not isinstance(subject, (nn.Module, ZeroGraph)):
        if not callable(subject):
            raise ConfigError(
                f"plan({type(subject).__name__}): give a module, a ZeroGraph, or a function that makes one"
            )
        with torch.device("meta"):
            subject = subject()
    if isinstance(subject, ZeroGraph):
        if optimizer is not None or loss is not None:
            raise ConfigError("a ZeroGraph has its optimizer and its loss: leave out plan(optimizer=, loss=)")
        return subject
    if isinstance(subject, nn.Module):
        return Training(subject, optimizer, loss)
    raise ConfigError(f"the function made {type(subject).__name__}: it must return a module or a ZeroGraph")
