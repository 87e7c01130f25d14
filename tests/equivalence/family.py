"""A model family of the equivalence tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """A tiny model of one kind and batches for it.

    Attributes:
        make: builds the module, with the weights that torch's seed gives; its ``forward(*batch)`` is the loss.
        samples_meet: samples read one another's activations, so that these travel.
        batch: so many samples from a generator, each tensor with the samples along dimension 0.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    samples_meet: bool = False
