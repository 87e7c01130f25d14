"""Checks that a graph, its optimizers and its schedulers can load a state, before anything changes."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.ir.grad_scaler import GradScaler
from zerograph.optim.sampling import Sample
from zerograph.optim.surroundings import constructed_for
from zerograph.state.schema import GRAPH, OPTIMIZER, check

Groups = Sequence[Mapping[str, Any]]
Shape = tuple[int, ...]
# Options of torch's optimizers that are None, True or False: None lets torch choose.
_SWITCHES = ("foreach", "fused")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Rounding may take the learning rate of a cosine schedule this far below 0.
_ROUNDING = 1e-9
# Numbers that every torch scheduler continues from.
_COUNTS = ("base_lrs", "_last_lr", "last_epoch", "_step_count")
# Keys that the state of a torch scheduler must have: load_state_dict() reads them without a check.
_REQUIRED = ("last_epoch", "lr_lambdas", "_schedulers", "_scale_fn_custom")


def check_state(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[LRScheduler | None],
    scaler: GradScaler | None,
    state: Any,
    impossible: type[ZeroGraphError] = ConfigError,
) -> None:
    """Check that a graph can load ``state``, which :func:`check_form` accepts. Modules are not checked.

    Args:
        optimizers, schedulers, scaler: those of the graph.
        state: its tensors may be on the meta device.
        impossible: the class of errors about values that no state of such an optimizer has.

    Raises:
        ConfigError: an entry does not fit the optimizers, schedulers or scaler.
    """
    for key in ("optimizers", "lr_schedulers"):
        if key in state and len(state[key]) != len(optimizers):
            raise ConfigError(f"the graph has {len(optimizers)} optimizers, the state {len(state[key])} {key}")
    for optimizer, saved in zip(optimizers, state.get("optimizers", ()), strict=False):
        check_optimizer_state(optimizer, saved, impossible)
    for scheduler, saved in zip(schedulers, state.get("lr_schedulers", ()), strict=False):
        if scheduler is not None and saved is not None:
            check_scheduler(scheduler, saved, impossible)
    if scaler is not None and state.get("grad_scaler") is not None:
        try:
            scaler.check_state(state["grad_scaler"])
        except ConfigError as error:
            raise impossible(str(error)) from error


def check_form(state: Any) -> None:
    """Check that the entries of a graph's state have possible names, types and ranges.

    Raises:
        ConfigError: one has not; names it.
    """
    try:
        if isinstance(state, Mapping) and not state:
            raise ConfigError(f"{_NO_STATE}: it is empty")
        check(state, GRAPH, _NO_STATE)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nGive what state_dict() returned, or some of it: of a plain module "
            '{"modules": {"model": state}}, by its attribute, of a plain optimizer {"optimizers": [state]}.'
        ) from None


_NO_STATE = "not a state of a graph"


def convert_state(
    optimizer: torch.optim.Optimizer, groups: Groups, states: Mapping[Any, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], Mapping[Any, dict[str, Any]]]:
    """Return groups and states as ``optimizer.load_state_dict()`` would load them. The optimizer is not changed.

    The optimizer's class may convert them: it adds what older states lack, and AdamW ignores that a state is of Adam.

    Args:
        groups: saved groups.
        states: saved state of each parameter, by parameter.

    Returns:
        Copies of the groups, without parameters, and the state of each parameter.
    """
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), defaults=dict(optimizer.defaults))
    copies = [
        {**copy.deepcopy({key: value for key, value in saved.items() if key != "params"}), "params": own["params"]}
        for own, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    nonempty = defaultdict(dict, {parameter: dict(state) for parameter, state in states.items() if state})
    twin.__setstate__({"state": nonempty, "param_groups": copies})
    return [{key: value for key, value in group.items() if key != "params"} for group in twin.param_groups], twin.state


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Any, impossible: type[ZeroGraphError] = ConfigError
) -> None:
    """Check that ``state`` is a state dict of such an optimizer.

    Args:
        impossible: as for :func:`check_state`.

    Raises:
        ConfigError: it is not, or it is of another optimizer or of other parameters.
    """
    check(state, OPTIMIZER, f"not a state of {type(optimizer).__name__}")
    groups, states = state["param_groups"], state.get("state", {})
    converted = _check_groups(optimizer, groups)
    _check_numbers(optimizer, groups, states)
    _check_hyperparameters(optimizer, groups, impossible)
    _check_entries(optimizer, groups, converted, states)


def _check_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> Groups:
    """Check that these are groups of such an optimizer, and return them as it would load them.

    Raises:
        ConfigError: the groups have other sizes, or the hyperparameters of another optimizer.
    """
    kind = type(optimizer).__name__
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if own_sizes != saved_sizes:
        raise ConfigError(
            f"{kind} has groups of {own_sizes} parameters, the loaded state of {saved_sizes}\n"
            "Build the optimizer as it was when the state was saved."
        )
    converted, _ = convert_state(optimizer, groups, {})
    for own, saved, loaded in zip(optimizer.param_groups, groups, converted, strict=True):
        missing = [key for key in optimizer.defaults if key in own and key not in loaded]
        # Schedulers and users may add keys to groups, or save a part of a group: neither alone is an error.
        unknown = [key for key in saved if key not in own and key != "initial_lr"]
        if missing and unknown:
            raise ConfigError(
                f"the state is of another optimizer than {kind}: its groups have {', '.join(unknown[:3])}, and no "
                f"{', '.join(missing[:3])}\nBuild the optimizer as it was when the state was saved."
            )
    return converted


def _check_numbers(optimizer: torch.optim.Optimizer, groups: Groups, states: Mapping[Any, Any]) -> None:
    """Check that every parameter has a number of its own, and that the states are of these parameters."""
    numbers = [number for group in groups for number in group["params"]]
    try:
        distinct = len(set(numbers)) == len(numbers)
    except TypeError:
        distinct = False
    if not distinct:
        raise ConfigError(
            f"the parameters of {type(optimizer).__name__} have the numbers {numbers!r:.60}: give each its own"
        )
    if states and not states.keys() & set(numbers):
        raise ConfigError(
            f"the parameters of {type(optimizer).__name__} have the numbers {numbers!r:.60}, "
            f"their state is of {list(states)!r:.60}"
        )


def _check_entries(
    optimizer: torch.optim.Optimizer, groups: Groups, converted: Groups, states: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Check that each parameter's state is what the optimizer's update needs with the hyperparameters of ``groups``.

    Unknown entries are accepted, as in torch.

    Args:
        converted: the groups as the optimizer loads them.
        states: the state of each parameter, by its number in ``groups``.

    Raises:
        ConfigError: it is not; names the parameter.
    """
    kind = type(optimizer).__name__
    entries = _Entries(optimizer)
    for own, saved, loaded in zip(optimizer.param_groups, groups, converted, strict=True):
        for parameter, number in zip(own["params"], saved["params"], strict=True):
            shapes = {name: _shape(value) for name, value in states.get(number, {}).items() if value is not None}
            if not shapes and constructed_for(optimizer, parameter):
                raise ConfigError(
                    f"the state has nothing of parameter {number} of {kind}, whose step() needs what its constructor "
                    "has made\nLoad a state for every parameter, or leave out the optimizer's."
                )
            needed = entries.of({**own, **loaded}, parameter) if shapes else None
            if not shapes or needed is None:
                continue
            if not needed.keys() <= shapes.keys():
                raise ConfigError(
                    f"the state has {', '.join(sorted(shapes))} of parameter {number} of {kind}, whose update "
                    f"needs {', '.join(needed)}\n"
                    "It is the state of another optimizer, or of parameters in another order."
                )
            for name, shape in needed.items():
                if shapes[name] != shape:
                    raise ConfigError(
                        f"{name} of parameter {number} of {kind} is of shape {shape}, the loaded state has one of "
                        f"{shapes[name]}\nIt is the state of another model, or of parameters in another order."
                    )


def _shape(value: Any) -> Shape | str:
    """Return the shape of a tensor or number, and the type's name of anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, Number) else type(value).__name__


class _Entries:
    """The names and shapes of an optimizer's state after the first update. Equal updates are traced once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # None stands for the parameter's own shape.
        self._known: dict[Hashable, Mapping[str, Shape | None]] = {}

    def of(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Shape] | None:
        """Return the shapes of a parameter's state by name; None if the update cannot be traced.

        The error for that is raised when the step is compiled.
        """
        constants = tuple((key, repr(value)) for key, value in group.items() if key not in ("params", "lr"))
        constructed = repr(constructed_for(self._optimizer, parameter))
        kind = (constants, constructed, parameter.dtype, parameter.device)
        shapes = self._known.get(kind, self._known.get((*kind, parameter.shape)))
        if shapes is None:
            # In the state of a 0-d parameter, moments and the step count would have equal shapes.
            shape = parameter.shape or torch.Size((1,))
            sample = Sample(self._optimizer, group, shape, parameter.dtype, parameter.device)
            try:
                _, state = sample.trace(None)
            except Exception:
                # A user's class may raise anything. It raises again at compilation, with its line.
                return None
            shapes = {name: None if value.shape == shape else tuple(value.shape) for name, value in state.items()}
            self._known[(*kind, parameter.shape) if sample.asks_sizes else kind] = shapes
        return {name: tuple(parameter.shape) if shape is None else shape for name, shape in shapes.items()}


def _check_hyperparameters(optimizer: torch.optim.Optimizer, groups: Groups, impossible: type[ZeroGraphError]) -> None:
    """Check that the hyperparameters of saved groups have possible values.

    Raises:
        impossible: one has not; names it.
    """
    kind = type(optimizer)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        wrong = [key for key, value in group.items() if key != "params" and not _may_be(kind, key, value, own)]
        for key in wrong or _refused(kind, own, group):
            raise impossible(
                f"the state says {key} = {group[key]!r:.60} of {kind.__name__}, which has {own.get(key)!r:.60}: "
                "no such value"
            )


def _may_be(kind: type, key: str, value: Any, own: Mapping[str, Any]) -> bool:
    """Return False for a value of another type, NaN, an infinite rate, and a bool for a number or the reverse."""
    if key in _SWITCHES and not (value is None or isinstance(value, bool)):
        return False
    argument, present = inspect.signature(kind).parameters.get(key), own.get(key)
    # The constructor's default may have another type than other values.
    if repr(value) in (repr(present), None if argument is None else repr(argument.default)):
        return True
    must_be_finite = key in _RATES or _is_torch_class(kind)
    if any(math.isnan(number) or (must_be_finite and math.isinf(number)) for number in _floats(value)):
        return False
    if key in own and _differs_in_type(value, present):
        return False
    if isinstance(present, bool):
        return value in (0, 1) or not isinstance(value, (int, float))
    return not (isinstance(present, float) and isinstance(value, bool))


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


def _refused(kind: type, own: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters for which a torch optimizer's constructor refuses a group.

    There are none if it refuses the optimizer's own group too, and for other optimizers.
    """
    if not _is_torch_class(kind) or _refuses(kind, own) or not _refuses(kind, {**own, **group}):
        return []
    return [key for key in group if key in own and _refuses(kind, {**own, key: group[key]})]


def _refuses(kind: type, group: Mapping[str, Any]) -> bool:
    # The excluded options choose an implementation.
    names = inspect.signature(kind).parameters.keys() - {"params", "capturable", "differentiable", *_SWITCHES}
    values = {name: group[name] for name in names if name in group}
    rate = values.get("lr")
    if isinstance(rate, float) and -_ROUNDING < rate < 0:
        values["lr"] = 0.0
    try:
        with warnings.catch_warnings(action="ignore"):
            kind([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **values)
    except ValueError:
        return True
    except Exception:  # The class may need other parameters.
        return False
    return False


def check_scheduler(scheduler: LRScheduler, state: Any, impossible: type[ZeroGraphError] = ConfigError) -> None:
    """Check that the scheduler's ``load_state_dict()`` can load the state and still be the same scheduler.

    Raises:
        impossible: it cannot; names the key.
    """
    kind, own = type(scheduler), scheduler.state_dict()
    missing = [
        key for key in _REQUIRED if key in own and (key not in state or (state[key] is None and own[key] is not None))
    ]
    if missing or not own.keys() & state.keys():
        raise impossible(f"{state!r:.60} is no state of {kind.__name__}: it lacks {', '.join(missing or own)}")
    for key, value in state.items():
        # Every key becomes an attribute: it must not hide one of the class.
        hides = key not in own and (key == "optimizer" or hasattr(kind, key))
        numbers = _floats(value) if key in own and repr(value) != repr(own[key]) else []
        no_number = key in _COUNTS and not all(map(math.isfinite, numbers))
        no_number = no_number or (_is_torch_class(kind) and any(map(math.isnan, numbers)))
        if hides or no_number or (key in own and _differs_in_type(value, own[key], allow_none=True)):
            raise impossible(f"the state says {key!r:.60} = {value!r:.60} of {kind.__name__}: no such value")
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers") or (), strict=False):
        check_scheduler(inner, inner_state, impossible)


def _differs_in_type(loaded: Any, own: Any, *, allow_none: bool = False) -> bool:
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
        return any(_differs_in_type(a, b, allow_none=allow_none) for a, b in zip(loaded, own, strict=False))
    if isinstance(own, dict) and isinstance(loaded, dict):
        return any(
            key in own and _differs_in_type(value, own[key], allow_none=allow_none) for key, value in loaded.items()
        )
    return _kind(loaded) != _kind(own)


def _kind(value: Any) -> str:
    number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    return "number" if number else type(value).__name__
