"""Checks that loaded hyperparameters and scheduler states have the types of those that they replace."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zerograph.errors import ConfigError

# Options of torch's optimizers that are None, True or False: None lets torch choose.
_SWITCHES = ("foreach", "fused")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Rounding may take the learning rate of a cosine schedule this far below 0.
_ROUNDING = 1e-9
# Numbers that every torch scheduler continues from.
_COUNTS = ("base_lrs", "_last_lr", "last_epoch", "_step_count")
# Keys that the state of a torch scheduler must have: load_state_dict() reads them without a check.
_REQUIRED = ("last_epoch", "lr_lambdas", "_schedulers", "_scale_fn_custom")


def check_hyperparameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that the hyperparameters of saved groups have possible values.

    Raises:
        ConfigError: one has not; names it.
    """
    kind = type(optimizer)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for key, value in group.items():
            if key == "params":
                continue
            wrong_switch = key in _SWITCHES and not (value is None or isinstance(value, bool))
            wrong_type = key in own and differs_in_type(value, own[key]) and not _is_default(kind, key, value)
            if wrong_switch or wrong_type or _is_impossible(kind, key, value, own.get(key)):
                raise ConfigError(_impossible_value(kind, key, value, own))
        refused = _refused(kind, own, group)
        if refused is not None:
            raise ConfigError(_impossible_value(kind, refused, group[refused], own))


def _impossible_value(kind: type, key: str, value: Any, own: Mapping[str, Any]) -> str:
    return f"the state says {key} = {value!r:.60} of {kind.__name__}, which has {own.get(key)!r:.60}: no such value"


def _is_impossible(kind: type, key: str, value: Any, own: Any) -> bool:
    """Return True for NaN, for an infinite rate, and for a bool in place of a number or the other way round."""
    if repr(value) == repr(own) or _is_default(kind, key, value):
        return False
    must_be_finite = key in _RATES or _is_torch_class(kind)
    if any(math.isnan(number) or (must_be_finite and math.isinf(number)) for number in _floats(value)):
        return True
    if isinstance(own, bool):
        return isinstance(value, (int, float)) and value not in (0, 1)
    return isinstance(own, float) and isinstance(value, bool)


def _floats(value: Any) -> list[float]:
    """Return all numbers in a value: also those in lists, tuples and dicts, and in tensors of one element."""
    if isinstance(value, torch.Tensor):
        return [float(value)] if value.numel() == 1 and not value.is_complex() else []
    if isinstance(value, (list, tuple)):
        return [number for element in value for number in _floats(element)]
    if isinstance(value, Mapping):
        return [number for element in value.values() for number in _floats(element)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    try:
        return [float(value)]
    except OverflowError:
        return [math.inf]


def _is_torch_class(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.")


def _refused(kind: type, own: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """Return the hyperparameter for which a torch optimizer's constructor refuses a group.

    None if it accepts the group, if it refuses the optimizer's own group too, or for other optimizers.
    """
    if not _is_torch_class(kind) or _refuses(kind, own) or not _refuses(kind, {**own, **group}):
        return None
    return next((key for key in group if key in own and _refuses(kind, {**own, key: group[key]})), None)


def _refuses(kind: type, group: Mapping[str, Any]) -> bool:
    # The excluded options choose an implementation.
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
    except Exception:  # The class may need other parameters.
        return False
    return False


def _is_default(kind: type, key: str, value: Any) -> bool:
    """Return True if the value is the constructor's default, which may have another type than other values."""
    argument = inspect.signature(kind).parameters.get(key)
    return argument is not None and repr(argument.default) == repr(value)


def check_scheduler(scheduler: LRScheduler, state: Any) -> None:
    """Check that the scheduler's ``load_state_dict()`` can load the state and still be the same scheduler.

    Raises:
        ConfigError: it cannot; names the key.
    """
    kind, own = type(scheduler), scheduler.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ConfigError(f"{state!r:.60} is no state of {kind.__name__}: give what state_dict() of it returned")
    missing = [
        key for key in _REQUIRED if key in own and (key not in state or (state[key] is None and own[key] is not None))
    ]
    if missing or not own.keys() & state.keys():
        raise ConfigError(f"{state!r:.60} is no state of {kind.__name__}: it lacks {', '.join(missing or own)}")
    for key, value in state.items():
        # Every key becomes an attribute: it must not hide one of the class.
        hides = key not in own and (key == "optimizer" or hasattr(kind, key))
        numbers = _floats(value) if key in own and repr(value) != repr(own[key]) else []
        impossible = key in _COUNTS and not all(map(math.isfinite, numbers))
        impossible = impossible or (_is_torch_class(kind) and any(map(math.isnan, numbers)))
        if hides or impossible or (key in own and differs_in_type(value, own[key], allow_none=True)):
            raise ConfigError(f"the state says {key!r:.60} = {value!r:.60} of {kind.__name__}: no such value")
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        check_scheduler(inner, inner_state)


def differs_in_type(loaded: Any, own: Any, *, allow_none: bool = False) -> bool:
    """Return True if a loaded value has another type than the value that it replaces. All numbers are of one type.

    Args:
        allow_none: None may replace any value; otherwise only None and a bool.
    """
    if own is None or loaded is None:
        return loaded is None and not (allow_none or own is None or isinstance(own, bool))
    if isinstance(own, (list, tuple)) and isinstance(loaded, (list, tuple)):
        plain = all(isinstance(element, (bool, int, float, str)) for element in (*own, *loaded))
        if len(own) != len(loaded) and not (allow_none and plain and isinstance(own, list)):
            return True
        return any(differs_in_type(a, b, allow_none=allow_none) for a, b in zip(loaded, own, strict=False))
    if isinstance(own, dict) and isinstance(loaded, dict):
        return any(
            key in own and differs_in_type(value, own[key], allow_none=allow_none) for key, value in loaded.items()
        )
    return _kind(loaded) != _kind(own)


def _kind(value: Any) -> str:
    number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    return "number" if number else type(value).__name__
