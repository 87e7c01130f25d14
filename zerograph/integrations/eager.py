"""Batches and results of a framework whose loop is eager: global tensors, which it takes for those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.eager.tensor import GlobalTensor
from zerograph.errors import InputError
from zerograph.loops.containers import map_tensors
from zerograph.loops.global_parts import of_parts
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


class RowsOfRank:
    """Collate this rank's rows of a batch, which become global where the framework moves the batch to its device.

    A worker of a loader cannot make them global, and a framework makes other loaders of a prepared one.

    Args:
        collate: the collator of this rank's rows.
        move: the framework's function that moves a batch to a device. None: the rows stay where they are.
    """

    def __init__(self, collate: Callable[[Any], Any], move: Callable[..., Any] | None) -> None:
        self._collate, self._move = collate, move

    def __call__(self, samples: Any) -> _Rows:
        """Collate the rows of this rank."""
        return _Rows(self._collate(samples), self._move)


class _Rows:
    """The rows of a batch that one rank has."""

    def __init__(self, rows: Any, move: Callable[..., Any] | None) -> None:
        self._rows, self._move = rows, move

    def pin_memory(self) -> _Rows:
        """Return the rows in pinned memory."""
        return _Rows(map_tensors(self._rows, Tensor.pin_memory), self._move)

    def to(self, device: torch.device, **options: Any) -> Any:
        """Return the batch as global tensors on a device. A collective."""
        rows = self._rows
        batch = rows.batch if isinstance(rows, WholeBatch) else rows
        moved = batch if self._move is None else self._move(batch, device, **options)
        parts = replace(rows, batch=moved) if isinstance(rows, WholeBatch) else moved
        return of_parts(parts, "a batch of a prepared loader")
