"""Checks that an optimizer can load a state, before anything changes, and its conversion by the optimizer's class."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import ConfigError
from zerograph.optim.sampling import Sample
from zerograph.state.hyperparameter_checks import check_hyperparameters

Groups = Sequence[Mapping[str, Any]]
Shape = tuple[int, ...]


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


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Check that ``state`` is a state dict of such an optimizer.

    Raises:
        ConfigError: it is not, or it is of another optimizer or of other parameters.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    ):
        raise ConfigError(f"{state!r:.60} is no state of an optimizer: it has no param_groups with their params")
    states = state.get("state", {})
    if not isinstance(states, Mapping) or not all(isinstance(entries, Mapping) for entries in states.values()):
        raise ConfigError(f"{states!r:.60} is no state of parameters: give what state_dict() of the optimizer returned")
    check_groups(optimizer, groups)
    _check_numbers(optimizer, groups, states)
    check_hyperparameters(optimizer, groups)
    shapes = {
        number: {name: _shape(value) for name, value in entries.items() if value is not None}
        for number, entries in states.items()
    }
    check_entries(optimizer, groups, shapes)


def check_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Check that these are groups of such an optimizer.

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


def check_entries(
    optimizer: torch.optim.Optimizer, groups: Groups, shapes: Mapping[Any, Mapping[str, Shape | str]]
) -> None:
    """Check that each parameter's state is what the optimizer's update needs with the hyperparameters of ``groups``.

    Unknown entries are accepted, as in torch.

    Args:
        shapes: the shape of each entry of a parameter's state, by parameter number and entry name; the name of the type
            if an entry is not a tensor or number.

    Raises:
        ConfigError: it is not; names the parameter.
    """
    kind = type(optimizer).__name__
    entries = _Entries(optimizer)
    converted, _ = convert_state(optimizer, groups, {})
    for own, saved, loaded in zip(optimizer.param_groups, groups, converted, strict=True):
        for parameter, number in zip(own["params"], saved["params"], strict=True):
            saved_shapes = shapes.get(number)
            needed = entries.of({**own, **loaded}, parameter) if saved_shapes else None
            if not saved_shapes or needed is None:
                continue
            if not needed.keys() <= saved_shapes.keys():
                raise ConfigError(
                    f"the state has {', '.join(sorted(saved_shapes))} of parameter {number} of {kind}, whose update "
                    f"needs {', '.join(needed)}\n"
                    "It is the state of another optimizer, or of parameters in another order."
                )
            for name, shape in needed.items():
                if saved_shapes[name] != shape:
                    raise ConfigError(
                        f"{name} of parameter {number} of {kind} is of shape {shape}, the loaded state has one of "
                        f"{saved_shapes[name]}\nIt is the state of another model, or of parameters in another order."
                    )


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
        kind = (constants, parameter.dtype, parameter.device)
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


def _shape(value: Any) -> Shape | str:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, Number) else type(value).__name__
