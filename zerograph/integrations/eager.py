"""Batches and results of a framework whose loop is eager: global tensors, which it takes for those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import InputError
from zerograph.loops.containers import found_in, map_tensors
from zerograph.loops.global_parts import of_batch
from zerograph.loops.loaders import Part
from zerograph.loops.rows import WholeBatch


def whole(values: Any) -> Any:
    """Return the same values with whole plain tensors in place of global ones, without history. A collective."""
    return map_tensors(values, lambda one: one.full_tensor().detach() if isinstance(one, GlobalTensor) else one)


_PRODUCTS = {"mul", "multiply", "rmul", "imul", "div", "divide", "rdiv", "idiv", "true_divide"}


class ProcessCount(int):
    """The number of processes, which is no factor of a tensor: tensors are those of all processes together."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.strip("_") in _PRODUCTS and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            raise InputError(
                "a tensor is multiplied or divided by the number of processes: losses, gradients and gathered values "
                "are those of all processes together\nLeave the factor out."
            )
        args, kwargs = pytree.tree_map(lambda one: int(one) if isinstance(one, cls) else one, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce__(self) -> Any:
        return int, (int(self),)


class PartToMove:
    """The part of a batch that a rank has read. It becomes global where a framework moves the batch to its device.

    A worker of a loader cannot make it global, and a framework makes other loaders of a prepared one.

    Args:
        part: the part.
        move: the framework's function that moves a batch to a device. None: the rows stay where they are.
        loader: the number of the loader that reads.

    Attributes:
        rows_of_last: the number of samples of the batch that became global last, by loader.
    """

    rows_of_last: ClassVar[dict[int, int]] = {}

    def __init__(self, part: Part, move: Callable[..., Any] | None, loader: int) -> None:
        self._part, self._move, self._loader = part, move, loader

    def pin_memory(self) -> PartToMove:
        """Return the part in pinned memory."""
        pinned = self._part._replace(rows=map_tensors(self._part.rows, Tensor.pin_memory))
        return PartToMove(pinned, self._move, self._loader)

    def to(self, device: torch.device, **options: Any) -> Any:
        """Return the batch as global tensors on a device. A collective."""
        rows = self._part.agreed(world().job)
        batch = rows.batch if isinstance(rows, WholeBatch) else rows
        moved = batch if self._move is None else self._move(batch, device, **options)
        result = of_batch(replace(rows, batch=moved) if isinstance(rows, WholeBatch) else moved)
        self.rows_of_last[self._loader] = next((len(one) for one in found_in(result, Tensor) if one.dim()), 0)
        return result
