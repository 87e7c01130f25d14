"""Encode Python values as JSON and decode them: schedulers, hyperparameters and counts. Nothing is unpickled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint.index import DTYPES


def encode(value: Any, where: str) -> Any:
    """Return a value of plain Python types, small tensors and dtypes as a JSON value.

    Args:
        where: the value's name in error messages.

    Raises:
        ConfigError: the value has another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if is_dense and value.dtype in DTYPES.values() and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    raise ConfigError(
        f"{where} is {value!r:.60}, which a checkpoint cannot hold: it holds numbers, strings, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:
    """Return the value from which :func:`encode` made this JSON value.

    Raises:
        CheckpointError: :func:`encode` returns no such value.
    """
    try:
        return _decoded(value)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's document is damaged: {error!s:.200}") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dtype":
        return DTYPES[content]
    if not isinstance(content, list):
        raise TypeError(f"{content!r:.40} is not a list")
    if kind == "tuple":
        return tuple(map(_decoded, content))
    if kind in ("dict", "counter"):
        items = {_decoded(key): _decoded(item) for key, item in content}
        if len(items) != len(content):
            raise ValueError("a dict has the same key twice")
        if kind == "dict":
            return items
        if not all(type(count) is int for count in items.values()):
            raise TypeError("a count of a Counter is not an integer")
        return Counter(items)
    if kind == "tensor":
        dtype, shape, elements = content
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{shape!r:.40} is not a shape")
        if not all(isinstance(element, (int, float)) for element in elements):
            raise TypeError("an element of a tensor is not a number")
        return torch.tensor(elements, dtype=DTYPES[dtype]).view(shape)
    raise ValueError(f"{kind!r:.40} is not a kind of value")
