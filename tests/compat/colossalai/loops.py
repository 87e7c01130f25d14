"""The loop of a ColossalAI script, and the same loop in plain PyTorch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Batch, TokenLoss, part
from zerograph.compat import colossalai
from zerograph.integrations.eager import whole

PLAIN: dict[str, Any] = {"zero": {"level": 2}, "fp16": False}


def engine_of(model: nn.Module, criterion: Any = None, lr: float = 0.1, **config: Any) -> colossalai.Engine:
    """An engine of ZeRO level 2 in fp32, with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    engine, *_ = colossalai.initialize(
        model, optimizer, TokenLoss() if criterion is None else criterion, config=PLAIN | config, verbose=False
    )
    engine.train()
    return engine


def train(engine: colossalai.Engine, data: list[Batch], look: Callable[[Tensor], Any] = Tensor.item) -> list[Any]:
    """``look`` at each loss after its step."""
    losses = []
    for x, y in data:
        engine.zero_grad()
        loss = engine.criterion(engine(part(x)), part(y))
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return [look(loss) for loss in losses]


def gradients_of(engine: colossalai.Engine) -> list[Tensor]:
    """The whole gradients, without the loss scale."""
    scaler = engine.graph.config.scaler
    scale = 1.0 if scaler is None else scaler.get_scale()
    return [whole(parameter.grad).clone() / scale for parameter in engine.model.parameters()]


def train_plainly(model: nn.Module, data: list[Batch], calls: int = 1, lr: float = 0.1) -> list[float]:
    """Run the same loop on whole batches, ``calls`` of them to an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(data):
        loss = TokenLoss()(model(x), y)
        (loss / calls).backward()
        if (number + 1) % calls == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
