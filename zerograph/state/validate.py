"""Whether loaded hyperparameters and schedulers are of the kind of those whose place they take."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.errors import ConfigError

# Of torch's optimizers: None lets torch decide, and what it has decided says nothing of what else they may be.
_SWITCHES = ("foreach", "fused")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Cosine schedules may end as little as this below 0.
_ROUNDING = 1e-9
# Numbers that every scheduler of torch goes on from.
_COUNTED = ("base_lrs", "_last_lr", "last_epoch", "_step_count")
# What a state of torch's schedulers must have: they count by it, or take it out unasked.
_TAKEN = ("last_epoch", "lr_lambdas", "_schedulers", "_scale_fn_custom")


def check_hyperparameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a group says of a hyperparameter what it could not be.

    Raises:
        ConfigError: naming it.
    """
    kind = type(optimizer)
    for mine, group in zip(optimizer.param_groups, groups, strict=True):
        for key, value in group.items():
            switch = key in _SWITCHES and not (value is None or isinstance(value, bool))
            other = key != "params" and key in mine and unlike(value, mine[key]) and not _is_default(kind, key, value)
            if switch or other or (key != "params" and _is_impossible(kind, key, value, mine.get(key))):
                raise ConfigError(_no_such_value(kind, key, value, mine))
        refused = _refused(kind, mine, group)
        if refused is not None:
            raise ConfigError(_no_such_value(kind, refused, group[refused], mine))


def _no_such_value(kind: type, key: str, value: Any, mine: Mapping[str, Any]) -> str:
    return f"the state says {key} = {value!r:.60} of {kind.__name__}, which has {mine.get(key)!r:.60}: no such value"


def _is_impossible(kind: type, key: str, value: Any, mine: Any) -> bool:
    """Return whether a number is none, infinite where that makes no sense, or true where a quantity belongs."""
    if repr(value) == repr(mine) or _is_default(kind, key, value):
        return False
    numbers = _floats(value)
    endless = key in _RATES or _is_torchs(kind)
    if any(math.isnan(one) or (endless and math.isinf(one)) for one in numbers):
        return True
    if isinstance(mine, bool):
        return isinstance(value, (int, float)) and value not in (0, 1)
    return isinstance(mine, float) and isinstance(value, bool)


def _floats(value: Any) -> list[float]:
    """Return every number in a value: lists, tuples and dicts are looked into, and tensors of one element read."""
    if isinstance(value, torch.Tensor):
        return [float(value)] if value.numel() == 1 and not value.is_complex() else []
    if isinstance(value, (list, tuple)):
        return [number for one in value for number in _floats(one)]
    if isinstance(value, Mapping):
        return [number for one in value.values() for number in _floats(one)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    try:
        return [float(value)]
    except OverflowError:
        return [math.inf]


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.")


def _refused(kind: type, mine: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """Return the hyperparameter for which torch's own class refuses a group; None if it takes it, or refuses ours."""
    if not _is_torchs(kind) or _refuses(kind, mine) or not _refuses(kind, {**mine, **group}):
        return None
    return next((key for key in group if key in mine and _refuses(kind, {**mine, key: group[key]})), None)


def _refuses(kind: type, group: Mapping[str, Any]) -> bool:
    # "betas" or "lr"; how it is computed says nothing of values.
    names = inspect.signature(kind).parameters.keys() - {"params", "capturable", "differentiable", *_SWITCHES}
    values = {name: group[name] for name in names if name in group}
    rate = values.get("lr")
    if isinstance(rate, float) and -_ROUNDING < rate < 0:
        values["lr"] = 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **values)
    except ValueError:
        return True
    except Exception:  # It may want parameters of another kind.
        return False
    return False


def _is_default(kind: type, key: str, value: Any) -> bool:
    """Whether the class itself chooses it, as Adafactor ``eps = (None, 1e-3)``, whatever kind other values are of."""
    found = inspect.signature(kind).parameters.get(key)
    return found is not None and repr(found.default) == repr(value)


def check_scheduler(scheduler: LRScheduler, state: Any) -> None:
    """Raise if the scheduler's ``load_state_dict()`` could not take the state, or would make something else of it.

    Raises:
        ConfigError: naming what is wrong.
    """
    kind, mine = type(scheduler), scheduler.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ConfigError(f"{state!r:.60} is no state of {kind.__name__}: give what state_dict() of it returned")
    lacking = [
        key for key in _TAKEN if key in mine and (key not in state or (state[key] is None and mine[key] is not None))
    ]
    if lacking or not mine.keys() & state.keys():
        raise ConfigError(f"{state!r:.60} is no state of {kind.__name__}: it lacks {', '.join(lacking or mine)}")
    for key, value in state.items():
        # It becomes an attribute, and must not hide what the class says.
        hides = key not in mine and (key == "optimizer" or hasattr(kind, key))
        numbers = _floats(value) if key in mine and repr(value) != repr(mine[key]) else []
        lost = any(not math.isfinite(one) for one in numbers) if key in _COUNTED else False
        lost = lost or (kind.__module__.startswith("torch.optim.") and any(map(math.isnan, numbers)))
        if hides or lost or (key in mine and unlike(value, mine[key], nothing=True)):
            raise ConfigError(f"the state says {key!r:.60} = {value!r:.60} of {kind.__name__}: no such value")
    for inner, one in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        check_scheduler(inner, one)


def unlike(theirs: Any, mine: Any, *, nothing: bool = False) -> bool:
    """Whether a value that was read is of another kind than the one whose place it is to take.

    Args:
        nothing: None may take any place; else only that of a switch, which torch then decides.
    """
    if mine is None or theirs is None:
        return theirs is None and not (nothing or mine is None or isinstance(mine, bool))
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        plain = all(isinstance(one, (bool, int, float, str)) for one in (*mine, *theirs))
        if len(mine) != len(theirs) and not (nothing and plain and isinstance(mine, list)):
            return True
        return any(unlike(a, b, nothing=nothing) for a, b in zip(theirs, mine, strict=False))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return any(key in mine and unlike(one, mine[key], nothing=nothing) for key, one in theirs.items())
    return _kind(theirs) != _kind(mine)


def _kind(value: Any) -> str:
    number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    return "number" if number else type(value).__name__
