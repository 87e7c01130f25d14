"""Shared parts of all contenders: the optimizer, the loop around it, and the interface for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True}


def _none() -> int:
    return 0


@dataclass(frozen=True)
class Trainer:
    """A contender at work.

    Attributes:
        step: one whole training step on this rank's part of the batch; returns a loss whose mean over ranks is
            that of the whole batch.
        hidden_bytes: bytes of tensors that it keeps between steps where Python cannot see them.
        read_bytes: what it has read so far out of another rank's memory.
        listed_bytes: what it says that a step sends to other hosts.
    """

    step: Step
    hidden_bytes: Callable[[], int] = _none
    read_bytes: Callable[[], int] = _none
    listed_bytes: Callable[[], int] = _none


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, **OPTIONS)


def loop(loss_of: Step, update: Callable[[], object], clear: Callable[[], object]) -> Step:
    """Loss, backward, update, clear. Gradients go last: between steps all contenders hold what they must, no more."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        loss.backward()
        update()
        clear()
        return loss.detach()

    return step
