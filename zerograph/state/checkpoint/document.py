"""Values of Python as JSON and back: schedulers, hyperparameters and counts, without any code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint.index import DTYPES


def encode(value: Any, where: str) -> Any:
    """A value of plain Python types, small tensors or dtypes, in those that JSON has.

    Raises:
        ConfigError: something else; ``where`` names it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(one, f"{where}[{at}]") for at, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, f"{where}[{at}]") for at, one in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(key, where), encode(one, f"{where}[{key!r}]")] for key, one in value.items()]}
    if isinstance(value, Tensor) and value.dtype in DTYPES.values() and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    raise ConfigError(
        f"{where} is {value!r:.60}, which a checkpoint cannot hold: it keeps numbers, texts, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given.

    Raises:
        CheckpointError: nothing that it returns.
    """
    try:
        return _decoded(value)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's document is damaged: {error!s:.200}") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "dtype":
        return DTYPES[held]
    if not isinstance(held, list):
        raise TypeError(f"{held!r:.40} is no list")
    if kind == "tuple":
        return tuple(map(_decoded, held))
    if kind in ("dict", "counter"):
        pairs = {_decoded(key): _decoded(one) for key, one in held}
        if len(pairs) != len(held):
            raise ValueError("a key stands twice")
        if kind == "dict":
            return pairs
        if not all(type(one) is int for one in pairs.values()):
            raise TypeError("a counter of what is no number")
        return Counter(pairs)
    if kind == "tensor":
        dtype, shape, elements = held
        if not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError(f"{shape!r:.40} is no shape")
        if not all(isinstance(one, (int, float)) for one in elements):
            raise TypeError("a tensor of what are no numbers")
        return torch.tensor(elements, dtype=DTYPES[dtype]).view(shape)
    raise ValueError(f"it has a {kind!r:.40}")
