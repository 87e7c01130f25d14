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
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise ConfigError(
        f"{where} is {value!r:.60}, which a checkpoint cannot hold: it keeps numbers, texts, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given.

    Raises:
        CheckpointError: nothing that it returns.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, held),) = value.items()
        if kind == "tuple":
            return tuple(map(decode, held))
        if kind in ("dict", "counter"):
            pairs = {decode(key): decode(one) for key, one in held}
            return Counter(pairs) if kind == "counter" else pairs
        if kind == "tensor":
            dtype, shape, elements = held
            return torch.tensor(elements, dtype=DTYPES[dtype]).view(shape)
        if kind == "dtype":
            return DTYPES[held]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's document is damaged: {error}") from error
    raise CheckpointError(f"the checkpoint's document is damaged: it has a {kind!r:.40}")
