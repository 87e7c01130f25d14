"""Random numbers that a dataset draws for a sample: those of each rank are its own, since it reads other samples.

The generators of the script stay as they are, equal on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class SeededWorker:
    """The start of a loader's worker: its generators are those of this rank.

    Args:
        part: which part of each batch the rank reads.
        init: the script's own ``worker_init_fn``.
    """

    part: int
    init: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        """Seed the generators of a worker. Those of the first part are as in one process."""
        if self.part:
            # Workers of a rank have consecutive seeds.
            seed(torch.initial_seed() + self.part * 0x9E3779B9)
        if self.init is not None:
            self.init(worker)


def seed(number: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.default_generator.manual_seed(number % 2**63)
    random.seed(number)
    numpy.random.seed(number % 2**32)


def states() -> tuple[Any, ...]:
    """Return the states of the generators of torch, Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def restore(before: tuple[Any, ...]) -> None:
    """Restore states of generators."""
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])
