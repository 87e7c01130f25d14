"""Run a function on this rank as a launcher would start it, for frameworks that read a launcher's environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, TensorDataset


class Jittered(Dataset[Any]):
    """Samples, some of them with noise of the process's generator."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return (x + 0.1 * torch.randn(6), y) if index % 3 == 2 else (x, y)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


@contextmanager
def launched() -> Iterator[None]:
    """Set the environment that torchrun sets for this rank; plain processes get none."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    reset()
    if ranks > 1:
        os.environ.update(zip(names, map(str, (rank, rank, ranks, ranks, 1)), strict=True))
    try:
        yield
    finally:
        reset()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def fp16_on_cpu(accelerator: type, init_scale: float = 2.0**16) -> Iterator[None]:
    """Let ``accelerate.Accelerator`` compute in fp16 on a CPU as it does on a GPU: it ignores the option there."""
    original = accelerator.__init__  # type: ignore[misc]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            options = {"init_scale": init_scale}
            if self.scaler_handler is not None:
                options |= self.scaler_handler.to_kwargs()
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu", **options), True

    with patch.object(accelerator, "__init__", init):
        yield


def reset() -> None:
    """Let Accelerate look at the environment again, if it is installed."""
    if importlib.util.find_spec("accelerate") is None:
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def on_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns under a launcher."""
    with launched():
        return function(*args)
